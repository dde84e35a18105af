"""Tests of the torch_ort replacement: documented scripts, unchanged except for the import line."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import ortlab
from ortlab import torch_ort
from ortlab.engines.base import Report, wrapped_model
from ortlab.engines.ortmodule.engine import execution_of
from ortlab.torch_ort import DebugOptions, LogLevel, ORTModule, load_from_json, set_seed
from tests.support.needed_engines import needs
from tests.support.waiting import HANGS_S
from tests.zoo.dropout import drawn_by_ort

# The training loop of torch_ort's documentation and of ONNX Runtime's MNIST sample, applied to
# scikit-learn's digits, which need no download.
SCRIPT = """
import argparse
import json
import torch
from sklearn.datasets import load_digits
IMPORT

class NeuralNet(torch.nn.Module):
    def __init__(self, input_size, hidden_size, num_classes):
        super(NeuralNet, self).__init__()
        self.fc1 = torch.nn.Linear(input_size, hidden_size)
        self.relu = torch.nn.ReLU()
        self.fc2 = torch.nn.Linear(hidden_size, num_classes)

    def forward(self, input1):
        out = self.fc1(input1)
        out = self.relu(out)
        out = self.fc2(out)
        return out

def train(args, model, device, optimizer, loss_fn, train_loader, epoch):
    model.train()
    losses = []
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        data = data.reshape(data.shape[0], -1)
        optimizer.zero_grad()
        probability = model(data)
        loss = loss_fn(probability, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

def test(args, model, device, loss_fn, test_loader):
    model.eval()
    test_loss = correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            data = data.reshape(data.shape[0], -1)
            output = model(data)
            test_loss += loss_fn(output, target).item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    return test_loss, correct

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--epochs', type=int, default=2)
    parser.add_argument('--lr', type=float, default=0.5)
    parser.add_argument('--pytorch-only', action='store_true', default=False)
    parser.add_argument('--export-prefix', default='')
    parser.add_argument('--log-level', choices=['DEBUG', 'INFO', 'WARNING'], default='WARNING')
    parser.add_argument('--save-path', required=True)
    args = parser.parse_args()
    torch.manual_seed(42)
    device = 'cpu'
    images, labels = load_digits(return_X_y=True)
    data = torch.utils.data.TensorDataset(
        torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    train_data, test_data = torch.utils.data.random_split(data, [1600, 197])
    train_loader = torch.utils.data.DataLoader(train_data, batch_size=150, shuffle=True)
    test_loader = torch.utils.data.DataLoader(test_data, batch_size=50)
    model = NeuralNet(input_size=64, hidden_size=50, num_classes=10).to(device)
    model_state = model
    if not args.pytorch_only:
        log_level = {'DEBUG': LogLevel.VERBOSE, 'INFO': LogLevel.INFO}.get(
            args.log_level, LogLevel.WARNING)
        debug_options = DebugOptions(log_level=log_level, save_onnx=bool(args.export_prefix),
                                     onnx_prefix=args.export_prefix)
        model = ORTModule(model, debug_options)
        assert isinstance(model, ORTModule) and isinstance(model, torch.nn.Module)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    loss_fn = torch.nn.CrossEntropyLoss()
    losses = []
    for epoch in range(args.epochs):
        losses += train(args, model, device, optimizer, loss_fn, train_loader, epoch)
    test_loss, correct = test(args, model, device, loss_fn, test_loader)
    torch.save(model.state_dict(), args.save_path)
    print(json.dumps([losses, test_loss, correct]))

if __name__ == '__main__':
    main()
"""
OURS = "from ortlab.torch_ort import ORTModule, DebugOptions, LogLevel"
WITHOUT_TRAINING = "import ortlab.torch_ort; ortlab.torch_ort.package_version = lambda _: None"

DISTRIBUTED = """
import gc
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
IMPORT

rank, folder, ort = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "ort"
store = dist.FileStore(f"{folder}/store-{sys.argv[3]}", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
model = DistributedDataParallel(ORTModule(model) if ort else model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(rank)
for _ in range(4):
    optimizer.zero_grad()
    x, y = torch.randn(6, 8, generator=data), torch.randint(4, (6,), generator=data)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
torch.save(model.module.state_dict(), f"{folder}/{sys.argv[3]}-{rank}.pt")
del model  # it holds the group, whose threads abort where they outlive the interpreter
gc.collect()
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True, params=["ortmodule", "ort"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let ORTModule run in each engine: "ort" is that of machines without onnxruntime-training."""
    name: str = request.param
    needs(name)
    if name == "ort":
        monkeypatch.setattr(torch_ort, "package_version", lambda _: None)
    return name


@pytest.fixture
def ortmodule(engine: str) -> None:
    """Skip the test in the other engine: it is about what ORTModule has for itself."""
    if engine != "ortmodule":
        pytest.skip("about onnxruntime-training")


def imports(engine: str) -> str:
    return OURS if engine == "ortmodule" else f"{WITHOUT_TRAINING}\n{OURS}"


def report(model: nn.Module) -> Report:
    record = wrapped_model(model)
    assert record is not None
    return record.report()


class Upstream:
    """Options with the attributes of another version's DebugOptions."""

    def __init__(self, log_level: int, **others: Any) -> None:
        self.log_level = log_level
        vars(self).update(others)


class Net(nn.Module):
    """A model with an attribute, a buffer and a method of its own."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = {"hidden_size": 16}
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.Tanh(), nn.Linear(16, 4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.net(x)
        return hidden * self.scale

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


X = torch.linspace(-1, 1, 24).reshape(3, 8)


# ---- scripts -------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path, engine: str) -> Callable[..., tuple[Any, str]]:
    """Return a function that runs the script in a new process and returns its result and stderr."""
    path = tmp_path / "mnist.py"

    def run(*arguments: str, environment: dict[str, str] | None = None) -> tuple[Any, str]:
        path.write_text(SCRIPT.replace("IMPORT", imports(engine)))
        quiet = {"PYTHONWARNINGS": "ignore:Guards may run slower"}  # torch on Python 3.13.0
        done = subprocess.run(
            [sys.executable, str(path), *arguments], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, **quiet, **(environment or {})}, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    return run


def test_a_script_trains_as_it_does_with_torch(
    script: Callable[..., tuple[Any, str]], tmp_path: Path, engine: str
) -> None:
    (losses, test_loss, correct), said = script("--save-path", "ort.pt")
    eager, _ = script("--save-path", "torch.pt", "--pytorch-only")
    eager_losses, eager_test_loss, eager_correct = eager
    if engine == "ortmodule":
        assert all(line.startswith("ORT warning: Fast path") for line in said.splitlines())
    else:
        assert said == ""
    assert len(losses) == 22
    assert losses[-1] < 0.6 * losses[0]
    assert losses == pytest.approx(eager_losses, rel=1e-4)
    assert test_loss == pytest.approx(eager_test_loss, rel=1e-4)
    assert correct == eager_correct
    ort, weights = torch.load(tmp_path / "ort.pt"), torch.load(tmp_path / "torch.pt")
    assert list(ort) == list(weights) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    for name, value in weights.items():
        torch.testing.assert_close(ort[name], value, rtol=1e-3, atol=1e-5)


def test_a_script_saves_its_graphs(
    script: Callable[..., tuple[Any, str]], tmp_path: Path, engine: str
) -> None:
    files = {
        "ortmodule": ("mlp_torch_exported_training.onnx", "mlp_execution_model_training.onnx"),
        "ort": ("mlp_0_forward_0.onnx", "mlp_1_backward_0.onnx"),
    }[engine]
    arguments = "--epochs", "1", "--save-path", "ort.pt", "--export-prefix", "mlp"
    _, said = script(*arguments, "--log-level", "INFO")
    assert ("ORT info: " if engine == "ortmodule" else "[I:onnxruntime:") in said
    graph = onnx.load(tmp_path / files[0]).graph
    assert [node.op_type for node in graph.node if node.op_type in ("Gemm", "Relu")] == [
        "Gemm", "Relu", "Gemm",
    ]  # fmt: skip
    assert (tmp_path / files[1]).exists()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {"ORTMODULE_SAVE_ONNX_PATH": str(elsewhere), "ORTMODULE_LOG_LEVEL": "ERROR"}
    _, said = script(*arguments, "--log-level", "INFO", environment=environment)
    assert said == ""
    assert (elsewhere / files[1]).exists()


def test_data_parallel(tmp_path: Path, engine: str) -> None:
    """Two processes over gloo have the same weights as two processes of eager torch."""
    code = DISTRIBUTED.replace("IMPORT", imports(engine))
    for kind in ("ort", "torch"):
        ranks = [
            subprocess.Popen([sys.executable, "-c", code, str(rank), str(tmp_path), kind])
            for rank in range(2)
        ]
        assert [rank.wait(timeout=HANGS_S) for rank in ranks] == [0, 0]
    eager = torch.load(tmp_path / "torch-0.pt")
    for rank in range(2):
        found = torch.load(tmp_path / f"ort-{rank}.pt")
        assert list(found) == list(eager)
        for name, value in eager.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


# ---- the module ----------------------------------------------------------------------------------


def test_what_an_ortmodule_is(net: Net) -> None:
    model = ORTModule(net)
    assert isinstance(model, ORTModule)
    assert issubclass(ORTModule, nn.Module)
    assert not isinstance(net, ORTModule)
    assert ortlab.unwrap(model) is net


def test_it_has_the_names_of_the_model(net: Net) -> None:
    model = ORTModule(net)
    assert list(model.state_dict()) == list(net.state_dict())
    assert [name for name, _ in model.named_parameters()] == [n for n, _ in net.named_parameters()]
    assert all(a is b for a, b in zip(model.parameters(), net.parameters(), strict=True))
    assert [name for name, _ in model.named_buffers()] == ["scale"]
    assert [name for name, _ in model.named_children()] == ["net"]
    assert model.config == {"hidden_size": 16}
    assert model.parameter_count() == net.parameter_count()
    assert model.module is net


def test_modes_and_types(net: Net) -> None:
    model = ORTModule(net)
    assert model.eval() is model
    assert not net.training
    assert model.train() is model
    assert net.training
    assert model.to(torch.float64) is model
    eager = copy.deepcopy(net)
    found, expected = model(X.double()), eager(X.double())
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected)


def test_a_state_dict_is_loaded(net: Net, tmp_path: Path) -> None:
    model = ORTModule(net)
    model(X).square().sum().backward()
    torch.manual_seed(1)
    other = Net()
    torch.save(other.state_dict(), tmp_path / "other.pt")
    model.load_state_dict(torch.load(tmp_path / "other.pt"))
    torch.testing.assert_close(model(X), other(X))
    plain = Net()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain(X), other(X))


def test_it_is_checked_and_listed(net: Net) -> None:
    model = ORTModule(net)
    model(X)
    assert any(note.startswith("checked on [3, 8]") for note in report(model).notes)
    assert "Net" in str(ortlab.models())


def test_dropout_follows_torchs_seed() -> None:
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        model = ORTModule(Net(dropout=0.5))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        found.append(model(X))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    torch.manual_seed(7)
    first = model(X)
    assert not torch.equal(model(X), first)
    set_seed(7)  # seeds ORT's own generator, which is used on a GPU
    assert not torch.equal(model(X), first)
    torch.manual_seed(7)
    assert torch.equal(model(X), first)


def test_set_seed_restarts_ort_s_own(ortmodule: None) -> None:
    draw = drawn_by_ort(None)
    masks = []
    for seed in (7, 7, 0):
        set_seed(seed)  # ORT's generator draws the same numbers for the seeds 0 and 1
        masks.append([draw((4, 16), 0.5) for _ in range(2)])
    assert all(map(torch.equal, masks[0], masks[1]))
    assert not any(torch.equal(*pair) for pair in masks)


def test_the_seed_that_torch_has_when_ort_comes_repeats_no_mask(ortmodule: None) -> None:
    """The first masks differ even if torch's seed is 0 when ORT is imported and takes it over."""
    script = (
        "import torch; torch.manual_seed(0)\n"
        "from ortlab.engines.ortmodule import compat; compat.ortmodule()\n"
        "from tests.zoo.dropout import drawn_by_ort; draw = drawn_by_ort(None)\n"
        "print(torch.equal(draw((4, 16), 0.5), draw((4, 16), 0.5)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr


def test_more_settings(net: Net, ortmodule: None) -> None:
    model = ORTModule(net, DebugOptions(log_level=LogLevel.FATAL), opset=15, fallback=True)
    settings = execution_of(model).settings
    assert (settings.ortmodule.log_level, settings.ortmodule.opset, settings.fallback) == (
        "fatal",
        15,
        True,
    )


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: DebugOptions(log_level="INFO"), TypeError, "LogLevel.INFO"),  # type: ignore[arg-type]
        (lambda: DebugOptions(save_onnx=True), ValueError, "needs an onnx_prefix"),
        (lambda: ORTModule(Net(), LogLevel.INFO), TypeError, "debug_options is a LogLevel"),
        (lambda: ORTModule(nn.ReLU()), ValueError, "no parameter that requires a gradient"),
        (lambda: ORTModule(ORTModule(Net())), ValueError, "already"),
        (lambda: type("Mine", (ORTModule,), {}), TypeError, "cannot be subclassed"),
        (lambda: load_from_json(ORTModule(Net())), ValueError, "ORTMODULE_JSON_CONFIG_PATH"),
        (lambda: load_from_json(Net(), "x.json"), ValueError, "x.json cannot be read"),
        (lambda: ORTModule(Net(), Upstream(9)), TypeError, "log_level=9 must be one of VERBOSE"),
        (
            lambda: ORTModule(Net(), DebugOptions(save_onnx=True, onnx_prefix="a/b")),
            ValueError,
            "a is not a writable folder",
        ),
    ],
)
def test_what_is_refused(make: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()


def test_options_of_onnxruntimes_own_class(net: Net, tmp_path: Path, ortmodule: None) -> None:
    from onnxruntime.training import ortmodule as upstream  # optional: not on every Python

    given = upstream.DebugOptions(upstream.LogLevel.INFO, True, "net", str(tmp_path))
    settings = wrapped_model(ORTModule(net, given)).settings.ortmodule  # type: ignore[union-attr]
    assert (settings.log_level, settings.save_onnx) == ("info", str(tmp_path / "net"))


def test_options_with_the_same_attributes(net: Net, tmp_path: Path) -> None:
    given = Upstream(2, save_onnx=True, onnx_prefix="net", save_path=str(tmp_path))
    settings = wrapped_model(ORTModule(net, given)).settings.ortmodule  # type: ignore[union-attr]
    assert (settings.log_level, settings.save_onnx) == ("info", str(tmp_path / "net"))


def test_the_other_engine_has_no_json_file(net: Net) -> None:
    with pytest.raises(ValueError, match="this model runs in engine 'ort'"):
        load_from_json(ortlab.wrap(net, engine="ort"), "x.json")


def test_a_submodule_keeps_the_name_that_ortmodule_has_for_the_model(engine: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.module(x)
            return hidden

    outer = Outer()
    assert ORTModule(outer).module is (outer.module if engine == "ort" else outer)


def test_options_from_json(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ortmodule: None
) -> None:
    (tmp_path / "ort.json").write_text('{"OnnxOpsetVersion": 15}')
    (tmp_path / "other.json").write_text('{"OnnxOpsetVersion": 16}')
    model = ORTModule(net)
    load_from_json(model, str(tmp_path / "ort.json"))
    model(X)
    monkeypatch.setenv("ORTMODULE_JSON_CONFIG_PATH", str(tmp_path / "other.json"))
    load_from_json(model, str(tmp_path / "ort.json"))
    model(X)
    managers = [export.manager for export in execution_of(model).exports()]
    assert sorted(m._runtime_options.onnx_opset_version for m in managers) == [15, 16]
    entry = ortlab.session.session.wrapped.entry(model)  # a run of the model starts with it
    assert entry is not None
    assert entry.settings.ortmodule.opset == 16
    with pytest.raises(ValueError, match="not wrapped by engine 'ortmodule'"):
        load_from_json(net, str(tmp_path / "ort.json"))
