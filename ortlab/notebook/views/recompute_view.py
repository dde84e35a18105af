"""Widget for the recompute plans of a model: a table of checkboxes, and sliders for batch sizes.

It consists of Jupyter's own controls, which support labels, keyboard and themes.
"""

from __future__ import annotations

import html
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets
from IPython.core.getipython import get_ipython

from ortlab.engines.plan_names import OFF
from ortlab.graph.recompute_plans import signed
from ortlab.notebook.views import display
from ortlab.notebook.views.closing import close_all, ends_with_cell
from ortlab.utils.process_memory import memory

if TYPE_CHECKING:
    from ortlab.graph.recompute_plans import RecomputePlans, Saving

_MOST_TIMES = 64
"""Maximum of a slider, as a multiple of the last call's size."""
_CLASS = "ortlab-recompute"
_HEADS = ("recompute", "modules", "saved after forward", "step memory saved", "cost per step")
_WIDTHS = "minmax(180px, max-content) repeat(4, minmax(70px, max-content))"


class RecomputeView(ipywidgets.VBox):  # type: ignore[misc]
    """Control for recompute plans.

    Checkboxes select plans, and a button that says what they save applies them from the next step
    on; sliders only change the sizes that the figures are for. Errors are shown below the table and
    not raised in the kernel.

    Args:
        plans: The model's recompute plans.
    """

    def __init__(self, plans: RecomputePlans) -> None:
        self._plans = plans
        self._ticks: dict[str, ipywidgets.Checkbox] = {}
        self._figures: dict[str, list[ipywidgets.HTML]] = {}
        self._listening = True
        self._sliders = {
            name: ipywidgets.SelectionSlider(
                options=_steps(size),
                value=size,
                description=name,
                continuous_update=False,
            )
            for name, size in plans.dims.items()
            if size is not None
        }
        for slider in self._sliders.values():
            slider.observe(self._sized, names="value")
        self._budget = ipywidgets.Text(
            description="fits in",
            placeholder="2GiB",
            continuous_update=False,
            layout=ipywidgets.Layout(width="200px"),
        )
        self._budget.observe(lambda _: self._select_least(), names="value")
        self._budget.on_msg(self._entered)
        buttons = [
            _button(
                "all layers",
                "Recompute every list of layers",
                lambda: self._select(self._plans.layers),
            ),
            _button("none", "Keep every activation", lambda: self._select(())),
            _button("measure", "Time the model's own steps", self._measure),
            _button(
                "fastest that fits",
                "Select the fastest plan that fits into the memory on the left",
                self._select_least,
            ),
        ]
        self._apply = _button("", "Use the selected plans from the next step on", self._apply_ticks)
        self._apply.button_style = "primary"
        self._apply.layout.align_self = "flex-start"
        self._said = ipywidgets.HTML()
        self._said.add_class("ortlab-said")
        self._before = ipywidgets.HTML()
        super().__init__(
            [
                *self._sliders.values(),
                self._before,
                self._table(),
                ipywidgets.HBox(
                    [*buttons[:3], self._budget, buttons[3]],
                    layout=ipywidgets.Layout(flex_flow="row wrap"),
                ),
                self._apply,
                self._said,
                display.controls_guard(),
            ]
        )
        self._draw()
        self._select(self._plans.parts(self._plans.chosen))

    def _table(self) -> ipywidgets.GridBox:
        cells: list[Any] = [ipywidgets.HTML(f"<b>{head}</b>") for head in _HEADS]
        for plan in self._plans.names:
            tick = ipywidgets.Checkbox(description=plan, indent=False)
            tick.observe(self._ticked, names="value")
            self._ticks[plan] = tick
            self._figures[plan] = [ipywidgets.HTML() for _ in _HEADS[1:]]
            cells += [tick, *self._figures[plan]]
        layout = ipywidgets.Layout(
            grid_template_columns=_WIDTHS, grid_gap="0 16px", overflow="auto"
        )
        return ipywidgets.GridBox(cells, layout=layout)

    def _draw(self) -> None:
        """Show the savings of each plan for the sliders' sizes."""
        for plan, cells in self._figures.items():
            texts = _figures(self._plans.savings(plan), self._plans)
            for cell, text in zip(cells, texts, strict=True):
                cell.value = html.escape(text)

    def _selected(self) -> list[str]:
        """Return the ticked plans; those within another one add nothing to it."""
        ticked = [plan for plan, tick in self._ticks.items() if tick.value]
        return [p for p in ticked if not any(p.startswith(f"{other}.") for other in ticked)]

    def _select(self, plans: Collection[str]) -> None:
        """Tick plans and no others."""
        self._listening = False
        for plan, tick in self._ticks.items():
            tick.value = plan in plans
        self._listening = True
        self._said_of(self._offer)

    def _ticked(self, _: object) -> None:
        if self._listening:
            self._said_of(self._offer)

    def _offer(self) -> str:
        """Say on the button what the ticks save. Returns an empty text."""
        plans, plan = self._selected(), ",".join(self._selected()) or OFF
        self._apply.disabled, self._apply.description = True, "not possible"
        saving, active = self._plans.savings(plan), self._plans.parts(self._plans.chosen)
        same = set(self._plans.parts(plan)) == set(active)
        self._apply.description = _effect(plans, saving, self._plans, active=same)
        self._apply.disabled = same
        peak = self._plans.memory(plan).peak_bytes()
        self._before.value = html.escape(
            f"step memory: {memory(self._plans.memory(OFF).peak_bytes())} without recompute, "
            f"{memory(peak)} with the selected plans"
        )
        return ""

    def _apply_ticks(self) -> None:
        plan = ",".join(self._selected()) or OFF
        self._said_of(lambda: self._take(plan))

    def _take(self, plan: str) -> str:
        raised = self._plans.raises(plan)
        self._plans.choose(plan)
        self._offer()
        return f"{plan} from the next step on" + (f"; it {raised}" if raised else "")

    def _sized(self, _: object) -> None:
        sizes = {name: slider.value for name, slider in self._sliders.items()}
        self._plans = self._plans.at(**sizes)
        self._draw()
        self._said_of(self._offer)

    def _entered(self, _: object, content: Mapping[str, Any], __: object) -> None:
        """Select again when Enter is pressed in a field that has not changed."""
        if content.get("event") == "submit":
            self._select_least()

    def _select_least(self) -> None:
        if not self._budget.value.strip():
            self._say("enter the available memory, for example 2GiB")
            return

        def select() -> str:
            plan = self._plans.least_time(self._budget.value)
            self._draw()  # it may have measured
            self._select(self._plans.parts(plan))
            return f"{plan} is the fastest that fits; the button applies it"

        self._said_of(select)

    def _measure(self) -> None:
        self._say("timing the model's own steps")

        def measure() -> str:
            self._plans.measure()
            self._draw()
            return "measured"

        self._said_of(measure)

    def _said_of(self, act: Callable[[], str]) -> None:
        """Run an action and show its result or error; timing a model may raise any exception."""
        try:
            self._say(act())
        except Exception as error:  # noqa: BLE001
            self._say(str(error) or type(error).__name__)

    def _say(self, text: str) -> None:
        self._said.value = html.escape(text)


def _button(label: str, told: str, act: Callable[[], None]) -> ipywidgets.Button:
    button = ipywidgets.Button(
        description=label, tooltip=told, layout=ipywidgets.Layout(width="auto")
    )
    button.on_click(lambda _: act())
    return button


def _steps(size: int) -> list[int]:
    """Return the values of a slider: `size`, and `size` divided or multiplied by 2, 4, ..."""
    found, step = {1, size}, size
    while step > 1:
        step //= 2
        found.add(max(step, 1))
    step = size
    while step < _MOST_TIMES * size:
        step *= 2
        found.add(step)
    return sorted(found)


def _effect(plans: Sequence[str], saving: Saving, of: RecomputePlans, *, active: bool) -> str:
    """Return the text of the button that applies plans.

    Args:
        plans: The selected plans.
        saving: What they save together.
        of: All plans of the model.
        active: Whether they are active already.
    """
    if not plans:
        if active:
            return "Nothing is recomputed: select plans"
        return f"Recompute nothing: {_changes(-of.savings(of.chosen).peak_bytes)} (predicted)"
    modules = saving.occurrences
    budgets = [plan for plan in plans if plan.startswith("budget")]
    what = [f"{modules} module{'s' * (modules != 1)}"] if modules else []
    return (
        f"{'Recomputing' if active else 'Recompute'} {' and '.join([*what, *budgets])}: "
        f"{_changes(saving.peak_bytes)} (predicted)"
    )


def _changes(saved_bytes: int) -> str:
    """Return the change of the step memory as text."""
    return (
        f"saves {memory(saved_bytes)}" if saved_bytes >= 0 else f"takes {memory(-saved_bytes)} more"
    )


def _figures(row: Saving, plans: RecomputePlans) -> tuple[str, ...]:
    return (
        str(row.occurrences or ""),
        memory(row.after_forward_bytes),
        signed(row.peak_bytes),
        plans.told_cost(row),
    )


def show(plans: RecomputePlans) -> None:
    """Show the controls in the running cell, and a table to pages without a kernel and terminals.

    Args:
        plans: The model's recompute plans.
    """
    if getattr(get_ipython(), "kernel", None) is None:
        print(plans)
        return
    view = RecomputeView(plans)
    view.add_class(_CLASS)
    ends_with_cell(lambda: close_all(view))
    display_id = uuid.uuid4().hex
    mark = display.still_of(display_id)
    data = dict(view._repr_mimebundle_() or {})
    display.publish({**data, "text/plain": "recompute plans"}, {}, display_id)
    page = display.still(mark, _CLASS, plans._repr_html_(), by_style=True)
    display.publish({"text/html": page, "text/plain": repr(plans)}, {}, mark)
