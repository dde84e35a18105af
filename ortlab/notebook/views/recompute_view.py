"""Widget for the recompute plans of a model: a table of checkboxes, and sliders for batch sizes.

It consists of Jupyter's own controls, which support labels, keyboard and themes.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets

from ortlab.engines.plan_names import OFF
from ortlab.graph.recompute_plans import signed
from ortlab.notebook.views.closing import close_all, ends_with_cell
from ortlab.utils.process_memory import memory

if TYPE_CHECKING:
    from ortlab.graph.recompute_plans import RecomputePlans, Saving

_MOST_TIMES = 64
"""Maximum of a slider, as a multiple of the last call's size."""
_HEADS = ("recompute", "modules", "saved after forward", "saved at the peak", "cost per step")
_WIDTHS = "minmax(180px, max-content) repeat(4, minmax(70px, max-content))"


class RecomputeView(ipywidgets.VBox):  # type: ignore[misc]
    """Control for recompute plans.

    Checkboxes choose plans from the next step on; sliders only change the sizes that the figures
    are for. Errors are shown below the table and not raised in the kernel.

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
        self._budget.observe(lambda _: self._choose_least(), names="value")
        buttons = [
            _button("all layers", "Recompute every list of layers", lambda: self._choose_all()),
            _button("none", "Keep every activation", lambda: self._choose(OFF)),
            _button("measure", "Time the model's own steps", self._measure),
            _button(
                "fastest that fits",
                "Choose the fastest plan that fits into the memory on the left",
                self._choose_least,
            ),
        ]
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
                self._said,
            ]
        )
        self._draw()

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
        """Show the chosen plans and the savings of each plan for the sliders' sizes."""
        chosen = self._plans.parts(self._plans.chosen)
        self._listening = False
        for plan, tick in self._ticks.items():
            tick.value = plan in chosen
            for cell, text in zip(
                self._figures[plan], _figures(self._plans.savings(plan), self._plans), strict=True
            ):
                cell.value = html.escape(text)
        self._listening = True
        without, now = self._plans.memory(OFF), self._plans.memory(self._plans.chosen)
        self._before.value = html.escape(
            f"peak memory: {memory(without.peak_bytes())} without recompute, "
            f"{memory(now.peak_bytes())} with the selected plans"
        )

    def _ticked(self, _: object) -> None:
        if self._listening:
            ticked = [plan for plan, tick in self._ticks.items() if tick.value]
            self._choose(",".join(ticked) or OFF)

    def _sized(self, _: object) -> None:
        sizes = {name: slider.value for name, slider in self._sliders.items()}
        self._plans = self._plans.at(**sizes)
        self._draw()

    def _choose_all(self) -> None:
        self._choose(",".join(self._plans.layers) or OFF)

    def _choose_least(self) -> None:
        if not self._budget.value.strip():
            self._say("enter the available memory, for example 2GiB")
            return
        self._said_of(lambda: self._take(self._plans.least_time(self._budget.value)))

    def _choose(self, plan: str) -> None:
        self._said_of(lambda: self._take(plan))

    def _take(self, plan: str) -> str:
        self._plans.choose(plan)
        return f"{plan} from the next step on"

    def _measure(self) -> None:
        self._say("timing the model's own steps")
        self._said_of(lambda: str(self._plans.measure() and "measured"))

    def _said_of(self, act: Callable[[], str]) -> None:
        """Run an action and show its result or error; timing a model may raise any exception."""
        try:
            self._say(act())
        except Exception as error:  # noqa: BLE001
            self._say(str(error) or type(error).__name__)
        self._draw()

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


def _figures(row: Saving, plans: RecomputePlans) -> tuple[str, ...]:
    return (
        str(row.occurrences or ""),
        memory(row.after_forward_bytes),
        signed(row.peak_bytes),
        plans.told_cost(row),
    )


def show(plans: RecomputePlans) -> dict[str, Any]:
    """Return the MIME bundle: the controls, and a table for saved pages and terminals.

    Args:
        plans: The model's recompute plans.
    """
    view = RecomputeView(plans)
    ends_with_cell(lambda: close_all(view))
    data = dict(view._repr_mimebundle_() or {})
    return {**data, "text/html": plans._repr_html_(), "text/plain": repr(plans)}
