"""The one thread in which matplotlib draws.

matplotlib opens its fonts anew for every thread that draws and keeps the last 64 sets, of some
megabytes and several files each (``matplotlib.font_manager.get_font``); every run has a thread of
its own for its charts.
"""

from __future__ import annotations

import functools
import io
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from ortlab.utils.threads import Thread, trim

if TYPE_CHECKING:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

P = ParamSpec("P")
T = TypeVar("T")

THREAD: Final = "ortlab-drawing"
"""Its name. It stays as long as the process, which does not wait for it."""

# Not an executor, which takes nothing more once Python ends: a run's last picture is drawn then.
_waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
_lock = threading.Lock()


def draws(function: Callable[P, T]) -> Callable[P, T]:
    """Has `function` called in the thread that draws; who calls it waits."""

    @functools.wraps(function)
    def draw(*args: P.args, **kwargs: P.kwargs) -> T:
        with _lock:
            _begin()
        future: Future[T] = Future()
        _waiting.put((future, functools.partial(function, *args, **kwargs)))
        return future.result()

    return draw


def png(canvas: FigureCanvasAgg) -> bytes:
    """The figure of `canvas`, which is of no use after that: its pixels go at once.

    Else they stay, some 15 MB, until Python's collector finds them: each label has the renderer.
    """
    out = io.BytesIO()
    canvas.figure.savefig(out, format="png", transparent=True)
    renderer: Any = canvas.get_renderer()  # type: ignore[no-untyped-call]
    vars(renderer).clear()
    return out.getvalue()


@functools.cache
def _begin() -> None:
    Thread(_work, name=THREAD).start()


def _work() -> None:
    while True:
        future, draw = _waiting.get()
        try:
            future.set_result(draw())
        except BaseException as error:  # noqa: BLE001 - it is for who waits
            future.set_exception(error)
        del future, draw  # not until the next one: they hold a run
        trim(collect=False)  # a picture takes tens of MB, and this thread does not end
