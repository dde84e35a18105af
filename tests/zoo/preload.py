"""Imported by the sweep's fork server: what every cell's process would import otherwise."""

import gc

import transformers

from ortlab.engines.ortmodule import compat
from tests.zoo import (
    specs,
    trial,  # noqa: F401
)

for family in specs.FAMILIES.values():
    for head in family.heads.values():
        getattr(transformers, head)
if compat.unavailable() is None:
    compat.ortmodule()
gc.freeze()  # each export collects garbage: not through all this
