"""The files that `ortlab.export` writes, its checks and its refusals."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import ortlab
from ortlab.deploy import axes, check, folder, weights
from ortlab.deploy.call import ModelCall
from ortlab.deploy.exported import Exported
from ortlab.engines.ortmodule import compat
from ortlab.engines.ortmodule.engine import execution_of
from ortlab.engines.torchscript.isolation import NotInGraph
from ortlab.notebook.views import display, in_page
from ortlab.notebook.views.in_page import InPage
from tests.support import parity, tiny
from tests.support.tiny import batch, spread
from tests.support.typed_magics import Typist

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def bert() -> nn.Module:
    return spread(tiny.bert(dropout=0.1)).train()


@pytest.fixture(scope="module")
def exported(bert: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Return BERT exported in all forms, with an accuracy metric."""
    path = tmp_path_factory.mktemp("bert") / "out"
    data = [batch(8, 7), batch(8, 5)]
    return ortlab.export(bert, path, batch(), fp16=True, int8=True, eval_dataset=data)


def graph(found: Exported) -> onnx.ModelProto:
    return onnx.load_model(str(found.file))


def leftovers(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


@pytest.mark.parametrize("name", parity.CELLS)
def test_architectures_are_torchs(name: str, tmp_path: Path) -> None:
    """Each trial is within 1e-5 of an output's size; the tolerance of the check is 1e-4."""
    found = parity.exported(name, tmp_path / "out")
    form = found.forms[0]
    print(f"{name}: largest difference {form.difference:.1e}, {form.relative:.1e} of its size")
    assert form.relative < 1e-5
    assert {"the example", "random values", "a batch of 1", "largest values"} <= set(found.tried)
    assert [port.shape[0] for port in (*found.inputs, *found.outputs)] == ["batch"] * (
        len(found.inputs) + len(found.outputs)
    )
    assert leftovers(tmp_path) == ["out"]


def test_graph_says_what_it_is(bert: nn.Module, exported: Exported) -> None:
    assert [str(port) for port in (*exported.inputs, *exported.outputs)] == [
        "input_ids int64 [batch, sequence]",
        "attention_mask int64 [batch, sequence]",
        "logits float32 [batch, 2]",
    ]
    model = graph(exported)
    assert {each.name for each in model.graph.initializer} == {
        n for n, _ in bert.named_parameters()
    }
    assert {"ortlab": ortlab.__version__, "torch": torch.__version__, "opset": "17"} == {
        each.key: each.value for each in model.metadata_props
    }
    assert [(each.domain, each.version) for each in model.opset_import] == [("", 17)]
    assert "Dropout" not in {node.op_type for node in model.graph.node}
    assert any(node.name.startswith("/bert/encoder/layer.0/attention") for node in model.graph.node)
    assert all(part.training for part in bert.modules())


def test_any_size_runs(bert: nn.Module, exported: Exported) -> None:
    """Sizes that no check has used run in a separate session."""
    session = onnxruntime.InferenceSession(exported.file, providers=["CPUExecutionProvider"])
    bert.eval()
    try:
        for rows, length in ((5, 13), (1, 2), (16, 40)):
            given = {k: v for k, v in batch(rows, length).items() if k != "labels"}
            with torch.no_grad():
                wanted = bert(**given).logits
            (found,) = session.run(["logits"], {k: v.numpy() for k, v in given.items()})
            np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5)
    finally:
        bert.train()


def test_smaller_forms_say_how_far_they_are(exported: Exported) -> None:
    fp32, fp16, int8 = (exported[name] for name in ("fp32", "fp16", "int8"))
    assert fp32.difference < 1e-5 < fp16.difference < int8.difference < 0.5
    assert fp32.bytes > fp16.bytes > int8.bytes
    for form in exported.forms:
        assert form.torch_accuracy == fp32.accuracy
        assert form.accuracy is not None
        assert abs(form.accuracy - fp32.accuracy) <= 0.25
        found = exported(form.name, **{k: v for k, v in batch(3, 9).items() if k != "labels"})
        assert found["logits"].dtype == np.float32
    shown = repr(exported)
    assert "model.int8.onnx" in shown
    assert "accuracy (torch)" in shown
    assert "<table>" in exported._repr_html_()


def test_a_mask_that_hides_nothing_has_the_length_of_what_it_masks() -> None:
    """BERT ignores such a mask, whatever its length."""
    found = axes.tried(ModelCall.of(tiny.bert().eval(), batch())).found
    assert [axis.name for axis in found] == ["batch", "sequence"]
    assert found[1].places == (("input_ids", 1), ("attention_mask", 1))


def test_a_second_batch_says_which_sizes_vary(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    x = torch.randn(2, 5, 4)
    found = ortlab.export(model, tmp_path / "out", x, second=torch.randn(2, 6, 4))
    assert [port.shape for port in found.inputs] == [(2, "sequence", 4)]
    assert "sequence 6" in found.tried
    with pytest.raises(ValueError, match=r"the second batch has .* differ only in sizes"):
        ortlab.export(model, tmp_path / "other", x, second=x.double())


def test_wrapped_is_exported_as_the_plain_one(tmp_path: Path) -> None:
    """The export of a wrapped model equals the plain one's, for the last batch it was called with.

    The training export before it uses rules that write nodes which torch runs.
    """
    model = spread(tiny.bert())
    wrapped = ortlab.wrap(model, engine="ortmodule", kernels="torch")
    wrapped(**batch(3, 6)).loss.backward()
    ours = ortlab.export(wrapped, tmp_path / "ours")
    plain = ortlab.export(model, tmp_path / "plain", batch(3, 6))
    assert graph(ours).graph == graph(plain).graph
    assert {node.domain for node in graph(ours).graph.node} == {""}
    # Engine ort's own rules apply again: another call makes another export.
    wrapped(**{name: each for name, each in batch().items() if name != "attention_mask"})
    last = execution_of(wrapped).exports()[-1].stages()["exported"]
    assert "ATen" in {node.op_type for node in last.graph.node}


def test_other_wrappers_are_exported_as_what_they_hold(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), torch.randn(2, 4)
    plain = ortlab.export(model, tmp_path / "plain", x)
    compiled = ortlab.export(torch.compile(model), tmp_path / "compiled", x)  # type: ignore[arg-type]
    bare = ortlab.export(compat.ortmodule().ORTModule(model), tmp_path / "bare", x)
    eager = ortlab.export(ortlab.wrap(model, engine="eager"), tmp_path / "eager", x)
    assert [graph(each).graph for each in (compiled, bare, eager)] == [graph(plain).graph] * 3
    assert model.training


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, unused: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += 1
        x.mul_(2)
        return {"x": x, "y": self.linear(x)}


def test_what_forward_changes_is_as_it_was(tmp_path: Path) -> None:
    """Inputs and buffers are unchanged; an output named like an input is renamed."""
    model, x = InPlace(), torch.ones(2, 4)
    found = ortlab.export(model, tmp_path / "out", {"x": x, "unused": x})
    assert torch.equal(x, torch.ones(2, 4))
    assert not model.seen
    assert [port.name for port in found.inputs] == ["x"]
    assert [port.name for port in found.outputs] == ["x_out", "y"]
    assert "not an input: unused, which forward does not read" in found.notes
    np.testing.assert_array_equal(found(x=x)["x_out"], 2 * x.numpy())


def test_what_a_run_was_trained_on_is_the_example(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    samples = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.randint(2, (12,)))
    with pytest.raises(ValueError, match=r"no batch of this Sequential was seen .* forward\(input"):
        ortlab.export(model, tmp_path / "out")
    loader = torch.utils.data.DataLoader(samples, batch_size=4, shuffle=True)
    run = ortlab.finetune(model, loader, loss="cross_entropy", engine="eager", max_steps=2)
    run.result()
    before = torch.random.get_rng_state()
    found = ortlab.export(model, tmp_path / "out")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [str(port) for port in found.inputs] == ["input float32 [batch, 4]"]


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return self.linear(x)
        return -self.linear(x)


class BySize(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == 4
        if x.min() < -1e6:
            raise ValueError("too small")
        return self.linear(x) if x.shape[0] > 2 else -self.linear(x)


class Counting(Branch):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.calls += 1
        return self.linear(x) * Counting.calls


class Spectrum(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(self.linear(x)).abs()


class Fraction(Branch):
    def forward(self, x: torch.Tensor) -> Any:
        return {"y": self.linear(x), "norm": float(x.shape[0])}


def test_a_branch_by_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotInGraph, match=r"test_export.py:\d+: if x.sum\(\) > 0:.*torch.where"):
        ortlab.export(Branch(), tmp_path / "out", torch.randn(2, 4))
    assert leftovers(tmp_path) == []


def test_a_branch_by_size_keeps_the_sizes(tmp_path: Path) -> None:
    """A condition that only raises is not counted as a branch."""
    found = ortlab.export(BySize(), tmp_path / "out", torch.randn(2, 4))
    assert [port.shape for port in found.inputs] == [(2, 4)]
    (note,) = found.notes
    assert "batch is 2 in the graph" in note
    assert "if x.shape[0] > 2" in note
    with pytest.raises(Exception, match="Got invalid dimensions"):
        found(x=np.zeros((3, 4)))


def test_a_difference_names_the_output_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(check.CheckFailed, match=r"output 'output' is off by \d.*1e-04 is allowed"):
        ortlab.export(Counting(), tmp_path / "out", torch.randn(2, 4))
    assert leftovers(tmp_path) == ["out"]
    assert leftovers(tmp_path / "out") == []


def test_an_operator_without_a_rule_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotInGraph, match=r"no rule for aten::fft_rfft \(.*test_export.py:\d+"):
        ortlab.export(Spectrum(), tmp_path / "out", torch.randn(2, 4))


@pytest.mark.parametrize(
    ("model", "given", "settings", "reason"),
    [
        (nn.Linear(4, 2), torch.randn(2, 4), {"opset": 21}, "opset=21"),
        (nn.Linear(4, 2), torch.randn(2, 4), {"opset": 13}, "opset=13"),
        (nn.Linear(4, 2), {"x": torch.randn(2, 4)}, {}, "does not fit forward"),
        (nn.Linear(4, 2), {"input": [torch.randn(2, 4)]}, {}, "input is a list"),
        (nn.Linear(4, 2), [], {}, "the data is empty"),
        (Fraction(), torch.randn(2, 4), {}, "returns norm that is a float, not a tensor"),
        (nn.Linear(4, 2, device="meta"), torch.randn(2, 4), {}, "on the meta device"),
        (nn.Linear, torch.randn(2, 4), {}, "is the class Linear"),
    ],
)
def test_refused(model: Any, given: Any, settings: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        ortlab.export(model, tmp_path / "out", given, **settings)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("opset", [14, 20])
def test_oldest_and_newest_opset(opset: int, tmp_path: Path) -> None:
    found = ortlab.export(spread(tiny.bert()), tmp_path / "out", batch(), opset=opset)
    assert [each.version for each in graph(found).opset_import] == [opset]
    assert found.forms[0].relative < 1e-5


# ---- the folder ----------------------------------------------------------------------------------


def test_only_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    model, x, path = nn.Linear(4, 2), torch.randn(3, 4), tmp_path / "a" / "out"
    ortlab.export(model, path, x, fp16=True)
    ortlab.export(model, path, x)
    assert leftovers(path) == ["README.md", "export.json", "model.onnx"]
    assert leftovers(path.parent) == ["out"]
    (path / "README.md").write_text("mine")
    with pytest.raises(ValueError, match=r"has other files \(README.md\)"):
        ortlab.export(model, path, x)
    assert (path / "README.md").read_text() == "mine"
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"has other files \(notes.txt\)"):
        ortlab.export(model, tmp_path / "b", x)
    with pytest.raises(ValueError, match="exists and is not a folder"):
        ortlab.export(model, tmp_path / "b" / "notes.txt", x)
    with pytest.raises(ValueError, match="is the name of a file, and an export is a folder"):
        ortlab.export(model, tmp_path / "model.onnx", x)
    with pytest.raises(RuntimeError, match="cannot write the export"):
        ortlab.export(model, tmp_path / "b" / "notes.txt" / "out", x)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """A full disk leaves no files: here no file can exceed 64 KiB, and the weights do."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        with pytest.raises(RuntimeError, match=r"cannot write the export to .*: File too large"):
            ortlab.export(nn.Linear(256, 256), tmp_path / "out", torch.randn(2, 256))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert leftovers(tmp_path) == []


def test_an_export_is_loaded_as_it_was(exported: Exported, tmp_path: Path) -> None:
    again = Exported.load(exported.path)
    assert repr(again) == repr(exported)
    with pytest.raises(ValueError, match="has no export"):
        Exported.load(tmp_path)
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    found = ortlab.export(model, tmp_path / "out", x)
    np.testing.assert_allclose(found(input=x)["output"], model(x).detach().numpy(), atol=1e-6)
    with pytest.raises(ValueError, match="the model takes input, not x"):
        found(x=x)
    found.file.write_bytes(found.file.read_bytes() + b"\0")
    with pytest.raises(ValueError, match="was changed after the export"):
        Exported.load(tmp_path / "out")
    facts = json.loads((tmp_path / "out" / folder.MANIFEST).read_text())
    facts["forms"][0]["file"] = "../out/model.onnx"
    (tmp_path / "out" / folder.MANIFEST).write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="outside the folder and is not read"):
        Exported.load(tmp_path / "out")


def _changed(path: Path, changes: dict[str, Any], form: dict[str, Any]) -> None:
    facts = json.loads((path / folder.MANIFEST).read_text())
    first, *others = facts["forms"]
    facts |= {"forms": [first | form, *others]} | changes
    (path / folder.MANIFEST).write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        *(({}, {"file": value}) for value in (3, None, "", "gone.onnx")),
        *(({}, {"bytes": value}) for value in ("5", None, -1, 2**70, 5.0)),
        *(({}, {"difference": value}) for value in ("x", None, 10**400)),
        *(({}, {name: []}) for name in ("name", "relative", "worst", "accuracy")),
        *(({"forms": value}, {}) for value in ([], 3, [3], {"a": 1})),
        *(({name: 3}, {}) for name in ("model", "tried", "notes", "inputs", "outputs", "files")),
        *(({name: [3]}, {}) for name in ("tried", "notes", "inputs", "files")),
        ({"inputs": [{"name": 3, "type": "float32", "shape": [1]}]}, {}),
        ({"inputs": [{"name": "x", "type": "float32", "shape": [None]}]}, {}),
        ({"opset": "17"}, {}),
        ({"files": {name: {"sha256": ""} for name in ("", "gone.onnx", "model.onnx")}}, {}),
        ({"files": {"gone.onnx": {"sha256": ""}}}, {"file": "gone.onnx"}),
        ({"files": {"": {"sha256": ""}}}, {"file": ""}),
    ],
)
def test_a_manifest_that_no_export_has_is_refused(
    beside: Exported, tmp_path: Path, changes: dict[str, Any], form: dict[str, Any]
) -> None:
    path = shutil.copytree(beside.path, tmp_path / "out")
    _changed(path, changes, form)
    told = "has no readable export|was changed after the export|and is not read"
    with pytest.raises(ValueError, match=told):
        Exported.load(path)


def test_a_manifest_that_is_no_json_or_no_plain_file(tmp_path: Path) -> None:
    manifest = tmp_path / folder.MANIFEST
    for text in ("[" * 100_000, "[1]", "9" * 5000):
        manifest.write_text(text)
        with pytest.raises(ValueError, match=r"has no export: .* is damaged"):
            Exported.load(tmp_path)
    manifest.unlink()
    manifest.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"has no export: .*symbolic links are not followed"):
        Exported.load(tmp_path)
    manifest.unlink()
    os.mkfifo(manifest)
    with pytest.raises(ValueError, match=r"has no export: .*not a regular file"):
        Exported.load(tmp_path)


# ---- external data -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Return a model with its weights in a file next to it, in every form."""
    path = tmp_path_factory.mktemp("beside") / "out"
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    return ortlab.export(model, path, torch.randn(2, 8), external_data=True, fp16=True, int8=True)


def test_weights_in_a_file_of_their_own(beside: Exported) -> None:
    assert leftovers(beside.path) == [
        "README.md",
        "export.json",
        *("model.fp16.onnx", "model.fp16.onnx.data", "model.int8.onnx", "model.int8.onnx.data"),
        *("model.onnx", "model.onnx.data"),
    ]
    assert beside.forms[0].relative < 1e-5
    assert beside.forms[0].bytes > (beside.path / "model.onnx.data").stat().st_size
    raw = onnx.load_model(str(beside.file), load_external_data=False)
    assert all(each.data_location == onnx.TensorProto.EXTERNAL for each in raw.graph.initializer)
    moved = beside.path.rename(beside.path.with_name("moved"))
    try:
        x = np.ones((3, 8), np.float32)
        assert Exported.load(moved)(input=x)["output"].shape == (3, 4)
    finally:
        moved.rename(beside.path)


@pytest.mark.parametrize(
    "place", ["../secret", "a/../../secret", "/etc/passwd", "C:\\secret", "..\\secret", "link", ""]
)
def test_external_data_elsewhere_is_not_read(place: str, beside: Exported, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"\0" * 8192)
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "link").symlink_to("../secret")
    model = onnx.load_model(str(beside.file), load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = place
    (inside / "model.onnx").write_bytes(model.SerializeToString())
    (inside / "model.onnx.data").write_bytes((beside.path / "model.onnx.data").read_bytes())
    with pytest.raises(ValueError, match="is outside its folder and is not read"):
        check.session(inside / "model.onnx")


def test_external_data_in_a_subgraph_is_seen(tmp_path: Path) -> None:
    tensor = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [1], b"0000", True)
    weights.set_external_data(tensor, location="../secret")
    inner = onnx.helper.make_graph(
        [onnx.helper.make_node("Constant", [], ["y"], value=tensor)], "inner", [], []
    )
    node = onnx.helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=inner)
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "outer", [], []))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match="and is not read"):
        weights.check_places(tmp_path / "model.onnx")


@pytest.mark.nightly
def test_more_than_protobuf_takes(tmp_path: Path) -> None:
    """2.1 GiB of weights get their own file by default."""
    model = nn.Sequential(nn.Embedding(2**19 + 2**14, 1024), nn.Linear(1024, 4))
    found = ortlab.export(model, tmp_path / "out", torch.randint(0, 1000, (2, 3)))
    assert (found.path / "model.onnx.data").stat().st_size > weights.PROTOBUF_LIMIT
    assert found.forms[0].relative < 1e-5


# ---- %ort export ---------------------------------------------------------------------------------


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Path]:
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


def test_typed(ip: Typist, at: Path) -> None:
    ip("model = Net()\ndata = batches()")
    out = ip("exported = %ort export model out/ --batch data --int8 --eval-dataset data")
    assert "exporting Net at opset 17" in out
    assert "checking the graph in onnxruntime" in out
    shown = ip("exported")
    assert "model.int8.onnx" in shown
    assert "in: x float32 [batch, 4]" in shown
    assert leftovers(at / "out") == ["README.md", "export.json", "model.int8.onnx", "model.onnx"]
    assert "opset=30" in ip.refused("%ort export model out2/ --batch data --opset 30")
    assert "nothing is called 'nothing'" in ip.refused("%ort export model out2 --batch nothing")
    assert "no batch of this Net was seen" in ip.refused("other = Net()\n%ort export other out2")
    assert ip.completions("%ort export mo") == ["model"]
    assert ip.completions("%ort export model out --f") == ["--fp16"]
    assert leftovers(at) == ["out"]


# ---- in the page, as far as no browser is needed -------------------------------------------------


def test_a_page_cannot_take_every_model(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = ortlab.export(nn.Linear(4, 2).half(), tmp_path / "half", torch.ones(1, 4).half())
    with pytest.raises(ValueError, match="JavaScript has no array type for input float16"):
        InPage(half)
    with monkeypatch.context() as smaller:
        smaller.setattr(in_page, "MOST_BYTES", 2**10)
        with pytest.raises(ValueError, match=r"KiB, and a page can load up to 1.0 KiB"):
            InPage(exported)
    monkeypatch.setattr(display, "STATIC", tmp_path)
    with pytest.raises(RuntimeError, match=r"pip install -e \. again"):
        InPage(exported)


def test_a_page_needs_the_extension(exported: Exported) -> None:
    with pytest.raises(RuntimeError, match=r"%load_ext ortlab"):
        exported.in_page()


def test_the_extension_shows_a_model_in_the_page(exported: Exported, ip: Typist) -> None:
    assert isinstance(exported.in_page(), InPage)


def test_a_page_gets_no_more_than_it_takes_whatever_the_manifest_says(
    beside: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "out"
    shutil.copytree(beside.path, moved)
    facts = json.loads((moved / folder.MANIFEST).read_text())
    facts["forms"][0]["bytes"] = 5
    (moved / folder.MANIFEST).write_text(json.dumps(facts))
    os.truncate(moved / "model.onnx.data", 240 * 2**20)  # sparse: it takes no space on disk
    with pytest.raises(
        ValueError, match=r"model\.onnx has 240\.0 MiB, and a page can load up to 64"
    ):
        InPage(Exported.load(moved))
    monkeypatch.setattr(in_page, "MOST_BYTES", 2**6)
    monkeypatch.setattr(weights, "check_places", None)  # an oversized model is not read
    with pytest.raises(ValueError, match=r"model\.onnx has .*, and a page can load up to 64 bytes"):
        InPage(Exported.load(moved))
