"""Tests of runs with the settings of a training plan, whose ranks hold what was planned."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import ortlab
from tests.support import tiny
from tests.support.waiting import HANGS_S

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="signals, and gloo over loopback"),
    pytest.mark.usefixtures("one_thread", "own_workers"),
]


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random sentences, the labels of which are their tokens."""

    def __init__(self, length: int) -> None:
        drawn = torch.Generator().manual_seed(0)
        self.rows = torch.randint(0, 128, (64, length), generator=drawn)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _gpt2() -> nn.Module:
    return tiny.gpt2(n_embd=128, n_layer=4, vocab_size=128, n_positions=64)


@pytest.mark.parametrize(
    ("make", "layout"),
    [(_gpt2, {"zero": 0}), (_gpt2, {"zero": 1}), (_llama, {"tensor": 2})],
    ids=("replicas", "ZeRO", "tensor"),
)
def test_a_run_with_the_settings_of_a_plan(
    make: Callable[[], nn.Module], layout: dict[str, Any]
) -> None:
    """Parameters, gradients and optimizer state of the ranks are within 10% of the plan."""
    model = make()
    plan = ortlab.training_plan(
        model,
        gpus=2,
        batch=8,
        micro_batch=2,
        trainer="ortlab",
        precision="fp32",
        recompute="none",
        tokens="1536",
        **{"pipeline": 1, "tensor": 1, **layout},  # type: ignore[arg-type]
    )
    assert plan.best is not None
    assert plan.model.parameters == sum(p.numel() for p in model.parameters())
    run = ortlab.finetune(model, Sentences(64), device="cpu", **plan.settings())
    run.result(HANGS_S)
    assert run.step == plan.steps == 3
    planned = plan.best.memory
    for rank in run.recorder.ranks:
        assert rank.last is not None
        held = rank.last
        assert held.parameter_bytes == pytest.approx(planned.parameters, rel=0.1)
        assert held.gradient_bytes == pytest.approx(planned.gradients, rel=0.1)
        assert held.optimizer_bytes == pytest.approx(planned.optimizer_state, rel=0.1)
