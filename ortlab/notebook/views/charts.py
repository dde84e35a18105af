"""A run as live charts in the notebook, and as text where there is no notebook."""

from __future__ import annotations

import contextvars
import math
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets
from IPython.core.getipython import get_ipython

from ortlab.history.saved_run import SavedRun
from ortlab.notebook.static_views import plain_text
from ortlab.notebook.views.closing import close_all, ends_with_cell
from ortlab.notebook.views.display import PLACE, bundled, publish
from ortlab.notebook.views.pump import Ending, Pump
from ortlab.notebook.views.rank_feed import RankFeed
from ortlab.notebook.views.run_feed import WIRE, Feed
from ortlab.utils.files import write_private

if TYPE_CHECKING:
    from ortlab.metrics.recorder import Watched


UNHEARD = 128
"""Updates until the whole is sent again to a browser that was never heard."""
PRINT_EVERY_S = 5.0
"""Between two lines of progress in a terminal."""
SETTLE_S = 20.0
"""That a cell waits for the picture of a run that ended in it."""
KEPT = 8
"""Views of runs that are over."""
PICTURE_WIDTH = 960
"""Of the static picture on a page, in pixels of the page."""


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
    place = PLACE.get()
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
    if folder is not None and not isinstance(watched, SavedRun):  # which may be no one's to change
        write_private(Path(folder, "charts.png"), image)


def _print(watched: Watched) -> tuple[Pump, Callable[[], None]]:
    shown: list[Any] = [None, -math.inf]  # the state, and when it was printed

    def draw() -> None:
        state, now = watched.status().state, time.monotonic()
        if state != shown[0] or now - shown[1] >= PRINT_EVERY_S:
            shown[:] = state, now
            print(plain_text.progress(watched), flush=True)

    return Pump(watched, draw, lambda: print(text(watched), flush=True)), lambda: None
