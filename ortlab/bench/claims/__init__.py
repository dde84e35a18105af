"""Claims of ORT's papers that one command measures: ``ortlab bench papers --claim NAME``."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from ortlab.bench.claims.claim import Claim, ClaimBench
from ortlab.settings import unknown_name

CLAIMS: dict[str, Claim] = {}
"""Claims by the names of the option ``--claim``."""


def claim_of(name: str) -> Claim:
    """Return a claim.

    Args:
        name: Name of the claim.

    Raises:
        ValueError: If there is no such claim.
    """
    if name not in CLAIMS:
        raise ValueError(f"claim={name!r}: {unknown_name(name, CLAIMS)}")
    return CLAIMS[name]


def measured(name: str, options: Mapping[str, Any]) -> ClaimBench:
    """Measure a claim. Ctrl-C ends it early and keeps the results so far.

    Args:
        name: Name of the claim.
        options: Fields of its settings.

    Raises:
        ValueError: If a name or a value is not valid.
    """
    claim = claim_of(name)
    settings = claim.settings.of(options)
    # heavy: torch
    from ortlab.bench.machine import machine
    from ortlab.engines.torch.stepper import training_device
    from ortlab.engines.torch.thread_count import threads
    from ortlab.utils.environment import environment
    from ortlab.utils.rng import undisturbed_random

    device = training_device(settings.as_dict().get("device", "cpu")).type
    measurement = claim.begin(settings)
    interrupted = False
    with threads(settings.threads), undisturbed_random():
        here = machine(device)
        try:
            measurement.run()
        except KeyboardInterrupt:
            interrupted = True
    return ClaimBench(
        name=name,
        claim=claim,
        settings=settings,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        environment=environment(),
        machine=here,
        lines=tuple(measurement.tables()),
        figures=measurement.as_dict(),
        interrupted=interrupted,
    )
