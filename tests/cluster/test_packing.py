"""Tests of models as bytes with their tensors in a separate file: unpacking restores the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from ortlab.cluster import packing


class Tied(nn.Module):
    """Large tied weights, an LSTM's flat weights, a frozen one, and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2000, 64)
        self.head = nn.Linear(64, 2000, bias=False)
        self.head.weight = self.words.weight
        self.lstm = nn.LSTM(64, 160)
        self.frozen = nn.Parameter(torch.randn(200, 200), requires_grad=False)
        self.frozen.told = "kept"  # type: ignore[attr-defined]
        self.register_buffer("table", torch.randn(300, 300), persistent=False)
        self.turned = nn.Parameter(torch.randn(150, 300).t())


def test_what_is_one_tensor_stays_one(tmp_path: Path) -> None:
    model, file = Tied(), tmp_path / "tensors"
    packed = packing.pack((model, functional.mse_loss), file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(packed) < 300_000 < file.stat().st_size, "values are in the file"
    found, loss = packing.unpack(packed, file)
    file.unlink()
    assert loss is functional.mse_loss
    assert found.head.weight is found.words.weight
    assert found.lstm._flat_weights[0] is found.lstm.weight_ih_l0
    for name, value in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    assert torch.equal(found.table, model.table)
    assert found.turned.stride() == model.turned.stride()
    assert type(found.frozen) is nn.Parameter
    assert not found.frozen.requires_grad
    assert found.frozen.told == "kept"
    assert found.words.weight.requires_grad
    found.words.weight.data.zero_()
    assert model.words.weight.any(), "in memory of its own"


def test_what_cannot_be_packed_is_said_without_a_copy() -> None:
    packing.check(Tied())
    with pytest.raises(TypeError, match="generator"):
        packing.check(each for each in ())
