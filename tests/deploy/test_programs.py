"""The Python and JavaScript programs in an export's README.md run, whatever the names are."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ortlab
from ortlab.deploy import snippets
from ortlab.deploy.exported import Exported
from ortlab.deploy.graph import Port
from tests.support import node
from tests.support.tiny import batch, bert, gpt2, spread

pytestmark = pytest.mark.usefixtures("one_thread")

HOSTILE = "a\"b\\'`|<b>\n```\n${x} größe 🙂 */ ??/ \\u0022"
"""Characters that end a string, comment, table cell or code fence in one of the languages."""


class Hostile(nn.Module):
    """A model whose inputs and outputs have hostile names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, **given: torch.Tensor) -> Mapping[str, torch.Tensor]:
        (x,) = given.values()
        return {f"{HOSTILE} out": self.linear(x), "__proto": x > 0, "constructor": x.long()}


Hostile.__name__ = "<script>*x*|`"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Exported]:
    torch.manual_seed(3)
    model = Hostile()
    path = tmp_path_factory.mktemp("hostile") / "out"
    return model, ortlab.export(model, path, {HOSTILE: torch.randn(2, 3)})


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Exported]:
    model = spread(bert())
    return model, ortlab.export(model, tmp_path_factory.mktemp("bert") / "out", batch())


@pytest.fixture
def javascript_here() -> None:
    """Require Node.js with onnxruntime; skip without them, or fail where they are required."""
    try:
        node.ready()
    except node.NoNode as reason:
        if os.environ.get("ORTLAB_REQUIRE_NODE") == "1":
            pytest.fail(str(reason))
        pytest.skip(str(reason))


Printed = dict[str, tuple[list[int], list[float]]]
"""Shape and first values of each output, as a program prints them."""


def program(found: Exported, fence: str) -> str:
    """Return a program from the README."""
    text = (found.path / "README.md").read_text()
    return text.split(f"\n```{fence}\n")[1].split("\n```\n")[0]


def filled(found: Exported, rows: int) -> dict[str, torch.Tensor]:
    """Return the inputs that the programs use."""
    sizes = {"batch": rows, "sequence": 7}
    return {
        port.name: torch.full(
            snippets.shape(port, sizes), snippets.fill(port), dtype=getattr(torch, port.type)
        )
        for port in found.inputs
    }


def wanted(model: nn.Module, found: Exported) -> Printed:
    model.eval()
    with torch.no_grad():
        outputs = model(**filled(found, 2))
    return {
        name: (list(value.shape), value.flatten()[: snippets.SHOWN].double().tolist())
        for name, value in outputs.items()
    }


def of_python(found: Exported) -> Printed:
    code = program(found, "python").replace("print(name, ", "print(repr(name), ")
    out = io.StringIO()
    with contextlib.chdir(found.path), contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {})
    parsed: Printed = {}
    for line in out.getvalue().splitlines():
        printed = re.fullmatch(r"(['\"].*['\"]) (\[[^]]*\]) (\[.*\])", line)
        assert printed, line
        name, dims, values = map(ast.literal_eval, printed.groups())
        parsed[name] = (dims, values)
    return parsed


def of_javascript(found: Exported) -> Printed:
    code = program(found, "js")
    shown = "console.log(JSON.stringify([name, "
    assert "console.log(name, " in code
    code = code.replace("console.log(name, ", shown).replace("Number));", "Number)]));")
    lines = node.run(code, cwd=found.path).splitlines()
    return {name: (dims, values) for name, dims, values in map(json.loads, lines)}


def close(
    given: Printed,
    expected: Printed,
) -> None:
    assert list(given) == list(expected)
    for name, (shape, values) in expected.items():
        assert given[name][0] == shape
        np.testing.assert_allclose(given[name][1], values, atol=1e-4)


@pytest.mark.parametrize("which", ["classifier", "hostile"])
def test_python_runs(which: str, request: pytest.FixtureRequest) -> None:
    model, found = request.getfixturevalue(which)
    close(of_python(found), wanted(model, found))


@pytest.mark.parametrize("which", ["classifier", "hostile"])
def test_javascript_runs(which: str, request: pytest.FixtureRequest, javascript_here: None) -> None:
    model, found = request.getfixturevalue(which)
    close(of_javascript(found), wanted(model, found))


def test_javascript_is_torch_on_real_values(tmp_path: Path, javascript_here: None) -> None:
    """JavaScript returns GPT-2's logits for random tokens and padding, each within 1e-4."""
    model = spread(gpt2()).eval()
    found = ortlab.export(model, tmp_path / "out", batch())
    ids = torch.randint(0, 50, (3, 11), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    tensors = {"input_ids": ids, "attention_mask": mask}
    code = (
        'import * as ort from "onnxruntime-node";\n'
        f"const session = await ort.InferenceSession.create({json.dumps(str(found.file))});\n"
        f"const given = {json.dumps({k: v.flatten().tolist() for k, v in tensors.items()})};\n"
        "const feeds = Object.fromEntries(Object.entries(given).map(([name, values]) =>\n"
        '  [name, new ort.Tensor("int64", BigInt64Array.from(values.map(BigInt)), [3, 11])]));\n'
        "const { logits } = await session.run(feeds);\n"
        "console.log(JSON.stringify(Array.from(logits.data)));\n"
    )
    values = np.array(json.loads(node.run(code, cwd=tmp_path)))
    with torch.no_grad():
        logits = model(**tensors).logits
    apart = float(np.abs(values.reshape(logits.shape) - logits.numpy()).max())
    print(f"onnxruntime-node on GPT-2: {apart:.1e} from torch")
    assert apart < 1e-4


def test_other_languages_are_there_and_say_so(classifier: tuple[nn.Module, Exported]) -> None:
    text = (classifier[1].path / "README.md").read_text()
    for language, fence, api in (
        ("C++", "cpp", "onnxruntime's C++ API, 1.19"),
        ("C#", "csharp", "Microsoft.ML.OnnxRuntime 1.19"),
        ("Java", "java", "com.microsoft.onnxruntime:onnxruntime 1.19"),
    ):
        assert f"### {language} (not tested)" in text
        code = program(classifier[1], fence)
        assert code.splitlines()[0] == f"// {code.splitlines()[0][3:]}"
        assert f"{api}; not tested" in code.splitlines()[0]
        assert '"input_ids"' in code
        assert '"logits"' in code
        assert code.count("{") == code.count("}")
        assert code.count("(") == code.count(")")


def test_names_stay_in_their_literals(hostile: tuple[nn.Module, Exported]) -> None:
    """A name breaks no line of a program and no table."""
    _, found = hostile
    text = (found.path / "README.md").read_text()
    fences = [line for line in text.splitlines() if line.lstrip().startswith("```")]
    assert len(fences) == 10
    assert text.startswith("# \\<script\\>\\*x\\*\\|\\`\n")
    outside = re.sub(r"\n```\w+\n.*?\n```\n", "\n", text, flags=re.DOTALL)
    rows = [line for line in outside.splitlines() if "größe" in line and line.startswith("|")]
    assert len(rows) >= 2
    for row in rows:
        assert len(re.findall(r"(?<!\\)\|", row)) in (4, 7)
        assert "<b>" not in row.replace("\\<", "")
    cells = [
        (snippets.cpp_literal, lambda text: ast.literal_eval(f"b{text}").decode()),
        (snippets.json_literal, json.loads),
        (snippets.python_literal, ast.literal_eval),
    ]
    for write, read in cells:
        assert write(HOSTILE).isascii()
        assert "\n" not in write(HOSTILE)
        assert read(write(HOSTILE)) == HOSTILE
    assert "?" not in snippets.cpp_literal(HOSTILE)


@pytest.mark.parametrize(
    "kind", ["float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"]
)
def test_every_type_has_its_programs(kind: str) -> None:
    ports = [Port("x", kind, ("batch", 2))]
    made = snippets.programs(ports, ports, {"batch": 3}, "model.onnx")
    assert [each.fence for each in made] == ["python", "js", "cpp", "csharp", "java"]
    half: Any = [Port("x", "float16", (2,))]
    assert [each.fence for each in snippets.programs(half, half, {}, "m.onnx")] == ["python"]
