"""Outputs that a notebook is saved with, and their pictures, which need no browser."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient


def pixels(png: bytes) -> Any:
    from matplotlib.image import imread

    return imread(io.BytesIO(png), format="png")


def execute(tmp_path: Path, *cells: str) -> nbformat.NotebookNode:
    """Execute a notebook without a browser and return it as it is saved."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    client = NotebookClient(
        book, timeout=120, store_widget_state=False, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env={**os.environ, "PYTHONPATH": path})
    return book
