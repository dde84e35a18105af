"""Tests of the single thread in which matplotlib draws."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import psutil
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ortlab.notebook.static_views.drawing import THREAD, draws, png
from tests.support.waiting import HANGS_S


@draws
def picture(text: str, inches: float = 4.0) -> bytes:
    figure = Figure(figsize=(inches, inches))
    figure.text(0.5, 0.5, text)
    return png(FigureCanvasAgg(figure))


@draws
def where() -> str:
    return threading.current_thread().name


def at_once(threads: int) -> list[bytes]:
    """Return the pictures that this many threads request at the same time."""
    found: list[bytes] = []
    together = threading.Barrier(threads)

    def draw() -> None:
        together.wait()
        found.append(picture("drawn"))

    each = [threading.Thread(target=draw) for _ in range(threads)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    return found


def fonts() -> list[str]:
    """Return the paths of the open font files, once for each time they are open."""
    opened = (each.path for each in psutil.Process().open_files())
    return sorted(path for path in opened if path.endswith((".ttf", ".otf")))


def test_threads_that_draw_open_no_fonts_of_their_own() -> None:
    first = picture("drawn")
    before = fonts()
    assert before
    assert at_once(6) == [first] * 6
    assert fonts() == before
    assert [each.name for each in threading.enumerate()].count(THREAD) == 1
    assert where() == THREAD


def test_what_a_drawing_raises_is_raised_where_it_was_asked_for() -> None:
    with pytest.raises(ValueError, match=r"mathtext|Parse"):
        picture("$\\nothing$")
    assert picture("again").startswith(b"\x89PNG")


def test_a_last_picture_is_drawn_when_python_ends() -> None:
    code = (
        "import atexit; from ortlab.notebook.static_views.drawing import draws\n"
        "atexit.register(draws(lambda: print('drawn')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS_S, check=True
    )
    assert done.stdout == "drawn\n"


def test_pixels_do_not_wait_for_the_collector() -> None:
    """Each picture has 16 MB of pixels, which are freed without garbage collection."""
    picture("drawn", 20)
    gc.collect()
    gc.disable()
    try:
        before = psutil.Process().memory_info().rss
        for _ in range(8):
            picture("drawn", 20)
        assert psutil.Process().memory_info().rss < before + 24e6
    finally:
        gc.enable()
