"""Modules that the sweep's fork server imports once for all cell processes."""

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
gc.freeze()  # so that the garbage collection of each export skips all these objects
