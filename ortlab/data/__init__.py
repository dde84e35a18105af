"""Sample data sets that need no download, and question answering in SQuAD's format."""

from ortlab.data.samples import (
    PACKAGES,
    Digits,
    Examples,
    Texts,
    digits,
    docstrings,
    hub,
    minilm,
    pretrained,
    python_source,
)

__all__ = [
    "PACKAGES",
    "Digits",
    "Examples",
    "Texts",
    "digits",
    "docstrings",
    "hub",
    "minilm",
    "pretrained",
    "python_source",
]
