"""Claims of ORT's papers that one command measures: ``ortlab bench papers --claim NAME``."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from ortlab.bench.claims.claim import Claim, ClaimBench, GradientSettings, Measurement, Quote
from ortlab.bench.claims.search import RecomputeSettings, SearchSettings, ZeroSettings
from ortlab.bench.papers import EXAMPLES
from ortlab.settings import unknown_name


def _largest_batches(settings: SearchSettings) -> Measurement:
    from ortlab.bench.claims.batch import LargestBatches  # heavy: torch

    return LargestBatches(settings)


def _recomputing(settings: RecomputeSettings) -> Measurement:
    from ortlab.bench.claims.recompute import Recomputing  # heavy: torch

    return Recomputing(settings)


def _gradient(settings: GradientSettings) -> Measurement:
    from ortlab.bench.claims.gradient import MinimalGradient  # heavy: torch

    return MinimalGradient(settings)


def _zero(settings: ZeroSettings) -> Measurement:
    from ortlab.bench.claims.zero import ZeroBatches  # heavy: torch

    return ZeroBatches(settings)


_PULLS = "https://github.com/microsoft/onnxruntime/pull"

CLAIMS: dict[str, Claim] = {
    "batch": Claim(
        "Twice the batch",
        (
            Quote(
                "ONNX Runtime Training Technical Deep Dive, May 2020: said to fit twice PyTorch's "
                "batch of BERT-Large. The sentence could not be checked, so it is not quoted.",
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
    "recompute": Claim(
        "Recompute: more throughput at twice the batch",
        (
            Quote(
                "Subgraphs to recompute, chosen by ORTMODULE_ENABLE_MEMORY_ALLEVIATION, October "
                "2022: said to reach 1.17 times the throughput at twice the batch for DeBERTa. The "
                "sentence could not be checked, so it is not quoted.",
                f"{_PULLS}/12852",
            ),
            Quote(
                "BERT-Large, Gelu and the attention's dropout recomputed: largest batch of phase 1 "
                "from 64 to 80, 186.792 to 191.111 examples/s (1.02 times); of phase 2 from 10 to "
                "14, 36.5623 to 36.7822 examples/s (1.01 times).",
                f"{_PULLS}/4402",
            ),
            Quote(
                "BERT-Large, layers recomputed: phase 1 at batch 64 203.681 to 156.062 examples/s, "
                "and 173.368 at batch 344; phase 2 at batch 10 39.9491 to 30.6035, and 33.8438 at "
                "batch 48.",
                f"{_PULLS}/4526",
            ),
        ),
        RecomputeSettings,
        _recomputing,
    ),
    "gradient": Claim(
        "A gradient graph for the trained parameters only",
        (
            Quote(
                '"This pull request brings support for models where only a part of the parameters '
                'are trainable", March 2021. What the Technical Deep Dive of May 2020 says of a '
                "minimal gradient graph could not be checked, so it is not quoted. Neither is "
                "known to give a figure.",
                f"{_PULLS}/7058",
            ),
        ),
        GradientSettings,
        _gradient,
    ),
    "zero": Claim(
        "ZeRO: less memory on each of several workers, and larger batches",
        (
            Quote(
                "A talk on ORT's training is said to fit 168 samples in place of 148 with "
                "ZeRO. No text of it was found: neither the figures nor model, hardware and "
                "stage could be checked, so it is not quoted. ORT's first ZeRO, June 2020: "
                "\"This change explicitly reflects the inclusion of DeepSpeed's ZeRO "
                "technique, and provides a configuration format that we can extend to support "
                'additional stages beyond 1 in the future".',
                f"{_PULLS}/4312",
            ),
            Quote(
                '"acceleration from 39% to 130% for Hugging Face models with Optimum when using '
                'ONNX Runtime and DeepSpeed ZeRO Stage 1 for training": time, not memory.',
                "https://huggingface.co/docs/optimum/v1.7.1/onnxruntime/usage_guides/trainer",
            ),
        ),
        ZeroSettings,
        _zero,
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
