"""Accuracy of exported files on labeled data, next to eager torch's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ortlab.deploy import check
from ortlab.deploy.call import ModelCall
from ortlab.deploy.exported import ExportedFile
from ortlab.engines.base import Batch, tell
from ortlab.engines.batch import Forward, hits, target_of, to_device
from ortlab.settings import FinetuneSettings
from ortlab.training import data_loading


def measured(
    call: ModelCall, folder: Path, forms: Sequence[ExportedFile], data: Iterable[Any]
) -> list[ExportedFile]:
    """Return the files with their accuracy and torch's.

    Args:
        call: The call of the model.
        folder: Folder of the files.
        forms: Files to measure.
        data: Labeled data.

    Raises:
        ValueError: If the data has no classes as targets, or its batches do not fit forward.
    """
    sessions = [check.session(folder / form.file) for form in forms]
    right, total = [0] * (len(forms) + 1), 0
    found = data_loading.batches(data, FinetuneSettings.of(engine="eager"))
    device = next(iter(call.tensors.values())).device
    tell("measuring the accuracy")
    for batch in data_loading.Epoch(found.open(0, 0), found.size, 0):
        target = target_of(batch)
        tensors = ModelCall.of(call.module, to_device(batch, device)).tensors
        answers: list[Mapping[str, torch.Tensor]] = [call(tensors)]
        for session in sessions:
            given = check.run(session, tensors)
            answers.append({name: torch.from_numpy(each) for name, each in given.items()})
        for i, outputs in enumerate(answers):
            hit, of = _hits(outputs, target)
            right[i] += hit
        total += of
    if not total:
        raise ValueError(
            "eval_dataset has no class labels; give batches with labels [N] for scores [N, C]"
        )
    torchs, *ours = (each / total for each in right)
    return [
        dataclasses.replace(form, accuracy=own, torch_accuracy=torchs)
        for form, own in zip(forms, ours, strict=True)
    ]


def _hits(outputs: Mapping[str, torch.Tensor], target: Batch) -> tuple[int, int]:
    scores = outputs.get("logits", next(iter(outputs.values()))).cpu()
    wanted = target.cpu() if isinstance(target, torch.Tensor) else None
    return hits(Forward(torch.zeros(()), scores, wanted))
