"""A run as live charts in the notebook, and as text where there is no notebook.

The kernel's side of the charts: what crosses the wire, and the one thread that sends it. The
browser's side is js/src/runview.js, which documents the messages.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import statistics
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import anywidget
import numpy as np
import traitlets
from IPython.core.display_functions import publish_display_data
from IPython.core.getipython import get_ipython

from ortlab.history.saved_run import PastRun
from ortlab.metrics.recorder import COLUMNS, INDEX, merged
from ortlab.metrics.setting_changes import Change, changes
from ortlab.notebook.static_views import plain_text
from ortlab.notebook.views.closing import close_all, ends_with_cell
from ortlab.notebook.views.rank_feed import RankFeed
from ortlab.utils.files import write_private
from ortlab.utils.threads import Thread

if TYPE_CHECKING:
    from ortlab.metrics.recorder import Rows, Status, Watched

STATIC = Path(__file__).parents[1] / "static"
WIRE = [COLUMNS[INDEX["step"]], *(column for column in COLUMNS if column.chart)]
"""The columns that the charts need, in the order of the bits of a message's mask."""
_WIRE_AT = [INDEX[column.name] for column in WIRE]

UPDATE_BYTES = 192
"""Of new rows in an update; with Jupyter's own headers a message stays below 1 KB."""
WHOLE_ROWS = 2000
"""Of a whole series: two for every pixel of a chart."""
UNHEARD = 128
"""Updates until the whole is sent again to a browser that was never heard."""
PRINT_EVERY_S = 5.0
"""Between two lines of progress in a terminal."""
SETTLE_S = 20.0
"""That a cell waits for the picture of a run that ended in it."""
CHANGE_LETTERS = 240
"""Of the text of a change of settings in an update, which has one of them at most."""
WHOLE_CHANGES = 200
"""The last ones, that a whole series has."""
KEPT = 8
"""Views of runs that are over."""
PICTURE_WIDTH = 960
"""Of the static picture on a page, in pixels of the page."""


@dataclass(frozen=True)
class Update:
    """A message to the browser: its JSON part and the rows, float32, row by row."""

    content: dict[str, Any]
    rows: bytes = b""


class Feed:
    """What is new in a run since it was last asked: the messages without their transport."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._cursor = 0
        self._number = 0
        self._evaluated_s = -math.inf
        self._progress: object = None
        self._info: dict[str, Any] = {}
        self._changes: dict[int, list[Any]] = {}
        self._settled = 0
        self._limit = 8
        self.waiting = False
        """Whether there are rows that gave way to the words of the last message."""

    def whole(self) -> Update:
        """Everything so far; a browser that was told this needs nothing from before."""
        recorder = self._watched.recorder
        # The cursor is read first: what comes in between is sent twice rather than never, and the
        # browser drops steps that it has.
        _, self._cursor = recorder.since(recorder.count)
        rows = recorder.rows()
        self._evaluated_s = -math.inf
        self._changes, self._settled = {}, 0
        changed = self._changed(None)
        self._changes = {change[0]: change for change in changed}
        status = self._watched.status()
        return self._update(rows, status, WHOLE_ROWS, changed[-WHOLE_CHANGES:], whole=True)

    def fresh(self) -> Update | None:
        """What came since the last call; None when nothing did."""
        rows, cursor = self._watched.recorder.since(self._cursor, limit=self._limit)
        status = self._watched.status()
        changed = self._changed(2)[:1]
        words = bool(changed) or _info(self._watched.title, status) != self._info
        if not words and not len(rows) and _progress(status) == self._progress:
            return None
        # A message is small: rows give way to words, but not twice, or where words come with every
        # message none would.
        self.waiting = words and len(rows) > 1 and not self.waiting
        if self.waiting:
            rows = rows[:0]
        else:
            self._cursor = cursor
        self._changes |= {change[0]: change for change in changed}
        return self._update(rows, status, self._limit, changed, whole=False)

    def _update(
        self, rows: Rows, status: Status, limit: int, changes_: list[list[Any]], *, whole: bool
    ) -> Update:
        self._number += 1
        self._progress = _progress(status)
        content: dict[str, Any] = {
            "p": [
                self._number,
                status.state,
                status.step,
                status.total_steps,
                round(status.elapsed_s, 1),
                None if status.left_s is None else round(status.left_s, 1),
            ]
        }
        if whole:
            content["a"] = 1
        known = {} if whole else self._info
        self._info = _info(self._watched.title, status)
        if changed := {k: v for k, v in self._info.items() if k not in known or known[k] != v}:
            content["i"] = changed
        if changes_:
            content["c"] = changes_
        if not whole and (changed or changes_):
            limit = 1
        evaluations = [
            event
            for event in self._watched.recorder.events("eval")
            if event.time_s > self._evaluated_s
        ]
        if evaluations:
            self._evaluated_s = evaluations[-1].time_s
            content["e"] = [[event.step, _json(event.values["loss"])] for event in evaluations]
        if not len(rows):
            return Update(content)
        thin = plain_text.with_rates(merged(rows, math.ceil(len(rows) / limit)))
        thin = thin[:, _WIRE_AT].astype(np.float32)
        present = ~np.isnan(thin).all(axis=0)
        self._limit = max(1, UPDATE_BYTES // (4 * int(present.sum())))
        content["m"] = sum(1 << int(bit) for bit in np.flatnonzero(present))
        return Update(content, thin[:, present].tobytes())

    def _changed(self, most: int | None) -> list[list[Any]]:
        """Of the `most` next changes of settings those that the browser knows otherwise."""
        found = changes(self._watched.recorder, known=self._settled, most=most)
        unknown = [one for one in map(_change, found) if self._changes.get(one[0]) != one]
        for change in found:  # a run is changed many times: those that stay are not read again
            if not change.settled or self._changes.get(change.number) != _change(change):
                break
            self._settled = change.number
        return unknown


def _progress(status: Status) -> tuple[object, ...]:
    """What makes a message; while a run is paused time goes by and that is no news."""
    if status.state == "paused":
        return status.state, status.step
    left_s = None if status.left_s is None else int(status.left_s)
    return status.state, status.step, int(status.elapsed_s), left_s


def _info(title: str, status: Status) -> dict[str, Any]:
    """What changes seldom. A title names the engine that is used, so it may change too."""
    return {
        "title": title,
        "badges": list(status.badges),
        "lines": list(status.lines),
        "error": status.error,
        "advice": status.advice,
    }


def _change(change: Change) -> list[Any]:
    text = change.text
    if len(text) > CHANGE_LETTERS:
        text = text[: CHANGE_LETTERS - 1] + "…"
    figures = (change.cost_s, *change.samples_per_s, *change.memory_bytes)
    return [change.number, change.step, text, *map(_json, figures)]


def _json(value: float) -> float | None:
    """Five digits; JSON has no NaN."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


class Ending(Protocol):
    """What comes to its end: a run, a race."""

    def over(self) -> bool:
        """Whether it has."""
        ...


class Pump:
    """Calls `draw` a few times a second until the run is over, then `finish`, in one thread.

    It draws every quarter of a second, or less often where `draw` would use more than `SHARE` of
    a core; more often for a moment after somebody woke it, who waits for what he asked for.
    Prints and displays land in the cell that made the pump.
    """

    PERIOD_S = 0.25
    SLOWEST_S = 1.0
    SHARE = 0.002
    AWAKE_S = 1.0
    AWAKE_PERIOD_S = 0.1

    def __init__(
        self, watched: Ending, draw: Callable[[], None], finish: Callable[[], None]
    ) -> None:
        self._watched = watched
        self._draw = draw
        self._finish = finish
        self._wake = threading.Event()
        self._closed = threading.Event()
        self.finished = False
        """Whether the run was over, and `finish` is called or was."""
        self._costs_s = deque([0.0] * 5, maxlen=5)  # the median: a first update loads modules
        self._awake_until = -math.inf
        self._thread = Thread(contextvars.copy_context().run, self._work, name="ortlab-view")
        self._thread.start()

    def wake(self) -> None:
        """Draws now rather than at the end of the period, and often for a while."""
        self._awake_until = time.monotonic() + self.AWAKE_S
        self._wake.set()

    def join(self, timeout: float | None = None) -> bool:
        """Waits until the last update was sent; returns whether it was."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread although the run goes on; `finish` is not called. Twice is fine."""
        self._closed.set()
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        while not self._closed.is_set():
            over = self._watched.over()  # before drawing: what came last is drawn too
            began = time.thread_time()
            self._draw()
            self._costs_s.append(time.thread_time() - began)
            if over:
                self.finished = True
                self._finish()
                return
            self._wake.wait(self._period_s())
            self._wake.clear()

    def _period_s(self) -> float:
        if time.monotonic() < self._awake_until:
            return self.AWAKE_PERIOD_S
        cost_s = statistics.median(self._costs_s)
        return min(self.SLOWEST_S, max(self.PERIOD_S, cost_s / self.SHARE))


class RunView(anywidget.AnyWidget):
    """The live charts of one run with its progress, state, buttons and, folded, its panel.

    It follows the run until that is over; a browser that opens it later gets the whole series.
    RuntimeError where the package was installed without its JavaScript.
    """

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)
    columns: traitlets.List[Any] = traitlets.List().tag(sync=True)
    interactive = traitlets.Bool().tag(sync=True)
    controls: traitlets.List[Any] = traitlets.List().tag(sync=True)
    standing: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)
    ranks: traitlets.List[Any] = traitlets.List().tag(sync=True)
    rank_notes: traitlets.List[str] = traitlets.List().tag(sync=True)

    def __init__(
        self, watched: Watched, *, finish: Callable[[RunView], None] = lambda _: None
    ) -> None:
        from ortlab.notebook.views.panel import (
            panel_of,  # all of torch and the engines, for a run alone
        )

        self._watched = watched
        self._feed = Feed(watched)
        self._ranks = RankFeed(watched)
        self._panel = panel_of(watched)
        self._asked = threading.Event()  # a browser asks for the whole series
        self._heard = False  # a browser has ever asked
        self._ended = threading.Event()  # the run is over and the pump has sent its last
        self._sending = threading.Lock()
        self._updates = 0
        super().__init__(
            _esm=bundled("runview.js"),
            _css=bundled("runview.css"),
            columns=[asdict(column) for column in WIRE],
            interactive=watched.interactive,
        )
        self.on_msg(self._receive)
        self._then = finish
        self.pump = Pump(watched, self._send_fresh, self._finish)

    def close(self) -> None:
        """Closes the charts in every browser; the run goes on."""
        if hasattr(self, "pump"):  # ipywidgets closes what its constructor has not finished, too
            self.pump.close()
        super().close()

    def follows(self, watched: Watched) -> bool:
        """Whether these are charts of `watched` that still go on."""
        return self._watched is watched and not self.pump.join(0)

    def _receive(self, _: RunView, content: dict[str, Any], __: list[bytes]) -> None:
        """A click or a greeting. Runs in the kernel's own thread, so it only sets events."""
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
        if self._ended.is_set():  # the pump sends no more
            self._send_fresh()

    def _follow_advice(self) -> None:
        from ortlab.training.run import Run

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

    def _send_next(self) -> None:
        if (update := self._feed.fresh()) is not None:
            self.send(update.content, [update.rows] if update.rows else None)

    def _unheard(self) -> bool:
        """Whether it is time to send the whole unasked.

        While a cell runs that does not await, the kernel hears no browser, which may load these
        charts at any time: after 1, 2, 4, ... updates, and then every half minute or so.
        """
        return not self._heard and (
            self._updates % UNHEARD == 0 or self._updates & (self._updates - 1) == 0
        )

    def _send_whole(self) -> None:
        self._asked.clear()
        update = self._feed.whole()
        self.send(update.content, [update.rows])
        if self.ranks:  # whatever was lost, these may have been
            self.send_state(["ranks", "rank_notes"])

    def _set_traits(self, *, last: bool = False) -> None:
        """What panel and ranks show, which goes to every page that has these charts."""
        news = self._panel.news() if self._panel is not None else {}
        for name, value in (news | self._ranks.news(now=last)).items():
            setattr(self, name, value)

    def _finish(self) -> None:
        self._ended.set()
        with self._sending:
            self._set_traits(last=True)
            self._send_whole()  # the final state twice: front ends may lose a message
        self._then(self)


_place: contextvars.ContextVar[str | None] = contextvars.ContextVar("place", default=None)


@contextlib.contextmanager
def shown_in(display_id: str) -> Iterator[None]:
    """What is shown meanwhile takes the place of the display of this id."""
    token = _place.set(display_id)
    try:
        yield
    finally:
        _place.reset(token)


def show(watched: Watched) -> None:
    """Shows a run in the cell that is running: live charts, and when it is over a static picture.

    The picture takes the charts' place, so that a saved notebook, an HTML page and a printed one
    have it; `view` gives the charts back. The picture also goes to the run's folder, where it has
    one, as ``charts.png``. Without a notebook, progress is printed as lines of text.
    """
    follow(watched)


def follow(watched: Watched) -> Live | None:
    """Does what `show` does and returns what goes on by itself; None when the run is over."""
    shell = get_ipython()
    in_notebook = getattr(shell, "kernel", None) is not None
    if watched.over():
        if in_notebook:
            _publish_picture(watched)
        else:
            print(text(watched), flush=True)
        return None
    pump, stop = _follow(watched) if in_notebook else _print(watched)
    return Live(shell, watched, pump, stop)


class Live:
    """A run that is shown while it goes on, until `close`.

    It keeps the cell in which the run ends open until its last picture is out: whoever executes a
    notebook without a browser (nbclient) reads no output after the last cell.
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

    def over(self) -> bool:
        """Whether the last update was sent and nothing is left to wait for."""
        return self._pump.join(0) and not self._registered

    def close(self) -> None:
        """Shows no more of the run, which goes on. Twice is fine."""
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
    """The interactive charts of a run, also when it is over; they live as long as the kernel."""
    return RunView(watched)


def picture(watched: Watched) -> bytes:
    """The charts of a run as a PNG that reads well on light and dark pages."""
    from ortlab.notebook.static_views.picture import png  # matplotlib takes half a second to load

    return png(watched)


def text(watched: Watched) -> str:
    """The run as plain text, with small bars."""
    return plain_text.text(watched)


def _follow(watched: Watched) -> tuple[Pump, Callable[[], None]]:
    """Displays the live charts; returns their pump and what to do when that is closed early."""
    place = _place.get()
    display_id = place or uuid.uuid4().hex

    def finish(live: RunView) -> None:
        _publish_picture(watched, replacing=display_id)
        _kept.append(live)
        if len(_kept) > KEPT:
            close_all(_kept.popleft())

    def stop() -> None:
        _publish_picture(watched, replacing=display_id)
        close_all(live)

    def leave() -> None:
        """No page has these any more. A run's last ones go on: they make its picture."""
        others = (each for each in _views if each is not live and each.follows(watched))
        if watched.over() or any(others):
            close_all(live)

    live = RunView(watched, finish=finish)
    _views.add(live)
    ends_with_cell(leave)
    data, metadata = live._repr_mimebundle_() or ({}, {})
    data["text/plain"] = plain_text.headline(watched.title, watched.status())
    publish(data, metadata, display_id, update=place is not None)
    return live.pump, stop


_views: weakref.WeakSet[RunView] = weakref.WeakSet()
"""Those that cells have shown."""
_kept: deque[RunView] = deque()
"""Views whose run is over: a page that was loaded again meanwhile still shows them."""


def _publish_picture(watched: Watched, *, replacing: str | None = None) -> None:
    """Displays the picture; in the place of the display `replacing`, where one is given."""
    image = picture(watched)
    data = {"image/png": image, "text/plain": text(watched)}
    metadata = {"image/png": {"width": PICTURE_WIDTH}}
    if replacing is None:
        publish(data, metadata, uuid.uuid4().hex)
    else:
        # In the name of the cell that is running now, not of the one that was when this thread
        # began: nbclient takes no other output. Where it goes, only the display's id says.
        contextvars.Context().run(publish, data, metadata, replacing, update=True)
    # After it is on the page: a busy disk takes seconds.
    folder = getattr(watched, "folder", None)
    if folder is not None and not isinstance(watched, PastRun):  # which may be no one's to change
        write_private(Path(folder, "charts.png"), image)


def publish(
    data: dict[str, Any], metadata: dict[str, Any], display_id: str, *, update: bool = False
) -> None:
    """Displays `data`, in the place of the display of this id with `update`."""
    publish_display_data(  # type: ignore[no-untyped-call]
        data, metadata, transient={"display_id": display_id}, update=update
    )


def _print(watched: Watched) -> tuple[Pump, Callable[[], None]]:
    shown: list[Any] = [None, -math.inf]  # the state, and when it was printed

    def draw() -> None:
        state, now = watched.status().state, time.monotonic()
        if state != shown[0] or now - shown[1] >= PRINT_EVERY_S:
            shown[:] = state, now
            print(plain_text.progress(watched), flush=True)

    return Pump(watched, draw, lambda: print(text(watched), flush=True)), lambda: None


def bundled(name: str) -> str:
    """What the build hook made; RuntimeError says how to make it."""
    try:
        return (STATIC / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RuntimeError(
            f"the charts' {name} was not built; run `pip install -e .` in ortlab's repository"
        ) from None
