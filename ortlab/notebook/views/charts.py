"""Live charts of a run in a notebook, and progress as text elsewhere."""

from __future__ import annotations

import base64
import contextlib
import html
import math
import re
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets
from IPython.core.getipython import get_ipython

from ortlab.history.saved_run import SavedRun
from ortlab.notebook.static_views import plain_text
from ortlab.notebook.views import display
from ortlab.notebook.views.closing import close_all, ends_with_cell
from ortlab.notebook.views.display import (
    PLACE,
    Place,
    bundled,
    print_waiting,
    publish,
    republish,
    still_of,
)
from ortlab.notebook.views.pump import Ending, Pump
from ortlab.notebook.views.rank_feed import RankFeed
from ortlab.notebook.views.run_feed import WIRE, Feed
from ortlab.utils.files import write_private

if TYPE_CHECKING:
    from ortlab.metrics.recorder import Watched


UNHEARD = 128
"""Updates between two whole series for a browser that has never sent a message."""
PRINT_EVERY_S = 5.0
"""Time between two lines of progress in a terminal."""
SETTLE_S = 20.0
"""Maximum time that a cell waits for the picture of a run that ended in it."""
STILL_S = 3.0
"""Time between two updates of the text for pages without a kernel."""
STILL_SHARE = 0.005
"""Share of a core that these updates may take."""
KEPT = 8
"""Number of views of ended runs that stay open."""
PICTURE_WIDTH = 960
"""Width of the static picture, in CSS pixels."""


class RunView(anywidget.AnyWidget):
    """Live charts of a run, with its progress, state, buttons and a collapsed settings panel.

    It follows the run until it ends; a browser that opens it later receives the whole series.

    Args:
        watched: The run.
        finish: Called with the view after the last update.
        still: Mark of the output that pages without a kernel show in place of the view.
        tell_still: Updates that output; called with the state of the run.

    Attributes:
        pump: Thread that sends the updates.

    Raises:
        RuntimeError: If the package was installed without its JavaScript.
    """

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)
    columns: traitlets.List[Any] = traitlets.List().tag(sync=True)
    interactive = traitlets.Bool().tag(sync=True)
    controls: traitlets.List[Any] = traitlets.List().tag(sync=True)
    standing: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)
    ranks: traitlets.List[Any] = traitlets.List().tag(sync=True)
    rank_notes: traitlets.List[str] = traitlets.List().tag(sync=True)
    still = traitlets.Unicode().tag(sync=True)
    name = traitlets.Unicode().tag(sync=True)
    continues = traitlets.Unicode().tag(sync=True)

    def __init__(
        self,
        watched: Watched,
        *,
        finish: Callable[[RunView], None] = lambda _: None,
        still: str = "",
        tell_still: Callable[[str], None] = lambda _: None,
    ) -> None:
        from ortlab.notebook.views.panel import panel_of  # heavy: torch

        self._watched = watched
        self._feed = Feed(watched)
        self._ranks = RankFeed(watched)
        self._panel = panel_of(watched)
        self._asked = threading.Event()  # a browser has requested the whole series
        self._heard = False  # whether any browser has ever requested it
        self._ended = threading.Event()  # the run has ended and the pump is sending its last update
        self._sending = threading.Lock()
        self._updates = 0
        self._tell_still = tell_still
        super().__init__(
            _esm=bundled("runview.js"),
            _css=bundled("runview.css"),
            columns=[asdict(column) for column in WIRE],
            interactive=watched.interactive,
            still=still,
            name=getattr(watched, "name", ""),
            continues=_continues(watched),
        )
        self.on_msg(self._receive)
        self._then = finish
        self.pump = Pump(watched, self._send_fresh, self._finish)

    def close(self) -> None:
        """Close the charts in every browser; the run continues."""
        if hasattr(self, "pump"):  # ipywidgets also closes widgets whose constructor has failed
            self.pump.close()
        super().close()

    def follows(self, watched: Watched) -> bool:
        """Return whether these charts show a run and are still being updated.

        Args:
            watched: The run.
        """
        return self._watched is watched and not self.pump.join(0)

    def _receive(self, _: RunView, content: dict[str, Any], __: list[bytes]) -> None:
        """Handle a message of a browser; runs in the kernel's thread, so it only sets events."""
        actions = {
            "pause": self._watched.pause,
            "resume": self._watched.resume,
            "stop": self._watched.stop,
            "advice": self._follow_advice,
            "hello": self._greeted,
        }
        if content["do"] in actions:
            actions[content["do"]]()
        elif self._panel is not None:
            self._panel.receive(content)
        self.pump.wake()
        if self._ended.is_set():  # the pump has stopped
            self._send_fresh()

    def _follow_advice(self) -> None:
        from ortlab.training.run import Run  # heavy: torch

        if isinstance(self._watched, Run):
            self._watched.resume(**self._watched.advice)

    def _greeted(self) -> None:
        self._heard = True
        self._asked.set()

    def _send_fresh(self) -> None:
        with self._sending:
            self._updates += 1
            if self._asked.is_set() or self._unheard():
                self._send_whole()
            else:
                self._send_next()
                if self._feed.waiting:
                    self._send_next()
            self._set_traits()
            self._tell_still(self._feed.state)

    def _send_next(self) -> None:
        if (update := self._feed.fresh()) is not None:
            self.send(update.content, [update.rows] if update.rows else None)

    def _unheard(self) -> bool:
        """Return whether to send the whole series without a request.

        While a cell runs without awaiting, the kernel receives no messages, but a browser may load
        the charts at any time. The series is sent after 1, 2, 4, ... updates, then about every half
        minute.
        """
        return not self._heard and (
            self._updates % UNHEARD == 0 or self._updates & (self._updates - 1) == 0
        )

    def _send_whole(self) -> None:
        self._asked.clear()
        update = self._feed.whole()
        self.send(update.content, [update.rows])
        if self.ranks:  # the lost message may have been theirs
            self.send_state(["ranks", "rank_notes"])

    def _set_traits(self, *, last: bool = False) -> None:
        """Update the traits of panel and ranks, which every open page receives."""
        news, panel = {}, self._panel
        # Settings that nobody has opened are not compared again: that costs as much as the charts.
        if panel is not None and (panel.opened or last or not self.standing):
            news = panel.news()
        for name, value in (news | self._ranks.news(now=last)).items():
            setattr(self, name, value)

    def _finish(self) -> None:
        self._ended.set()
        with self._sending:
            self._set_traits(last=True)
            self._send_whole()  # the final state again, because front ends may lose a message
        self._then(self)


def show(watched: Watched) -> None:
    """Show a run in the running cell: live charts while it runs, then a static picture.

    The picture replaces the charts, so that a saved notebook, an HTML page and a printed one have
    it; `view` shows the charts again. If the run has a folder, the picture is also saved there as
    ``charts.png``. Without a notebook, progress is printed as lines of text.

    Args:
        watched: The run.
    """
    follow(watched)


def follow(watched: Watched) -> Live | None:
    """Show a run like `show`.

    Args:
        watched: The run.

    Returns:
        The live view, or None if the run has already ended.
    """
    shell = get_ipython()
    in_notebook = getattr(shell, "kernel", None) is not None
    if watched.over():
        if in_notebook:
            _publish_result(watched, PLACE.get())
        else:
            print(text(watched), flush=True)
        return None
    pump, stop = _follow(watched) if in_notebook else _print(watched)
    return Live(shell, watched, pump, stop)


def reopen(watched: Watched) -> None:
    """Show the live charts of a run that is over, and its picture to pages without a kernel.

    Args:
        watched: The run.
    """
    display_id = uuid.uuid4().hex
    mark = still_of(display_id)
    live = RunView(watched, still=mark)
    ends_with_cell(lambda: close_all(live))
    data, metadata = live._repr_mimebundle_() or ({}, {})
    publish({**data, "text/plain": f"{watched.title}: charts"}, metadata, display_id)
    address = "data:image/png;base64," + base64.b64encode(picture(watched)).decode()
    told = text(watched)
    page = f'<img src="{address}" width="{PICTURE_WIDTH}" alt="{html.escape(told)}">'
    shown = {"text/html": display.still(mark, display.PANEL_OR_RUN, page), "text/plain": told}
    publish(shown, {}, mark)


class Live:
    """View of an active run, until `close`.

    The cell in which the run ends waits for the last picture, because nbclient, which executes
    notebooks without a browser, reads no output after the last cell.

    Args:
        shell: IPython's shell, or None.
        watched: The run.
        pump: Thread that updates the view.
        stop: Called if the view is closed before the run ends.
    """

    def __init__(
        self, shell: Any, watched: Ending, pump: Pump, stop: Callable[[], None] = lambda: None
    ) -> None:
        self._shell = shell
        self._watched = watched
        self._pump = pump
        self._stop = stop
        self._registered = shell is not None
        if self._registered:
            shell.events.register("post_run_cell", self._settle)

    def follows(self, watched: Ending) -> bool:
        """Return whether this is a view of a run that is still being updated.

        Args:
            watched: The run.
        """
        return self._watched is watched and not self._pump.join(0)

    def over(self) -> bool:
        """Return whether the last update was sent and no cell waits for it."""
        return self._pump.join(0) and not self._registered

    def close(self) -> None:
        """Stop showing the run, which continues. Idempotent."""
        self._unregister()
        if not self._pump.join(0):
            self._pump.close()
            if not self._pump.finished:
                self._stop()

    def _settle(self, _: object = None) -> None:
        if self._pump.join(0) or self._watched.over():
            self._pump.join(SETTLE_S)
            self._unregister()

    def _unregister(self) -> None:
        if self._registered:
            self._registered = False
            self._shell.events.unregister("post_run_cell", self._settle)


def view(watched: Watched) -> RunView:
    """Return the interactive charts of an active or ended run; they live as long as the kernel.

    Args:
        watched: The run.
    """
    return RunView(watched)


def picture(watched: Watched) -> bytes:
    """Draw the charts of a run as a PNG on white, which is legible on light and dark pages.

    Args:
        watched: The run.
    """
    from ortlab.notebook.static_views.picture import png  # heavy: matplotlib

    return png(watched)


def text(watched: Watched) -> str:
    """Return a run as plain text, with small bars.

    Args:
        watched: The run.
    """
    return plain_text.text(watched)


def _follow(watched: Watched) -> tuple[Pump, Callable[[], None]]:
    """Display the live charts; return their pump and a function to call if it closes early."""
    place = PLACE.get()
    display_id = place.display_id if place else uuid.uuid4().hex
    still = Still(watched, still_of(display_id))

    def finish(live: RunView) -> None:
        still.close()
        _publish_result(watched, place, replacing=display_id)
        _kept.append(live)
        if len(_kept) > KEPT:
            close_all(_kept.popleft())

    def stop() -> None:
        still.close()
        _publish_picture(watched, replacing=display_id)
        close_all(live)

    def leave() -> None:
        """Close charts that no page shows, except the last ones of a run: they make its picture."""
        others = (each for each in _views if each is not live and each.follows(watched))
        if watched.over() or any(others):
            close_all(live)

    live = RunView(watched, finish=finish, still=still.mark, tell_still=still.tell)
    _views.add(live)
    ends_with_cell(leave)
    data, metadata = live._repr_mimebundle_() or ({}, {})
    data["text/plain"] = f"{watched.title}: live charts"
    publish(data, metadata, display_id, update=place is not None)
    still.show(update=place is not None)
    if place is None:
        print_waiting()
    return live.pump, stop


_BUTTONS = re.compile(" or the Resume button| or its button|; Stop ends the run")
"""Advice of an active run that names buttons, which a page without a kernel does not have."""


class Still:
    """Text of an active run for pages without a kernel, such as a reopened notebook.

    It is an output of its own, which the live view hides, and says what was known last.

    Args:
        watched: The run.
        mark: Mark and display id of the output.
    """

    def __init__(self, watched: Watched, mark: str) -> None:
        self.mark = mark
        """Mark and display id of the output."""
        self._watched = watched
        self._due = 0.0
        self._state = ""
        self._closed = False

    def show(self, *, update: bool) -> None:
        """Display the text in the running cell.

        Args:
            update: Whether the output exists already.
        """
        publish(self._bundle(), {}, self.mark, update=update)

    def tell(self, state: str) -> None:
        """Update the text if the state has changed, or the text has become old.

        Args:
            state: State of the run.
        """
        now = time.monotonic()
        if self._closed or (now < self._due and state == self._state):
            return
        began = time.thread_time()
        republish(self._bundle(), {}, self.mark)
        self._state = state
        self._due = now + max(STILL_S, (time.thread_time() - began) / STILL_SHARE)

    def close(self) -> None:
        """Empty the output, since a picture of the run follows."""
        self._closed = True
        republish({"text/html": "", "text/plain": ""}, {}, self.mark)

    def _bundle(self) -> dict[str, Any]:
        when, status = time.strftime("%Y-%m-%d %H:%M:%S"), self._watched.status()
        state = _BUTTONS.sub("", plain_text.text(self._watched, replace(status, left_s=None)))
        told = f"{self._advice()} Its state at {when}:\n{state}"
        # Exported pages show <pre> in a proportional font, and JupyterLab breaks words.
        style = "font-family: monospace; line-height: 1.3; word-break: normal"
        page = f'<pre style="{style}">{html.escape(told)}</pre>'
        return {
            "text/html": display.still(self.mark, display.PANEL_OR_RUN, page),
            "text/plain": told,
        }

    def _advice(self) -> str:
        name = getattr(self._watched, "name", None)
        if name is None:
            return "This page has lost the kernel of this loop."
        resumed = f"; {told}" if (told := _continues(self._watched)) else ""
        return (
            f"This page has lost the kernel of {name}: ortlab.open_run({name!r}) shows what became "
            f"of it{resumed}."
        )


def _continues(watched: Watched) -> str:
    """Return what continues a run after the end of its kernel; "" if nothing of ortlab does."""
    from ortlab.training.loop_run import LoopRun  # heavy: torch
    from ortlab.training.run import Run

    if isinstance(watched, Run):
        cells = "the cells that load ortlab and create its model and data"
        return f"%ort resume {watched.name} continues it, after you run {cells} again"
    if isinstance(watched, LoopRun) and watched.saves_checkpoints:
        call = f"ortlab.track(model, optimizer=..., resume_from={watched.name!r})"
        cells = "the cells that create model, data and optimizer"
        skip = "let the loop skip the batches of the first run.step steps"
        return f"{call} continues it from its last checkpoint, after you run {cells} again; {skip}"
    return ""


_views: weakref.WeakSet[RunView] = weakref.WeakSet()
"""Views that cells have shown."""
_kept: deque[RunView] = deque()
"""Views of ended runs, which stay open for pages that were reloaded in the meantime."""


def _publish_result(watched: Watched, place: Place | None, *, replacing: str | None = None) -> None:
    """Display the picture of a run that is over, unless its place is taken back."""
    if place is None or not place.take_back(watched):
        _publish_picture(watched, replacing=replacing or (place.display_id if place else None))


def _publish_picture(watched: Watched, *, replacing: str | None = None) -> None:
    """Display the picture; if `replacing` is given, it replaces the display of that id."""
    image = picture(watched)
    data = {"image/png": image, "text/plain": text(watched)}
    metadata = {"image/png": {"width": PICTURE_WIDTH}}
    if replacing is None:
        publish(data, metadata, uuid.uuid4().hex)
    else:
        republish(data, metadata, replacing)
    # After it is displayed: writing to a busy disk can take seconds.
    folder = getattr(watched, "folder", None)
    if folder is not None and not isinstance(watched, SavedRun):  # its folder may be read-only
        with contextlib.suppress(FileNotFoundError):  # a refused run leaves no folder
            write_private(Path(folder, "charts.png"), image)


def _print(watched: Watched) -> tuple[Pump, Callable[[], None]]:
    shown: list[Any] = [None, -math.inf]  # the last state, and when it was printed

    def draw() -> None:
        state, now = watched.status().state, time.monotonic()
        if state != shown[0] or now - shown[1] >= PRINT_EVERY_S:
            shown[:] = state, now
            print(plain_text.progress(watched), flush=True)

    return Pump(watched, draw, lambda: print(text(watched), flush=True)), lambda: None
