"""A call signature records enough of a call to create a similar one, and none of its data."""

from __future__ import annotations

import math
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import nn

import ortlab
from ortlab.engines.call_signature import CallSignature
from ortlab.engines.ortmodule import compat
from ortlab.engines.ortmodule.engine import execution_of


class Pair(NamedTuple):
    ids: torch.Tensor
    scale: float


def test_a_stand_in_has_the_form_of_the_call() -> None:
    args = (
        torch.randn(2, 3, requires_grad=True),
        [torch.zeros(4, dtype=torch.int32), (None, True, 3, "mean")],
        Pair(torch.zeros(2, 5, dtype=torch.long), math.nan),
    )
    kwargs = {"mask": torch.zeros(2, dtype=torch.bool), "nested": {"half": torch.ones(1).half()}}
    form = CallSignature.of(args, kwargs)
    made, named = form.placeholders()
    assert CallSignature.of(made, named) == form
    assert isinstance(made[2], Pair)
    assert math.isnan(made[2].scale)
    assert made[1][1] == (None, True, 3, "mean")
    assert made[2].ids.eq(1).all(), "ids of one"
    assert named["mask"].all()
    assert made[0].std() > 0, "normal numbers"


def test_a_stand_in_draws_from_no_generator() -> None:
    form = CallSignature.of((torch.zeros(3),), {})
    before = torch.get_rng_state()
    first, second = form.placeholders()[0][0], form.placeholders()[0][0]
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_stands_in_for_an_object() -> None:
    form = CallSignature.of((), {"cache": object()})
    with pytest.raises(ValueError, match="cannot create a placeholder for a object; pass a batch"):
        form.placeholders()


def test_a_form_keeps_no_data() -> None:
    given = torch.randn(4, 3)
    form = CallSignature.of((given, [given]), {"nested": {"x": given}})
    held = weakref.ref(given)
    del given
    assert held() is None
    assert form.shapes == (torch.Size((4, 3)),) * 3


@pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))
def test_a_model_knows_the_form_of_its_last_call() -> None:
    model = ortlab.wrap(nn.Linear(3, 2), engine="ortmodule")
    execution = execution_of(model)
    assert execution.last_call is None
    for rows in (4, 5, 4):
        model(torch.randn(rows, 3))
        assert execution.last_call == CallSignature.of((torch.randn(rows, 3),), {})
