"""Modules that the sweep's fork server imports once for all cell processes of either engine."""

import gc

import transformers

from tests.zoo import (
    specs,
    trial,  # noqa: F401
)

for family in specs.FAMILIES.values():
    for head in family.heads.values():
        getattr(transformers, head)
gc.freeze()  # so that the garbage collection of each export skips all these objects
