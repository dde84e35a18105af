"""The order in which a session runs a graph that it received unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import ortlab
from ortlab.engines.ortmodule.compat import restoring
from ortlab.engines.ortmodule.engine import execution_of
from tests.support import tiny


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(3):
            parts += [nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.1)]
        self.net = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.flatten(1).view(x.shape[0], 8)).square().mean()


def _layers() -> tuple[nn.Module, dict[str, Any]]:
    return Layers(), {"x": torch.randn(4, 8)}


def _bert() -> tuple[nn.Module, dict[str, Any]]:
    ids = torch.randint(0, 50, (3, 7))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}
    return tiny.bert(dropout=0.1), batch


@pytest.mark.parametrize("make", [_layers, _bert])
@pytest.mark.parametrize("kernels", ["torch", "ort"])
def test_the_order_is_the_sessions(ops: Any, make: Any, kernels: str, tmp_path: Path) -> None:
    model, batch = make()
    wrapped = ortlab.wrap(model, kernels=kernels, cache=False, self_check=False)
    wrapped(**batch)
    (export,) = execution_of(wrapped).exports()
    twin = export.profiled(tmp_path)
    outputs = twin.manager.forward(**batch)
    loss = outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]
    loss.backward()
    path = Path(twin.manager._execution_agent._inference_session.end_profiling())
    twin.close()
    events = [each for each in json.loads(path.read_text()) if each.get("cat") == "Node"]
    events = [each for each in events if each["name"].endswith("_kernel_time")]
    ran = [each["name"].removesuffix("_kernel_time") for each in sorted(events, key=_start)]
    assert twin._executed is not None
    told = restoring.in_order(onnx.load_model_from_string(twin._executed))
    known = [node.name for node in told.graph.node if node.op_type not in ("YieldOp", "Constant")]
    assert ran == known


def _start(event: dict[str, Any]) -> int:
    return int(event["ts"])
