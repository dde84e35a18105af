"""Tests of the state between two steps: positions, checkpoints, and the return to them."""

from __future__ import annotations

import pytest
import torch

from ortlab.training import data_loading
from ortlab.training.training_state import place
from tests.support.training_parts import Parts, chosen, examples


def test_a_state_returns_to_its_checkpoint() -> None:
    parts = Parts()
    parts.step()
    taken = parts.state.checkpoint()
    before = parts.model.weight.detach().clone()
    parts.step()
    assert not torch.equal(parts.model.weight, before)
    parts.state.load(taken)
    parts.state.rewind(taken.position)
    assert torch.equal(parts.model.weight, before)
    assert (parts.state.step, parts.state.read) == (1, 4)
    assert parts.state.total == 4 * parts.settings.limits.num_train_epochs


def test_a_lost_state_is_its_last_recovery_checkpoint() -> None:
    parts = Parts()
    taken = parts.state.checkpoint()
    parts.state.remember(taken)
    assert parts.state.recovery is None, "a run in this process cannot lose its workers"
    parts.state.recovery, parts.state.lost = taken, True
    assert parts.state.checkpoint().position.step == 0
    assert parts.state.snapshot() is taken


def test_a_checkpoint_of_other_data_is_refused() -> None:
    parts = Parts()
    taken = parts.state.checkpoint()
    settings = chosen()
    assert place(taken, data_loading.batches(examples(), settings), settings).length == 16
    with pytest.raises(ValueError, match="12 samples"):
        place(taken, data_loading.batches(examples(12), settings), settings)
    with pytest.raises(ValueError, match="seed=7"):
        place(taken, data_loading.batches(examples(), settings), chosen(seed=7))
