"""Every patch fixes its symptom, is needed, and leaves torch's public behavior unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from ortlab.engines.ortmodule import compat
from ortlab.engines.ortmodule.compat import base, extensions, patches
from ortlab.engines.ortmodule.compat.patches import ROWS, Patch
from ortlab.engines.torchscript import streams

# Each row runs in its own process, forked so that torch is imported only once.
WITHOUT_EACH = """
import json, os, torch, onnx, onnxruntime, sympy
from ortlab.engines.ortmodule.compat import exporting, extensions, patches
addresses = extensions.load()
versions = patches.installed()
unneeded = []
for row in patches.ROWS:
    if not row.applies_to(versions):
        continue
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            patches.apply(addresses, leave_out=row.target)
            gone = row.probe()
        except BaseException:
            gone = False
        os._exit(int(gone))
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1:
        unneeded.append(row.target)
print(json.dumps(unneeded))
"""


def python(code: str) -> str:
    """Return the output of a fresh Python; raise CalledProcessError when it fails."""
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.target)
def test_the_symptom_is_gone(ort: compat.TrainingRuntime, row: Patch) -> None:
    if not row.applies_to(patches.installed()):
        pytest.skip("these versions do not need it")
    assert row.probe()


def test_every_row_is_needed(ort: compat.TrainingRuntime) -> None:
    assert json.loads(python(WITHOUT_EACH).splitlines()[-1]) == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.target)
def test_rows_say_what_they_are_for(row: Patch) -> None:
    assert row.symptom
    assert row.link.startswith("https://")
    assert [other.target for other in ROWS].count(row.target) == 1


def test_applying_twice_changes_nothing(ort: compat.TrainingRuntime) -> None:
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager
    from onnxruntime.training.ortmodule._training_manager import TrainingManager

    transition = sys.modules["onnxruntime.training.ortmodule._graph_transition_manager"]
    owners = ort.ORTModule, GraphTransitionManager, TrainingManager, transition, torch, torch.cuda

    def now() -> dict[str, object]:
        found = {f"{o.__name__}.{name}": value for o in owners for name, value in vars(o).items()}
        return {name: value for name, value in found.items() if callable(value)}

    before = now()
    patches.apply(extensions.load())
    after = now()
    assert [name for name in before if after[name] is not before[name]] == []
    assert compat.ortmodule() is ort


def test_importing_changes_nothing() -> None:
    code = """
import json, sys, os, warnings, logging
environment, filters = dict(os.environ), list(warnings.filters)
import ortlab.engines.ortmodule.compat, ortlab.engines.ortmodule.compat.requirements
reason = ortlab.engines.ortmodule.compat.unavailable()
assert reason is None, reason
loaded = [name for name in ("torch", "onnx", "onnxruntime", "numpy") if name in sys.modules]
same = environment == dict(os.environ) and filters == warnings.filters
print(json.dumps([loaded, same, logging.getLogger().handlers]))
"""
    assert json.loads(python(code)) == [[], True, []]


@pytest.mark.parametrize("first", ["", "import onnxruntime.training"])
def test_torch_stays_torch(ort: compat.TrainingRuntime, first: str) -> None:
    """Torch is unchanged, even where the user imported ORT first, which fails halfway."""
    code = """
import warnings; warnings.simplefilter("ignore")
import json, logging, torch, torch.onnx, torch.utils.checkpoint, torch.autograd
watched = (
    (torch, "manual_seed"), (torch.cuda, "manual_seed"), (torch.onnx, "export"),
    (torch.utils.checkpoint, "checkpoint"), (torch.autograd.Function, "apply"),
    (torch.cuda.nvtx, "range_push"), (torch, "use_deterministic_algorithms"),
)
before = [getattr(owner, name) for owner, name in watched]
FIRST
state, flag = torch.get_rng_state(), torch.are_deterministic_algorithms_enabled()
import onnx; ir = onnx.IR_VERSION
from ortlab.engines.ortmodule import compat
ort = compat.ortmodule()
module = ort.ORTModule(torch.nn.Linear(2, 2), ort.DebugOptions(log_level=ort.LogLevel.ERROR))
state = torch.get_rng_state()
module(torch.ones(1, 2)).sum().backward()
changed = [name for (owner, name), old in zip(watched, before) if getattr(owner, name) != old]
same = torch.equal(state, torch.get_rng_state()) and onnx.IR_VERSION == ir
same = same and logging.getLogger().handlers == []
print(json.dumps([changed, same and torch.are_deterministic_algorithms_enabled() == flag]))
"""
    # The user's own import lets DeepSpeed print first, where it is installed.
    printed = python(code.replace("FIRST", first)).splitlines()
    assert len(printed) == 1 or first
    assert json.loads(printed[-1]) == [[], True]


def test_nothing_is_said(ort: compat.TrainingRuntime) -> None:
    code = """
import torch
from ortlab.engines.ortmodule import compat
ort = compat.ortmodule()
from transformers import BertConfig, BertForSequenceClassification
config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                    intermediate_size=16, vocab_size=10)
model = ort.ORTModule(
    BertForSequenceClassification(config), ort.DebugOptions(log_level=ort.LogLevel.ERROR)
)
ids = torch.ones(2, 4, dtype=torch.long)
model(input_ids=ids, labels=torch.tensor([0, 1])).loss.backward()
model.eval()
with torch.no_grad():
    model(input_ids=ids)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_what_is_printed_meanwhile_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    """The exporter's C++ warnings are dropped; output of the model or another thread is kept."""
    with streams.streams_filtered():
        os.write(1, b"a line of the user's\n[W1121 shape_type_inference.cpp:1974] Warning: noise\n")
        os.write(2, b"progress: 3%\n")
        assert capfd.readouterr() == ("", "")
    assert capfd.readouterr() == ("a line of the user's\n", "progress: 3%\n")


def test_what_c_holds_back_is_filtered_and_not_said_in_halves() -> None:
    """Output buffered by C is filtered and never split.

    Where standard output is not a terminal, C writes 4096 bytes at a time, as long as two of
    the texts here.
    """
    code = """
        import ctypes, os
        from ortlab.engines.torchscript import streams
        libc = ctypes.CDLL(None)
        graph = b"Exported graph: graph(%x : Float)" + b"x" * 2000 + b"\\n  return (%y)\\n"
        libc.printf(b"%s", b"before\\n")
        for _ in range(3):
            with streams.streams_filtered():
                libc.printf(b"%s", graph + b"a line of the user's\\n")
            os.write(1, b"after\\n")
    """
    # This variable makes Python turn off C's buffering.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, check=False, env=buffered,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "before\n" + 3 * "a line of the user's\nafter\n"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bert_trains_as_eager_torch_does(ort: compat.TrainingRuntime, attention: str) -> None:
    import copy

    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        vocab_size=100, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation=attention,
    )  # fmt: skip
    model = BertForSequenceClassification(config).train()
    twin = copy.deepcopy(model)
    wrapped = ort.ORTModule(model, ort.DebugOptions(log_level=ort.LogLevel.ERROR))
    for batch, length in ((4, 8), (3, 13)):
        ids = torch.randint(100, (batch, length))
        mask = (torch.arange(length) < length - torch.arange(batch)[:, None]).long()
        labels = torch.arange(batch) % 2
        for each in (wrapped, twin):
            each(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)


def test_generated_artifacts_are_read_by_ort(ort: compat.TrainingRuntime, tmp_path: Path) -> None:
    """ORT reads the training API's models, written with the newest onnx from the newest IR."""
    from onnxruntime.training import api, artifacts

    nodes = [onnx.helper.make_node("Gemm", ["x", "w", "b"], ["y"])]
    floats = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        nodes,
        "linear",
        [onnx.helper.make_tensor_value_info("x", floats, ["batch", 3])],
        [onnx.helper.make_tensor_value_info("y", floats, ["batch", 2])],
        [
            onnx.helper.make_tensor("w", floats, [3, 2], [0.1] * 6),
            onnx.helper.make_tensor("b", floats, [2], [0.0] * 2),
        ],
    )
    opsets = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, ir_version=onnx.IR_VERSION, opset_imports=opsets)
    artifacts.generate_artifacts(
        model,
        requires_grad=["w", "b"],
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=tmp_path,
    )
    for name in ("training_model", "eval_model", "optimizer_model"):
        written = onnx.load(tmp_path / f"{name}.onnx")
        opset = {entry.domain: entry.version for entry in written.opset_import}[""]
        assert written.ir_version <= base.MAX_IR
        assert opset <= base.MAX_OPSET
    state = api.CheckpointState.load_checkpoint(str(tmp_path / "checkpoint"))
    paths = [str(tmp_path / f"{name}_model.onnx") for name in ("training", "eval")]
    api.Optimizer(str(tmp_path / "optimizer_model.onnx"), api.Module(*paths[:1], state, paths[1]))


def test_two_exports_at_once(ort: compat.TrainingRuntime) -> None:
    """Two threads that export take turns on the exporter's global state; both get their graph."""
    from concurrent.futures import ThreadPoolExecutor

    def train(width: int) -> bool:
        model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))
        wrapped = ort.ORTModule(model, ort.DebugOptions(log_level=ort.LogLevel.ERROR))
        x = torch.randn(3, 4)
        return torch.allclose(wrapped(x), model(x), atol=1e-6)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(train, range(3, 11)))
