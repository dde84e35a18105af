"""ORTModule's own options: each changes what ORT does for one model, and nothing else.

The effect of an option is read from the graphs; each test also checks that the gradients match
eager torch.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import ortlab
from ortlab.engines.ortmodule import compat, options
from ortlab.engines.ortmodule.compat import restoring
from ortlab.engines.ortmodule.engine import execution_of
from ortlab.engines.ortmodule.export import Export
from ortlab.engines.ortmodule.export_pool import ExportFailed
from ortlab.engines.plan_names import UnknownPlan
from ortlab.engines.registry import refusal
from ortlab.settings import EngineSettings, FinetuneSettings
from tests.support.needed_engines import needs

BATCH = (torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]]), torch.tensor([0, 2]))


class Net(nn.Module):
    """Token classification of the first token, with a norm and an optional Dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 16)
        self.wide, self.narrow = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm, self.dropout = nn.LayerNorm(16), nn.Dropout(dropout)
        self.head = nn.Linear(16, 4)
        self.copies = 0

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.narrow(torch.tanh(self.wide(self.embed(ids))))
        hidden = self.dropout(self.norm(hidden))
        return nn.functional.cross_entropy(self.head(hidden)[:, 0], labels)


@pytest.fixture(autouse=True)
def _needs_ort() -> None:
    """Skip with the reason where ORT cannot run."""
    needs("ortmodule")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def trained(
    model: nn.Module, *batch: torch.Tensor, half: bool = False, **settings: Any
) -> tuple[nn.Module, Export]:
    """Return `model` wrapped, after a forward and a backward whose gradients match eager torch."""
    eager = copy.deepcopy(model)
    wrapped = ortlab.wrap(model, **settings)
    for module in (wrapped, eager):
        with torch.autocast("cpu", torch.float16, enabled=half):
            loss = module(*(batch or BATCH))
        loss.backward()
    for (name, found), expected in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        norm = expected.grad.norm()
        assert (found.grad - expected.grad).norm() <= (2e-2 if half else 1e-5) * norm, name
    return wrapped, execution_of(wrapped).exports()[-1]


def exported(export: Export) -> onnx.ModelProto:
    return export.manager._graph_transition_manager._exported_model_info.exported_model


def gradient_ops(export: Export) -> Counter[str]:
    return Counter(node.op_type for node in export.manager._onnx_models.optimized_model.graph.node)


# ---- precision -----------------------------------------------------------------------------------


def test_fp16_on_a_cpu_is_refused(no_gpu: None) -> None:
    """Inside a loop's autocast, fp16 is allowed: it is the loop's own choice."""
    with pytest.raises(ValueError, match="ORT's CPU kernels compute float16 in float32; choose"):
        ortlab.wrap(Net(), precision="fp16")
    with pytest.raises(ValueError, match="is for CUDA devices"):
        ortlab.wrap(Net(), precision="tf32")


def test_what_trains_on_a_gpu_may_have_any_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for precision in ("tf32", "fp16"):
        for settings in (
            EngineSettings.of(
                engine="ortmodule", precision=precision, kernels="ort", memory_level=1
            ),
            FinetuneSettings.of(engine="ortmodule", precision=precision, device="cuda"),
        ):
            assert refusal(settings) is None
        refused = refusal(
            FinetuneSettings.of(engine="ortmodule", precision=precision, device="cpu")
        )
        assert refused is not None
        assert refused.startswith(f"precision='{precision}'")


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_tf32_is_an_option_of_orts_cuda_provider(precision: str) -> None:
    """The option is checked on its way to a session, because a CPU cannot create that session."""
    manager = trained(Net())[1].manager
    options._set(manager, EngineSettings.of(precision=precision))
    of_cpu = manager._get_session_config()
    names, provided = ["CUDAExecutionProvider", *of_cpu[1]], [{"device_id": "0"}, *of_cpu[2]]
    manager._get_session_config = lambda: (of_cpu[0], names, provided)
    with restoring._session_options(manager, []):
        _, _, (cuda, cpu) = manager._get_session_config()
    assert cuda == {"device_id": "0", "use_tf32": "1" if precision == "tf32" else "0"}
    assert cpu == {}


@pytest.mark.parametrize("kernels", ["ort", "torch"])
def test_the_idle_threads_of_a_session_sleep(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of the session that trains show it, whoever computes."""
    import onnxruntime

    spins: list[str] = []
    session = onnxruntime.InferenceSession

    def noted(model: Any, options: Any, *rest: Any) -> Any:
        spins.append(options.get_session_config_entry("session.intra_op.allow_spinning"))
        return session(model, options, *rest)

    monkeypatch.setattr(onnxruntime, "InferenceSession", noted)
    trained(Net(), kernels=kernels)
    assert spins[-1] == "0"


# ---- each option ---------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", range(14, 18))
def test_opset(opset: int) -> None:
    _, export = trained(Net(), opset=opset)
    versions = {each.domain: each.version for each in exported(export).opset_import}
    assert versions[""] == opset


@pytest.mark.parametrize("opset", [13, 18])
def test_an_opset_that_does_not_work(opset: int) -> None:
    with pytest.raises(ValueError, match=f"opset={opset} must be at"):
        ortlab.wrap(Net(), opset=opset)


def test_log_level(capfd: pytest.CaptureFixture[str]) -> None:
    _, quiet = trained(Net())
    assert capfd.readouterr().err == ""
    _, talking = trained(Net(), log_level="info")
    said = capfd.readouterr().err
    assert "ORT info: Exporting the PyTorch model to ONNX" in said
    severity = [
        export.manager._get_session_config()[0].log_severity_level for export in (quiet, talking)
    ]
    assert severity == [4, 2]


def test_messages_about_an_export_come_with_an_export(capfd: pytest.CaptureFixture[str]) -> None:
    """A graph from the cache prints no messages of an export."""
    for _ in range(2):
        ortlab.wrap(Net(), log_level="devinfo")(*BATCH)
        assert "Exporting the PyTorch model" in capfd.readouterr().err


def test_a_talking_model_does_not_make_others_talk(capfd: pytest.CaptureFixture[str]) -> None:
    talking = ortlab.wrap(Net(), log_level="info")
    trained(Net())
    assert capfd.readouterr().err == ""
    talking(*BATCH)
    assert "ORT info" in capfd.readouterr().err


def test_shape_inference() -> None:
    def known(export: Export) -> int:
        transitions = export.manager._graph_transition_manager
        processed = transitions._post_export_processed_model_info._post_export_processed_model
        return len(processed.graph.value_info)

    assert known(trained(Net())[1]) > 2 * known(trained(Net(), shape_inference=False)[1])


def test_copy_for_export() -> None:
    class Copied(Net):
        def __deepcopy__(self, memo: dict[int, Any]) -> Net:
            made.append(1)
            return self

    made: list[int] = []
    ortlab.wrap(Copied(), copy_for_export=False)(*BATCH)
    assert made == []
    ortlab.wrap(Copied())(*BATCH)
    assert made


def test_save_onnx(tmp_path: Path) -> None:
    wrapped = ortlab.wrap(Net(dropout=0.5), save_onnx=str(tmp_path / "net"))
    wrapped(*BATCH).backward()
    of_torch = {"net_torch_exported_training.onnx", "net_post_processed_training.onnx"}
    of_ort = {f"net_{stage}_training.onnx" for stage in ("optimized_pre_grad", "optimized")}
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {*of_torch, *of_ort, "net_execution_model_training.onnx"}
    graph = onnx.load(tmp_path / "net_execution_model_training.onnx").graph
    assert any(node.op_type.endswith("Grad") for node in graph.node)
    # Not the twin without dropout, which the self-check uses.
    processed = onnx.load(tmp_path / "net_post_processed_training.onnx").graph
    ratios = [node.input[1] for node in processed.node if node.op_type == "Dropout"]
    assert ratios
    assert not any("ortlab" in ratio for ratio in ratios)


@pytest.mark.parametrize("path", ["{}/", "{}/nowhere/net"])
def test_save_onnx_where_it_cannot(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match="save_onnx="):
        ortlab.wrap(Net(), save_onnx=path.format(tmp_path))


def test_compute_optimizer() -> None:
    """The option makes the head run on the first token only: its Gather comes before the head."""

    def gathers_before_the_loss(export: Export) -> list[str]:
        order = [node.op_type for node in export.manager._onnx_models.optimized_model.graph.node]
        order = order[: order.index("SoftmaxCrossEntropyLossInternal")]
        return order[order.index("Gather") :]

    assert "MatMul" in gathers_before_the_loss(trained(Net())[1])
    assert "MatMul" not in gathers_before_the_loss(trained(Net(), compute_optimizer=False)[1])


class Halves(nn.Module):
    """A float32 part between two layers that autocast runs in float16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.narrow = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.wide(x).float().transpose(0, 1).reshape(-1, 32)
        return self.narrow(torch.relu(hidden)).float().square().mean()


@pytest.mark.parametrize(
    "more_casts",
    [{"cast_propagation": "none"}, {"cast_level": -1}, {"cast_level": 0}],
    ids=lambda each: next(iter(each)),
)
@pytest.mark.parametrize(
    "fewer_casts",
    [
        {},
        {"cast_propagation": "insert_and_reduce"},
        {"cast_level": 2},
        {"cast_level": 0, "cast_ops": "Transpose, Reshape,Relu"},
    ],
)
def test_cast_propagation(more_casts: dict[str, Any], fewer_casts: dict[str, Any]) -> None:
    x = torch.randn(4, 3, 16)
    _, more = trained(Halves(), x, half=True, **more_casts)
    _, fewer = trained(Halves(), x, half=True, **fewer_casts)
    assert gradient_ops(more)["Cast"] > gradient_ops(fewer)["Cast"]


def test_arena() -> None:
    """The process returns the memory of a step, except the 16 MiB batch, or keeps it."""
    assert _kept_bytes(arena=False) < 24 * 2**20 < _kept_bytes(arena=True)


def _kept_bytes(*, arena: bool) -> int:
    """Return the bytes that the process has gained after a step, of 64 MiB that a step takes."""
    code = f"""
        import ctypes, os, torch
        ctypes.CDLL(None).mallopt(-3, 1 << 16)  # what is freed is given back at once
        import ortlab
        model = ortlab.wrap(torch.nn.Sequential(*(torch.nn.Tanh() for _ in range(4)),
                            torch.nn.Linear(64, 1)), arena={arena}, cache=False)
        pages = lambda: int(open("/proc/self/statm").read().split()[1])
        model(torch.ones(8, 64)).sum().backward()
        model(torch.ones(16, 64)).sum().backward()
        before = pages()
        model(torch.ones(1 << 16, 64)).sum().backward()
        print((pages() - before) * os.sysconf("SC_PAGESIZE"))
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


def test_memory_efficient_gradient() -> None:
    _, off = trained(Net())
    _, on = trained(Net(), memory_efficient_gradient=True)
    assert gradient_ops(off)["LayerNormalizationGrad"] == 1
    assert gradient_ops(on)["InvertibleLayerNormalizationGrad"] == 1


def test_memory_level(
    gpt2: Callable[[], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The level recomputes the same nodes as ORTModule's own variable."""
    x = torch.randint(1, 100, (2, 8), generator=torch.Generator().manual_seed(0))
    for level in range(3):
        model = gpt2()
        eager = copy.deepcopy(model)
        wrapped = ortlab.wrap(model, memory_level=level, save_onnx=str(tmp_path / f"{level}"))
        for module in (wrapped, eager):
            module(input_ids=x, labels=x).loss.backward()
        for found, expected in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6)
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")
    ort = compat.ortmodule()
    stock = ort.ORTModule(
        gpt2(), ort.DebugOptions(save_onnx=True, onnx_prefix="ort", save_path=str(tmp_path))
    )
    stock(input_ids=x, labels=x)
    found = {kind: recomputed(tmp_path / f"{kind}_execution_model_training.onnx") for kind in
             ("0", "1", "2", "ort")}  # fmt: skip
    assert found["0"] == 0
    assert found["ort"] > 0
    assert found["1"] == found["ort"]
    assert found["2"] >= found["1"]


def recomputed(path: Path) -> int:
    return sum(node.name.endswith("_recompute") for node in onnx.load(path).graph.node)


@pytest.fixture
def gpt2() -> Callable[[], nn.Module]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=100, n_positions=16, bos_token_id=1,
        eos_token_id=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip

    def make() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = GPT2LMHeadModel(config)
        return model

    return make


def test_memory_plans(tmp_path: Path) -> None:
    class Gelu(Net):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            hidden = nn.functional.gelu(self.wide(self.embed(ids)))
            hidden = self.norm(self.narrow(hidden))
            return nn.functional.cross_entropy(self.head(hidden)[:, 0], labels)

    file = tmp_path / "plans.json"
    file.write_text(json.dumps(["BiasGelu+:1:-1"]))
    trained(Gelu(), memory_plans=str(file), save_onnx=str(tmp_path / "net"))
    assert recomputed(tmp_path / "net_execution_model_training.onnx") == 1
    file.write_text(json.dumps(["Nothing+:1:-1"]))
    with pytest.raises(UnknownPlan, match=r"cannot recompute 'Nothing\+:1': the graph has no"):
        ortlab.wrap(Gelu(), memory_plans=str(file))(*BATCH)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ('{"a": 1}', "must be a JSON list"),
        ('["BiasGelu+:7:-1"]', "is not a valid plan"),
        ('["BiasGelu+:1:2"]', "wrong number of layers"),
        (
            '["Add+:1:-1,BiasGelu+:1:-1", "Add+:1:-1"]',
            r"json' names the subgraph Add\+ twice; name",
        ),
    ],
)
def test_memory_plans_that_are_none(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "plans.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        ortlab.wrap(Net(), memory_plans=str(file))


@pytest.mark.parametrize(
    ("plans", "said"),
    [
        (
            "Add+:1:-1,Add+:1:-1",
            r"'Add\+:1:-1,Add\+:1:-1' names the subgraph Add\+ twice; name it once",
        ),
        ("Add+:1:-1,Add+:2:-1", r"Add\+ twice, as Add\+:1:-1 and Add\+:2:-1; name it once"),
    ],
)
def test_a_subgraph_has_one_plan(plans: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ortlab.wrap(Net(), engine="ortmodule", recompute=plans)


OLD = "ORTMODULE_ENABLE_MEMORY_ALLEVIATION"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("BiasGelu+:1:-1", "no longer read; unset it, and use recompute='BiasGelu+:1:-1'"),
        ("BiasGelu+:1,Cast+:0", "no longer read; unset it, and use recompute='BiasGelu+:1:-1'"),
        (
            "Add+:1:12, Cast+:1:-1",
            "use recompute='Add+:1:-1,Cast+:1:-1', which recomputes every occurrence",
        ),
        ("Dropout:0,Gelu:1,Tile:0", "with plans that %ort recompute MODEL --subgraphs lists"),
        ("Gelu", "'Gelu' is not a list of plans, such as BiasGelu+:1:-1; unset it, and use"),
        ("BiasGelu+:3:-1", "is not a list of plans"),
        ("1", "is not a list of plans"),
    ],
)
def test_plans_in_ort_s_old_form(monkeypatch: pytest.MonkeyPatch, value: str, said: str) -> None:
    monkeypatch.setenv(OLD, value)
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        ortlab.wrap(Net(), engine="ortmodule")
    assert str(raised.value).startswith(f"{OLD}={value!r} is ")
    assert "\n" not in str(raised.value)


def test_plans_in_ort_s_old_form_that_choose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OLD, "Dropout:0,Gelu:0,Tile:0")
    ortlab.wrap(Net(), engine="ortmodule")


def test_plans_in_place_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_CONFIG", "BiasGelu+:1:1")
    with pytest.raises(ValueError, match=r"is not the name of a JSON.*recompute='BiasGelu\+:1:-1'"):
        ortlab.wrap(Net(), engine="ortmodule")


def test_skip_checks(capfd: pytest.CaptureFixture[str]) -> None:
    """ORT logs each check: one at the export, and one in each of three steps unless skipped."""
    for skipped, checks in (("disabled", 4), ("device,execution_agent", 4), ("build_gradient", 1)):
        wrapped = ortlab.wrap(Net(), skip_checks=skipped, log_level="info", self_check=False)
        for _ in range(3):
            wrapped(*BATCH).backward()
        assert capfd.readouterr().err.count("_export_check completed") == checks, skipped


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0]


class WithFunction(Net):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return Twice.apply(super().forward(ids, labels))


def test_custom_autograd_off() -> None:
    with pytest.raises(ExportFailed, match=r"Twice is not exported: custom_autograd is off"):
        ortlab.wrap(WithFunction(), custom_autograd=False)(*BATCH)


def test_custom_autograd() -> None:
    trained(WithFunction())


def test_what_a_cuda_session_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Options set on it reach ORTModule's CUDA provider; without a GPU, the session is not made."""
    with monkeypatch.context() as pretended:
        pretended.setattr(torch.cuda, "is_available", lambda: True)
        wrapped = ortlab.wrap(
            Net(), conv_algo_search="exhaustive", tuning=True, tuning_ms=7, memory_stats=True,
            tuning_results=str(tmp_path),
        )  # fmt: skip
    manager: Any = wrapped._torch_module._execution_manager(True)
    transitions = manager._graph_transition_manager
    transitions._device = torch.device("cuda", 0)
    transitions._post_export_processed_model_info = SimpleNamespace(
        is_mem_efficient_grad_management_enabled=False
    )
    _, providers, told = manager._get_session_config()
    assert providers[0] == "CUDAExecutionProvider"
    assert told[0]["cudnn_conv_algo_search"] == "EXHAUSTIVE"
    assert told[0]["tunable_op_tuning_enable"] == "1"
    assert told[0]["tunable_op_max_tuning_duration_ms"] == "7"
    assert manager._runtime_options.tuning_results_path == str(tmp_path)
    assert not manager._runtime_options.enable_embedding_sparse_optimizer
    export = Export(wrapped, execution_of(wrapped).module, gradient=True)
    assert export.manager._runtime_inspector.memory_ob._print_memory_stats_by_step


@pytest.mark.parametrize("on", [True, False])
def test_external_allocator(on: bool) -> None:
    """The allocator is torch's where its addresses are known; here they are invented."""
    wrapped = ortlab.wrap(Net(), external_allocator=on)
    manager: Any = wrapped._torch_module._execution_manager(True)
    assert not manager._runtime_options.use_external_gpu_allocator
    manager._torch_alloc = 1
    options.apply(wrapped, execution_of(wrapped).settings)
    assert manager._runtime_options.use_external_gpu_allocator is on


# ---- invalid options -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{"triton": True}, {"tuning": True}, {"tuning_ms": 5}, {"memory_stats": True}],
    ids=lambda each: next(iter(each)),
)
def test_what_needs_a_gpu(no_gpu: None, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"is for CUDA devices, and torch sees none"):
        ortlab.wrap(Net(), **settings)


@pytest.mark.parametrize("name", ["label_sparsity", "embedding_sparsity"])
def test_sparsity_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=True cannot run: ORT marks sparse inputs"):
        ortlab.wrap(Net(), **{name: True})


def test_what_has_no_effect_is_said(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", "/somewhere")
    with pytest.warns(UserWarning, match=r"CACHE_DIR: it identifies graphs.*conv_algo_search='exh"):
        ortlab.wrap(Net(), conv_algo_search="exhaustive")


def test_zero_is_off_where_ort_takes_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_USE_FLASH_ATTENTION", "0")
    ortlab.wrap(Net(), engine="ortmodule")
    monkeypatch.setenv("ORTMODULE_ATEN_SDPA_FALLBACK", "0")  # `if os.getenv(...)`
    with pytest.raises(ValueError, match="ORTMODULE_ATEN_SDPA_FALLBACK cannot be on"):
        ortlab.wrap(Net(), engine="ortmodule")


@pytest.mark.parametrize("variable", options.REFUSED)
def test_a_variable_that_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ValueError, match=f"{variable} cannot be on"):
        ortlab.wrap(Net(), engine="ortmodule")


@pytest.mark.parametrize(
    "settings",
    [
        {"memory_level": 1, "memory_plans": "plans.json"},
        {"skip_checks": "disabled,device"},
        {"skip_checks": "devise"},
        {"log_level": "loud"},
        {"cast_level": 3},
        {"tuning_results": "/no/such/folder"},
    ],
    ids=str,
)
def test_what_is_not_valid(settings: dict[str, Any], no_gpu: None) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        ortlab.wrap(Net(), **settings)


# ---- the environment -----------------------------------------------------------------------------


def test_a_variable_stands_where_nothing_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", "15")
    monkeypatch.setenv("ORTMODULE_SKIPCHECK_POLICY", "SKIP_CHECK_DEVICE|SKIP_CHECK_BUILD_GRADIENT")
    for settings, opset in (({}, 15), ({"opset": 16}, 16)):
        wrapped, export = trained(Net(), **settings)
        assert execution_of(wrapped).settings.ortmodule.skip_checks == "device,build_gradient"
        assert export.manager._runtime_options.onnx_opset_version == opset
        assert exported(export).opset_import[0].version == opset


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("ORTMODULE_ONNX_OPSET_VERSION", "new", "takes a whole number"),
        ("ORTMODULE_ONNX_OPSET_VERSION", "99", "at most 17"),
        ("ORTMODULE_ENABLE_COMPUTE_OPTIMIZER", "yes", "choose from 0, 1"),
        ("ORTMODULE_LOG_LEVEL", "info", "VERBOSE, DEVINFO, INFO"),
        ("ORTMODULE_SKIPCHECK_POLICY", "SKIP_CHECK_DEVISE", "'SKIP_CHECK_DEVICE'"),
    ],
)
def test_a_variable_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"{variable}='{value}': .*{said}"):
        ortlab.wrap(Net())


def test_a_variable_that_cannot_be_is_named(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_ENABLE_TUNING", "1")
    with pytest.raises(ValueError, match=r"tuning=True \(from ORTMODULE_ENABLE_TUNING\)"):
        ortlab.wrap(Net(), engine="ortmodule")


def test_every_variable_of_orts_is_known() -> None:
    """Every variable that ORT reads is a setting, refused, or documented as having no effect."""
    import onnxruntime

    files = (Path(onnxruntime.__file__).parent / "training").rglob("*.py")
    texts = [file.read_text(encoding="utf-8") for file in files]
    read = {name for text in texts for name in re.findall(r'"(ORTMODULE_[A-Z0-9_]+)"', text)}
    assert len(read) > 25
    declared = {each.variable for each in EngineSettings.declarations().values()}
    elsewhere = {
        "ORTMODULE_SAVE_ONNX_PATH",  # the folder of ortlab.torch_ort.DebugOptions
        "ORTMODULE_JSON_CONFIG_PATH",  # for ORT's own reader of JSON, see options.from_json
        "ORTMODULE_TRITON_DEBUG",  # a detail of triton=True's compiler, which changes no graph
    }
    assert read - declared - set(options.UNUSED) - set(options.REFUSED) - elsewhere == set()


# ---- separate models, and changes ----------------------------------------------------------------


def test_two_models_differ() -> None:
    one, two = ortlab.wrap(Net(), opset=15), ortlab.wrap(Net(), shape_inference=False)
    for wrapped in (one, two):
        wrapped(*BATCH).backward()
    versions = [exported(execution_of(w).exports()[0]).opset_import[0].version for w in (one, two)]
    assert versions == [15, 17]


def test_a_copy_keeps_its_options() -> None:
    wrapped = copy.deepcopy(ortlab.wrap(Net(), opset=15))
    wrapped(*BATCH)
    assert exported(execution_of(wrapped).exports()[0]).opset_import[0].version == 15


def test_a_change_exports_again() -> None:
    wrapped, _ = trained(Net())
    execution = execution_of(wrapped)
    execution.configure(execution.settings.replace(opset=15))
    wrapped(*BATCH).backward()
    assert [exported(e).opset_import[0].version for e in execution.exports()] == [17, 15]
    assert "exported again: opset=15" in execution.report().notes


def test_a_run_may_have_options_of_its_own() -> None:
    wrapped = ortlab.wrap(Net())
    wrapped(*BATCH).backward()
    batches = [{"ids": BATCH[0], "labels": BATCH[1]}] * 2
    ortlab.finetune(wrapped, batches, opset=16, max_steps=2, lr_scheduler_type="constant").result()
    execution = execution_of(wrapped)
    assert exported(execution.exports()[-1]).opset_import[0].version == 16
    assert execution.settings.ortmodule.opset == 17
    before = len(execution.exports())
    wrapped(*BATCH).backward()
    assert len(execution.exports()) == before


# ---- JSON ----------------------------------------------------------------------------------------


def test_orts_json_form(tmp_path: Path) -> None:
    file = tmp_path / "ort.json"
    file.write_text(
        json.dumps(
            {
                "PropagateCastOps": {"Strategy": "NONE", "Level": 2, "Allow": ["Relu", "Tanh"]},
                "UseExternalGPUAllocator": False,
                "EnableCustomAutogradFunction": True,
                "EnableGradAccOptimization": False,
                "RunSymbolicShapeInference": False,
                "SkipCheck": ["SKIP_CHECK_DEVICE"],
                "DebugOptions": {"LogLevel": "INFO", "SaveONNX": True, "ONNXPrefix": "net",
                                 "SaveONNXPath": str(tmp_path)},
                "UseMemoryEfficientGradient": True,
                "FallbackPolicy": ["FALLBACK_DISABLE"],
                "OnnxOpsetVersion": 15,
            }
        )
    )  # fmt: skip
    settings = EngineSettings.of(options.from_json(str(file)))
    expected = EngineSettings.of(
        cast_propagation="none", cast_level=2, cast_ops="Relu,Tanh", external_allocator=False,
        shape_inference=False, skip_checks="device", log_level="info", opset=15,
        save_onnx=str(tmp_path / "net"), memory_efficient_gradient=True,
    )  # fmt: skip
    assert settings == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "must contain a JSON object"),
        ('{"OnnxOpset": 15}', "unknown key 'OnnxOpset'.*did you mean 'OnnxOpsetVersion'"),
        ('{"UseStaticShape": true}', "UseStaticShape cannot be on"),
        ('{"PropagateCastOps": {"Speed": 1}}', "not in ORTModule's format"),
        ('{"PropagateCastOps": 3}', "not in ORTModule's format"),
    ],
)
def test_json_that_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "ort.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        options.from_json(str(file))
