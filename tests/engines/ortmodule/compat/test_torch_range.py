"""Every supported torch has the names that ortlab and ORT use, as its wheel's sources show.

The quick tests read the stored table; ``make nightly`` looks up everything again.
"""

from __future__ import annotations

import re
import tomllib

import pytest

from ortlab.engines.ortmodule.compat import extensions, patches
from ortlab.engines.ortmodule.compat.requirements import TORCH_RANGE
from tests.support import torch_range
from tests.support.torch_range import ROOT, Sources

TORCHES = torch_range.stored()["torches"]
MINORS = range(TORCH_RANGE[0][1], TORCH_RANGE[1][1] + 1)
RENEW = "renew the table: python -m tests.support.torch_range"


def test_the_range_is_the_same_everywhere() -> None:
    low, high = (".".join(map(str, bound)) for bound in TORCH_RANGE)
    (above,) = {f"{major}.{minor + 1}" for major, minor in [TORCH_RANGE[1]]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={low},<{above}" in project["dependencies"]
    assert f"torch {low} to {high}" in (ROOT / "README.md").read_text()
    assert {torch_range.minor(version) for version in TORCHES} == {(2, minor) for minor in MINORS}


@pytest.mark.parametrize("version", TORCHES)
def test_a_torch_lacks_nothing(version: str) -> None:
    row = TORCHES[version]
    assert row["missing"] == []
    assert row["export lacks"] == []
    assert row["dynamo by default"]


def test_the_table_knows_every_private_name() -> None:
    """The table has every private name; only the nightly test looks up the documented ones."""
    unknown = set(torch_range.names_taken()) - set(torch_range.stored()["names"])
    assert not [name for name in unknown if "._" in name], RENEW


def test_the_installed_torch_is_as_the_table_says() -> None:
    version = extensions.torch_version().partition("+")[0]
    assert version in TORCHES, RENEW
    signatures: dict[str, object] = {}
    for other in TORCHES:
        signatures |= TORCHES[other]["signatures"]
        if other == version:
            break
    found = torch_range.looked_up(torch_range.installed())
    assert found.pop("signatures").items() <= signatures.items()
    assert found == {key: value for key, value in TORCHES[version].items() if key != "signatures"}


def targets(torch: tuple[int, int], *, onnx: tuple[int, int], cuda: bool) -> set[str]:
    versions = patches.Versions(torch=torch, onnx=onnx, cuda=cuda)
    return {row.target for row in patches.ROWS if row.applies_to(versions)}


@pytest.mark.parametrize("minor", MINORS)
def test_the_rows_that_apply(minor: int) -> None:
    """All rows apply to every torch, except one for CPUs and two for new versions of onnx."""
    every = {row.target for row in patches.ROWS}
    assert targets((2, minor), onnx=(1, 18), cuda=False) == every
    assert every - targets((2, minor), onnx=(1, 17), cuda=True) == {
        "onnxruntime.training.utils.torch_profile_utils",
        "onnxruntime.training.onnxblock.model_accessor",
        "onnxruntime.tools.symbolic_shape_infer.helper",
    }


@pytest.mark.parametrize("version", TORCHES)
def test_the_old_names_are_gone_where_the_row_restores_them(version: str) -> None:
    assert "torch.onnx._internal.jit_utils" in TORCHES[version]["old names gone"]


def test_the_row_for_the_old_names_is_not_for_a_torch_that_has_them() -> None:
    assert "torch.onnx._internal" not in targets((2, 8), onnx=(1, 18), cuda=False)


FILES = {
    "torch/__init__.py": "from torch._tensor import Tensor\nif True:\n    from . import nn",
    "torch/_tensor.py": "import torch\nclass Tensor(torch._C.TensorBase): ...",
    "torch/_C/__init__.pyi": "from torch import Tensor\ndef rand() -> Tensor: ...",
    "torch/_C/_onnx.pyi": "from enum import Enum\nclass Mode(Enum):\n    EVAL: ...",
    "torch/onnx/__init__.py": "from torch._C._onnx import Mode\nfrom .utils import *",
    "torch/onnx/utils.py": "try:\n    import fast\nexcept ImportError:\n    fast = None\n"
    "def export(model, *, dynamo=True): ...",
    "torch/nn/__init__.py": "",
}


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("torch.nn", True),
        ("torch.rand", True),
        ("torch.Tensor.anything", True),  # it inherits: the sources here do not show its attributes
        ("torch.onnx.Mode.EVAL", True),
        ("torch.onnx.Mode.TRAINING", False),
        ("torch.onnx.export", True),
        ("torch.onnx.fast", True),
        ("torch.onnx.exports", False),
        ("torch.optim", False),
    ],
)
def test_a_name_is_looked_up(name: str, there: bool) -> None:
    assert Sources(FILES.get).has(name) is there


def test_parameters_are_looked_up() -> None:
    parameters = Sources(FILES.get).parameters("torch.onnx.utils.export")
    assert parameters == {"model": "", "dynamo": "True"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import torch\ntorch.onnx.export", ["torch.onnx", "torch.onnx.export"]),
        ("from torch.onnx import symbolic_helper as h\nh._parse", [
            "torch.onnx.symbolic_helper", "torch.onnx.symbolic_helper._parse"]),
        ("import torch.cuda as c\nc.x", ["torch.cuda", "torch.cuda.x"]),
        ("import torch\nif hasattr(torch, 'old'): torch.old", []),
    ],
)  # fmt: skip
def test_names_are_found(text: str, names: list[str]) -> None:
    assert sorted(torch_range.names_in(text)) == names


@pytest.mark.nightly
def test_the_wheels_of_the_registry() -> None:
    """The registry's wheels match the table, and the table covers every release of torch."""
    now, then = torch_range.renewed(), torch_range.stored()
    assert list(now["torches"]) == list(then["torches"]), RENEW
    assert {**now, "date": ""} == {**then, "date": ""}, RENEW


@pytest.mark.nightly
def test_a_torch_before_the_range_lacks_much() -> None:
    with torch_range.wheel("2.8.0") as archive:
        missing = torch_range.looked_up(torch_range.sources_in(archive))["missing"]
    assert [name for name in missing if re.search("torchscript_exporter.registration$", name)]


@pytest.mark.nightly
@pytest.mark.parametrize("version", TORCHES)
def test_the_extensions_compile(version: str) -> None:
    with torch_range.wheel(version) as archive:
        assert torch_range.compiled(archive) == ""
