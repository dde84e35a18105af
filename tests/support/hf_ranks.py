"""A script for torchrun that trains by `ortlab.hf.Trainer` at each ZeRO stage.

``torchrun --nproc-per-node 2 tests/support/hf_ranks.py FOLDER engine:stage ...`` makes each process
write FOLDER/RANK.json: for each "engine:stage" the losses, the bytes of the optimizer's state and
the errors. The weights are saved in FOLDER/engine-stage.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from ortlab import hf
from tests.support import tiny

WORDS, STEPS, ROWS = 50, 10, 8
"""Vocabulary size, optimizer steps, and samples per step over all processes."""


def data() -> list[dict[str, torch.Tensor]]:
    """Return samples whose label, one of two classes, is determined by the first word."""
    ids = torch.randint(1, WORDS, (96, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row[0] % 2} for row in ids]


def bert() -> nn.Module:
    torch.manual_seed(0)
    return tiny.bert(0.0, vocab_size=WORDS)


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    chosen: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": ROWS // processes,
        "learning_rate": 2e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "ddp_backend": "gloo" if processes > 1 else None,
        "report_to": [],
    }
    return TrainingArguments(str(folder), **{**chosen, **more})


def state_bytes(optimizer: Any) -> int:
    """Return the bytes of the optimizer's moments in this process."""
    while hasattr(optimizer, "optimizer"):  # accelerate's and DeepSpeed's wrappers
        optimizer = optimizer.optimizer
    kept = [each for state in optimizer.state.values() for each in state.values()]
    return sum(each.nbytes for each in kept if torch.is_tensor(each) and each.dim())


def trained(folder: Path, **settings: Any) -> dict[str, Any]:
    trainer = hf.Trainer(bert(), arguments(folder), train_dataset=data(), **settings)
    trainer.train()
    trainer.save_model()
    run = trainer.run
    return {
        "losses": [each["loss"] for each in trainer.state.log_history if "loss" in each],
        "bytes": state_bytes(trainer.optimizer),
        "optimizer": type(trainer.optimizer).__name__,
        "settings": None if run is None else run.began_with,
    }


def refused(folder: Path, *, resume: str | None = None, **more: Any) -> str:
    settings = {name: more.pop(name) for name in ("engine", "zero_stage") if name in more}
    try:
        trainer = hf.Trainer(bert(), arguments(folder, **more), train_dataset=data(), **settings)
        trainer.train(resume_from_checkpoint=resume) if resume else trainer.create_optimizer()
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    found: dict[str, Any] = {}
    for each in sys.argv[2:]:
        engine, _, stage = each.partition(":")
        own = folder / f"{engine}-{stage}"
        found[each] = trained(own, engine=engine, zero_stage=int(stage))
    found["refused"] = [
        refused(folder, zero_stage=3, engine="ort"),
        refused(folder, zero_stage=1, engine="compile"),
        refused(folder, zero_stage=1, bf16=True),
        refused(folder, zero_stage=1, engine="eager", optim="adafactor"),
        refused(folder, zero_stage=1, deepspeed={"zero_optimization": {"stage": 1}}),
        refused(folder, zero_stage=1, load_best_model_at_end=True),
        refused(folder, zero_stage=1, engine="eager", resume="checkpoint-5"),
    ]
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
