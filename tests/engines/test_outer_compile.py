"""A wrapped model within code that its user compiles: ORT runs the model, torch the rest."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ortlab
from ortlab.engines.base import wrapped_model
from tests.support.needed_engines import needs

of_each_engine = pytest.mark.parametrize("engine", ["ort", "ortmodule"])


def pair(engine: str) -> tuple[Any, nn.Module]:
    needs(engine)
    torch._dynamo.reset()
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))
    return ortlab.wrap(model, engine=engine), copy.deepcopy(model)


@of_each_engine
def test_a_compiled_step_trains_as_in_eager_torch(engine: str) -> None:
    model, reference = pair(engine)

    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = functional.cross_entropy(model(x * 2), y)
        loss.backward()
        return loss.detach() + 1

    traced: list[str] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        traced.extend(str(node.meta.get("stack_trace")) for node in module.graph.nodes)
        return module.forward

    compiled = torch.compile(step, backend=backend)
    losses: list[list[float]] = [[], []]
    for rows in (8, 8, 5):
        x, y = torch.randn(rows, 6), torch.randint(0, 4, (rows,))
        for run, each, found in ((compiled, model, losses[0]), (step, reference, losses[1])):
            each.zero_grad()
            found.append(run(each, x, y).item())
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for buffer, expected in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected)
    assert any(__file__ in each for each in traced)
    record: Any = wrapped_model(model)
    report = record.report()
    assert report.engine_used == engine
    if engine == "ort":
        assert not any("engines/ort" in each for each in traced)
        assert any(note.startswith("checked on [8, 6]") for note in report.notes)


@of_each_engine
def test_a_whole_graph_cannot_contain_the_model(engine: str) -> None:
    model, _ = pair(engine)
    compiled = torch.compile(lambda x: model(x).sum(), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="ONNX Runtime runs this model"):
        compiled(torch.randn(8, 6))
