"""The code of a model on engine ``ort``, line by line: times, saved bytes, operators."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ortlab
from ortlab.engines.base import wrapped_model
from ortlab.graph.source_lines import SourceLine, SourceLines
from tests.support.called_models import bert

ROWS, IN, HIDDEN = 32, 48, 64


class Net(nn.Module):
    """A layer, an operator that ORT lacks, and a function within forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(IN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)

        # Four lines
        # that cause
        # no operators.
        h = torch.sin(h)
        h = torch.special.erfcx(h)

        def last(z: Tensor) -> Tensor:
            return z.exp().sum() if z.numel() < 1 << 30 else z.sum()

        return last(h)


FIRST = Net.forward.__code__.co_firstlineno
LAYER, SIN, ERFCX, LAST = FIRST + 1, FIRST + 6, FIRST + 7, FIRST + 10


def wrapped(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    return ortlab.wrap(model, engine="ort", self_check=False)


@pytest.fixture(scope="module")
def lines() -> SourceLines:
    return ortlab.lines(wrapped(Net()), torch.randn(ROWS, IN), steps=2)


def by_number(lines: SourceLines) -> dict[int, SourceLine]:
    return {line.number: line for line in lines.lines}


def test_each_line_has_its_operators_and_those_of_its_gradients(lines: SourceLines) -> None:
    found = by_number(lines)
    assert list(found) == [LAYER, SIN, ERFCX, LAST]
    ops = {number: {(node.op, node.phase) for node in line.nodes} for number, line in found.items()}
    assert ("Gemm", "forward") in ops[LAYER]
    assert ("Sin", "forward") in ops[SIN]
    assert {phase for _, phase in ops[SIN]} == {"forward", "backward"}
    assert {op for op, phase in ops[ERFCX] if phase == "forward"} == {"torch.special_erfcx"}
    assert [found[number].runs_in for number in (LAYER, SIN)] == ["ORT", "ORT"]
    assert "torch" in found[ERFCX].runs_in
    table = lines.nodes(f"test_source_lines.py:{SIN}")
    assert {(node.op, node.phase) for node in table} == ops[SIN]


def test_times_are_those_of_the_profile(lines: SourceLines) -> None:
    assert 0.95 <= lines.joined <= 1 + 1e-9
    total = sum(node.us for node in lines._profile.nodes)
    assert sum(sum(line.us.values()) for line in lines.lines) == pytest.approx(total, rel=0.05)
    for line in lines.lines:
        assert line.us["forward"] > 0
        assert line.us["backward"] > 0


def test_eager_time_stands_beside_it(lines: SourceLines) -> None:
    assert all(line.eager_us > 0 for line in lines.lines)
    assert "eager ms" in repr(lines)


def test_saved_bytes_are_counted_by_hand(lines: SourceLines) -> None:
    found = by_number(lines)
    # The gradient of sin reads its input, that of erfcx its input and its result, that of exp its
    # result. Sin is cheap: torch computes it again. The loss is there, too.
    size = 4 * ROWS * HIDDEN
    saved = [found[number].saved_bytes for number in (LAYER, SIN, ERFCX, LAST)]
    assert saved == [size, 0, size, size + 4]


def test_the_text_has_the_code_and_folds_what_causes_nothing(lines: SourceLines) -> None:
    text = repr(lines)
    assert f"Net.forward in test_source_lines.py:{FIRST}\n" in text
    assert f"Net.forward.last in test_source_lines.py:{LAST - 1}\n" in text
    (layer,) = re.findall(rf"^.* {LAYER}      h = self\.layer\(x\)$", text, re.MULTILINE)
    assert re.match(r"( *\d+\.\d\d){3} +8\.0 KiB +ORT ", layer)
    assert "Four lines" not in text
    assert text.count("...\n") == 2
    page = lines._repr_html_()
    assert page.count("<details>") == 4 + 2  # lines with nodes, and folded ones
    assert "Four lines" in page
    assert "1 &lt;&lt; 30" in page
    assert "1 << 30" not in page
    assert "torch.special_erfcx <i>" in page


def test_all_lines_of_a_transformer_store_what_its_graphs_do() -> None:
    model, batch = bert()
    made = wrapped(model)
    found = ortlab.lines(made, batch, steps=1)
    assert found.joined >= 0.95
    record: Any = wrapped_model(made)
    stored = sum(graph.stored_bytes() for graph in record.last_graphs()["backward"])
    assert sum(line.saved_bytes for line in found.lines) == pytest.approx(stored, rel=0.1)
    names = [each.name for each in found.functions]
    order = ["BertEmbeddings", "BertSelfAttention", "BertSelfOutput", "BertOutput", "BertPooler"]
    places = [names.index(f"{name}.forward") for name in order]
    assert places == sorted(places)


def test_a_model_in_evaluation_has_a_forward_pass_only() -> None:
    found = ortlab.lines(wrapped(Net()).eval(), torch.randn(4, IN), steps=1)
    assert list(by_number(found)) == [LAYER, SIN, ERFCX, LAST]
    assert "backward" not in repr(found)
    assert "saved" in repr(found)
    assert all(line.saved_bytes == 0 for line in found.lines)


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CODE = """
import torch

class Own(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return torch.tanh(y)
"""


def test_code_that_was_edited_is_shown_as_it_was_captured(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(CODE)
    made = wrapped(imported(path).Own(6, 4))
    made(torch.randn(3, 6)).sum().backward()
    path.write_text("# another first line\n" + CODE.replace("tanh", "sin"))
    text = repr(ortlab.lines(made, torch.randn(3, 6), steps=1))
    assert "own.py in own.py:6\n" in text
    assert re.search(r" 7  return torch\.tanh\(y\)$", text, re.MULTILINE)
    assert "torch.sin" not in text


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    parts = []
    for folder, function in (("one", "tanh"), ("two", "sin")):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "own.py"
        path.write_text(CODE.replace("tanh", function))
        parts.append(imported(path).Own(6, 6))
    found = ortlab.lines(wrapped(nn.Sequential(*parts)), torch.randn(3, 6), steps=1)
    assert found.joined >= 0.95
    assert [each.name for each in found.functions] == ["Own.forward"] * 2
    makers = {node.name.partition("/")[0] for node in found.nodes("own.py:7")}
    assert {"tanh_backward", "sin"} <= makers


class Skipped(nn.Module):
    """A model that Dynamo does not capture."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(IN, 4)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        return made


def test_a_model_in_eager_torch_says_why() -> None:
    with pytest.raises(
        ValueError, match=r"^Skipped runs on engine 'eager' and has no graph: torch captured no"
    ):
        ortlab.lines(wrapped(Skipped()), torch.randn(4, IN), steps=1)


def test_models_without_lines() -> None:
    with pytest.raises(ValueError, match="wrap it with engine='ort'"):
        ortlab.lines(Net(), torch.randn(4, IN))
    with pytest.raises(ValueError, match="give a batch"):
        ortlab.lines(wrapped(Net()))


def test_an_unknown_line(lines: SourceLines) -> None:
    with pytest.raises(ValueError, match=rf"did you mean 'test_source_lines\.py:{SIN}'"):
        lines.nodes(f"test_source_line.py:{SIN}")
