"""Claims of ORT's papers that one command measures: ``ortlab bench papers --claim NAME``."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from ortlab.bench.claims.claim import Claim, ClaimBench, Measurement, Quote
from ortlab.bench.claims.search import SearchSettings
from ortlab.bench.papers import EXAMPLES
from ortlab.settings import unknown_name


def _largest_batches(settings: SearchSettings) -> Measurement:
    from ortlab.bench.claims.batch import LargestBatches  # heavy: torch

    return LargestBatches(settings)


CLAIMS: dict[str, Claim] = {
    "batch": Claim(
        "Twice the batch",
        (
            Quote(
                "ONNX Runtime Training Technical Deep Dive, May 2020. Its figure of twice "
                "PyTorch's batch for BERT-Large was not found in the stored part of the page, so "
                "it is not quoted.",
                "https://techcommunity.microsoft.com/t5/ai-machine-learning-blog/"
                "onnx-runtime-training-technical-deep-dive/ba-p/1398310",
            ),
            Quote(
                'BERT-Large in ORT, fp16, "to fully utilize capacity": a batch of 128 (128 tokens) '
                "and 16 (512 tokens) on a V100 of 32 GB, 48 and 8 on one of 16 GB.",
                f"{EXAMPLES}/nvidia-bert/azureml-notebooks/run-pretraining.ipynb",
            ),
            Quote(
                "BERT-Large in NVIDIA's PyTorch, mixed precision: results on V100 of 16 GB with a "
                "batch of 16 (128 tokens) and 4 (512 tokens).",
                "https://github.com/NVIDIA/DeepLearningExamples/issues/939",
            ),
            Quote(
                '"Memory optimizations allow fitting a larger model such as GPT-2 on 16GB GPU, '
                'which runs out of memory with stock PyTorch."',
                "https://github.com/microsoft/onnxruntime-training-examples",
            ),
        ),
        SearchSettings,
        _largest_batches,
    ),
}
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
