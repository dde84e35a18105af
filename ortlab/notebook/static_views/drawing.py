"""The single thread in which matplotlib draws.

matplotlib opens its fonts again in every thread that draws, and caches the last 64 sets, of several
megabytes and files each (``matplotlib.font_manager.get_font``). Every run has its own thread for
its charts, so drawing is moved to one common thread.
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

COLORS: Final = (
    *("#0072b2", "#d55e00", "#009e73", "#c5659f"),
    *("#9539e6", "#d10038", "#e639da", "#397341"),
)
"""Colors of lines, as in js/src/runview.css.

The first three are of Okabe and Ito; all are told apart with every kind of color blindness, and
have a contrast of at least 3.3:1 on white and on JupyterLab's dark #111111. The pictures are on
white, as their letters would be pale on a background that suits both.
"""

P = ParamSpec("P")
T = TypeVar("T")

THREAD: Final = "ortlab-drawing"
"""Name of the thread, which lives as long as the process and does not keep it from ending."""

# Not an executor: it rejects work during interpreter shutdown, when a run's last picture is drawn.
_waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
_lock = threading.Lock()


def draws(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that it runs in the drawing thread while its caller waits.

    Args:
        function: The function.
    """

    @functools.wraps(function)
    def draw(*args: P.args, **kwargs: P.kwargs) -> T:
        with _lock:
            _begin()
        future: Future[T] = Future()
        _waiting.put((future, functools.partial(function, *args, **kwargs)))
        return future.result()

    return draw


def png(canvas: FigureCanvasAgg) -> bytes:
    """Return a figure as a PNG and release its pixels; the canvas cannot be used afterwards.

    Otherwise, about 15 MB would stay until a garbage collection, because each label refers to the
    renderer.

    Args:
        canvas: Canvas of the figure.
    """
    out = io.BytesIO()
    # Transparent axes, whatever colors the user has chosen for own figures.
    canvas.figure.savefig(out, format="png", transparent=True, facecolor="white")
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
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            future.set_exception(error)
        del future, draw  # now instead of at the next picture, because they refer to a run
        trim(collect=False)  # a picture takes tens of MB, and this thread never ends
