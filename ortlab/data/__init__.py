"""Data that is on every machine, and question answering in the form of SQuAD."""

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
