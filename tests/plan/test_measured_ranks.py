"""Tests of planned memory against ranks that train here."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from ortlab.plan import activations
from ortlab.plan.cost import Layout, rank_memory
from ortlab.plan.transformer import Transformer
from tests.support import planned_ranks as measured

MODEL = Transformer(
    measured.LAYERS, measured.HIDDEN, measured.HEADS, measured.SEQUENCE, measured.VOCABULARY
)
PLAIN = Layout(1, 1, 2, measured.BATCH, 1, precision="fp32", fused_attention=True)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the bytes of two ranks by stage of ZeRO."""
    folder = tmp_path_factory.mktemp("ranks")
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.planned_ranks", str(rank), "2", str(folder)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [each.communicate()[1] for each in started]
    assert all(each.returncode == 0 for each in started), told
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_ranks_hold(ranks: list[dict[str, Any]], stage: int) -> None:
    """The heaviest rank holds what is planned, within 10%; DDP, ZeRO's optimizer and FSDP."""
    layout = Layout(**{**vars(PLAIN), "zero": stage})
    plan = rank_memory(MODEL, layout)
    held = max((rank[str(stage)] for rank in ranks), key=lambda one: sum(one.values()))
    for part in ("parameters", "gradients", "optimizer_state", "activations"):
        assert getattr(plan, part) == pytest.approx(held[part], rel=0.1), part
    assert plan.model + plan.activations == pytest.approx(sum(held.values()), rel=0.1)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_what_a_part_of_a_layer_saves(tensor: int) -> None:
    block = measured.Block(tensor)
    x = torch.randn(measured.BATCH, measured.SEQUENCE, measured.HIDDEN, requires_grad=True)
    found = measured.saved_bytes(lambda: block(x), block.parameters())
    plan = activations.layer_bytes(MODEL, measured.BATCH, each=4, tensor=tensor, scores=False)
    masks = 2 * x.numel()  # of dropout, which the layer has not
    assert plan - masks == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize(("micro_batches", "flying"), [(1, 1), (8, 2)])
def test_micro_batches_in_flight(micro_batches: int, flying: int) -> None:
    """The first of two stages starts two micro-batches before it computes a gradient."""
    stage = torch.nn.Sequential(*(measured.Block() for _ in range(measured.LAYERS // 2)))
    x = [
        torch.randn(2, measured.SEQUENCE, measured.HIDDEN, requires_grad=True)
        for _ in range(flying)
    ]
    found = measured.saved_bytes(lambda: [stage(each) for each in x], stage.parameters())
    layout = Layout(1, 2, 1, 2, micro_batches, precision="fp32", fused_attention=True)
    plan = rank_memory(Transformer(**{**vars(MODEL), "vocabulary": 8}), layout)
    assert plan.activations == pytest.approx(found, rel=0.1)
