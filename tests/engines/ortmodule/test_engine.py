"""The ORT engine's refusals, detection of edits, checks and reports."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

import ortlab
from ortlab.engines.base import Report, progress
from ortlab.engines.ortmodule.engine import OrtModuleEngine, execution_of
from ortlab.engines.ortmodule.export_pool import ExportFailed
from ortlab.engines.self_check import SelfCheckFailed
from ortlab.settings import EngineSettings, FinetuneSettings
from tests.support import tiny
from tests.support.needed_engines import needs
from tests.zoo import specs


@pytest.fixture
def ort() -> OrtModuleEngine:
    """Return the engine; skip with its reason where ORT cannot run."""
    needs("ortmodule")
    return OrtModuleEngine()


class Net(nn.Module):
    """Two layers with dropout, a Python number and a switch."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.dropout = nn.Dropout(p)
        self.second = nn.Linear(16, 4)
        self.scale = 1.0
        self.options = {"sign": 1}

    def forward(self, x: torch.Tensor, flip: bool = False, times: int = 1) -> torch.Tensor:
        hidden = self.dropout(self.first(x).relu()) * self.scale * self.options["sign"]
        return self.second(-hidden if flip else hidden) * times


def _wrap(ort: OrtModuleEngine, model: nn.Module, **settings: Any) -> nn.Module:
    torch.manual_seed(1)
    return ort.wrap(model, EngineSettings.of(**settings))


def _exported_again(report: Report) -> int:
    return sum(note.startswith("exported again") for note in report.notes)


def _checks(report: Report) -> int:
    return sum(note.startswith("checked on") for note in report.notes)


def _scale(net: Net) -> None:
    net.scale = 3.0


def _option(net: Net) -> None:
    net.options["sign"] = -1


def _replace(net: Net) -> None:
    net.second = nn.Linear(16, 4)


def _freeze(net: Net) -> None:
    net.first.weight.requires_grad_(False)


def _new_parameter(net: Net) -> None:
    net.second.bias = nn.Parameter(torch.full((4,), 5.0))


def _hook(net: Net) -> None:
    net.first.register_forward_hook(lambda _module, _inputs, output: output * 2)


def _evaluate(net: Net) -> None:
    net.eval()


EDITS: list[Callable[[Net], None]] = [
    _scale,
    _option,
    _replace,
    _freeze,
    _new_parameter,
    _hook,
    _evaluate,
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__.strip("_"))
def test_an_edit_is_noticed_on_the_next_call(
    ort: OrtModuleEngine, edit: Callable[[Net], None]
) -> None:
    """Outputs and gradients are those of the edited model, and the note names the change."""
    net = Net()
    wrapped = _wrap(ort, net, self_check=False)
    x = torch.randn(3, 6)
    wrapped(x).sum().backward()
    edit(net)
    net.zero_grad(set_to_none=True)
    x = x.to(net.first.weight.dtype)
    reference = copy.deepcopy(net)
    expected, found = reference(x), wrapped(x)
    assert torch.allclose(expected, found, rtol=1e-5, atol=1e-6)
    expected.sum().backward()
    found.sum().backward()
    for a, b in zip(reference.parameters(), net.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    assert _exported_again(ort.report(wrapped)) == 1


def test_another_dtype_is_noticed(ort: OrtModuleEngine) -> None:
    """ORT reports that it has no ReluGrad for double on a CPU; the float32 graph is not run."""
    net = Net()
    wrapped = _wrap(ort, net)
    wrapped(torch.randn(3, 6))
    net.double()
    with pytest.raises(ExportFailed, match="no kernel for ReluGrad"):
        wrapped(torch.randn(3, 6, dtype=torch.float64))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Linear(6, 6), "no kernel for FusedMatMul"),
        (nn.LayerNorm(6), "LayerNormalization does not support double"),
        (nn.GRU(6, 6), "GRUTraining does not support double"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_double_precision_is_refused_with_a_way_out(
    ort: OrtModuleEngine, layer: nn.Module, reason: str
) -> None:
    wrapped = _wrap(ort, layer.double())
    with pytest.raises(ExportFailed, match=rf"{reason}.*model\.float\(\)"):
        wrapped(torch.randn(2, 3, 6, dtype=torch.float64))


def test_a_hook_that_is_removed_is_noticed(ort: OrtModuleEngine) -> None:
    net = Net()
    handle = net.first.register_forward_hook(lambda _module, _inputs, output: output * 2)
    wrapped = _wrap(ort, net)
    x = torch.randn(3, 6)
    doubled = wrapped(x)
    handle.remove()
    assert torch.allclose(wrapped(x), net(x), rtol=1e-5)
    assert not torch.allclose(wrapped(x), doubled)


def test_dropout_p_is_noticed(ort: OrtModuleEngine) -> None:
    net = Net(p=0.5)
    wrapped = _wrap(ort, net)
    x = torch.randn(64, 6)
    assert not torch.allclose(wrapped(x), wrapped(x))
    net.dropout.p = 0.0
    assert torch.allclose(wrapped(x), net(x), rtol=1e-5, atol=1e-6)


def test_arguments_that_are_no_tensors_are_not_baked_in(ort: OrtModuleEngine) -> None:
    net = Net()
    wrapped = _wrap(ort, net)
    x = torch.randn(3, 6)
    for flip, times in ((False, 1), (True, 1), (True, 3), (False, 1)):
        expected = net(x, flip=flip, times=times)
        assert torch.allclose(wrapped(x, flip=flip, times=times), expected, rtol=1e-5, atol=1e-6)
    assert _exported_again(ort.report(wrapped)) == 2, "the first export serves again"


def test_autocast_switched_on_later_is_noticed(ort: OrtModuleEngine) -> None:
    net = Net()
    wrapped = _wrap(ort, net)
    x = torch.randn(3, 6)
    assert wrapped(x).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.float16):
        assert net(x).dtype == torch.float16
        assert wrapped(x).dtype == torch.float16
    assert wrapped(x).dtype == torch.float32


def test_dropout_goes_on_in_training_mode_without_gradients(ort: OrtModuleEngine) -> None:
    """Dropout is active under no_grad, which is not eval(), as in eager torch."""
    wrapped = _wrap(ort, Net(p=0.5)).train()
    x = torch.randn(64, 6)
    with torch.no_grad():
        assert not torch.allclose(wrapped(x), wrapped(x))
        wrapped.eval()
        assert torch.allclose(wrapped(x), wrapped(x))


def test_a_backward_after_another_export_uses_its_own_graph(ort: OrtModuleEngine) -> None:
    net = Net()
    reference = copy.deepcopy(net)
    wrapped = _wrap(ort, net)
    x = torch.randn(3, 6)
    early = wrapped(x)
    wrapped(x, flip=True)
    early.sum().backward()
    reference(x).sum().backward()
    for a, b in zip(reference.parameters(), net.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_the_check_disturbs_nothing(ort: OrtModuleEngine) -> None:
    """Buffers, random numbers, .grad and dropout are the same as after a call without a check."""
    from ortlab.engines.ortmodule import compat

    outcomes = []
    for check in (True, False):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        wrapped = ort.wrap(net, EngineSettings.of(self_check=check))
        net[0].weight.grad = torch.ones(8, 6)
        compat.ortmodule().set_seed(5)
        x = torch.randn(16, 6)
        outputs = [wrapped(x).detach() for _ in range(2)]
        state = torch.get_rng_state()
        outcomes.append((outputs, state, net[0].weight.grad.clone(), net[1].running_mean.clone()))
        assert net[1].num_batches_tracked == 2
    (first, second), state, grad, mean = outcomes[0]
    (other_first, other_second), other_state, other_grad, other_mean = outcomes[1]
    assert torch.equal(state, other_state)
    assert torch.equal(grad, other_grad)
    assert torch.allclose(mean, other_mean)
    assert torch.allclose(first, other_first)
    assert torch.allclose(second, other_second)


class Noise(nn.Linear):
    """A layer that adds its own noise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.randn(4)


class Spectrum(nn.Linear):
    """A layer with an operator that this exporter has no ONNX rule for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(super().forward(x))


def test_an_operator_without_a_rule_is_named_with_its_line(ort: OrtModuleEngine) -> None:
    wrapped = _wrap(ort, Spectrum(6, 4))
    with pytest.raises(ExportFailed) as caught:
        wrapped(torch.ones(3, 6))
    text = str(caught.value)
    assert "bessel_j0" in text
    assert "test_engine.py" in text
    assert "\x1b[" not in text
    assert len(text.splitlines()) <= 2


def test_fallback_is_off_unless_asked_for_and_then_told(ort: OrtModuleEngine) -> None:
    model = Spectrum(6, 4)
    wrapped = _wrap(ort, model, fallback=True)
    x = torch.ones(3, 6)
    assert torch.equal(wrapped(x), model(x))
    report = ort.report(wrapped)
    assert report.engine_used == "eager"
    assert "bessel_j0" in (report.fallback_reason or "")


def test_a_model_that_is_mended_is_run_in_ort_again(ort: OrtModuleEngine) -> None:
    class Odd(nn.Linear):
        odd = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return torch.special.bessel_j0(y) if self.odd else y

    model = Odd(6, 4)
    wrapped = _wrap(ort, model, fallback=True)
    x = torch.ones(3, 6)
    wrapped(x)
    assert ort.report(wrapped).engine_used == "eager"
    model.odd = False
    wrapped(x)
    assert ort.report(wrapped).engine_used == "ortmodule"


def test_a_run_has_its_own_settings_and_its_own_report(ort: OrtModuleEngine) -> None:
    wrapped = _wrap(ort, Net())
    x, y = torch.randn(3, 6), torch.arange(3)
    for i in range(2):
        settings = FinetuneSettings.of(engine="ortmodule", device="cpu", self_check=False)
        stepper = ort.prepare(wrapped, functional.cross_entropy, settings)
        stepper.step([(x, y)], lr=1e-3)
        assert (stepper.report().export_s > 0) == (i == 0), "the second run exports nothing"
        assert stepper.report().check_s == 0.0
        stepper.close()
    wrapped(torch.randn(4, 6))
    assert ort.report(wrapped).check_s > 0, "the wrapper checks itself again, as it was asked to"


def test_a_run_does_not_fall_back_because_an_earlier_one_did(ort: OrtModuleEngine) -> None:
    wrapped = _wrap(ort, Spectrum(6, 4))
    x, y = torch.ones(3, 6), torch.arange(3)
    for fallback in (True, False):
        settings = FinetuneSettings.of(engine="ortmodule", device="cpu", fallback=fallback)
        stepper = ort.prepare(wrapped, functional.cross_entropy, settings)
        if fallback:
            stepper.evaluate((x, y))
        else:
            with pytest.raises(ExportFailed):
                stepper.evaluate((x, y))
        stepper.close()


class Checkpointed(nn.Module):
    """A model that recomputes its dropout in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 4)
        self.recompute = True

    def _block(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.a(x), 0.5, self.training).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return self.b(checkpoint(self._block, x, use_reentrant=False))
        return self.b(self._block(x))


def test_checkpointing_is_switched_on_and_off(ort: OrtModuleEngine) -> None:
    model = Checkpointed()
    wrapped = _wrap(ort, model)
    x = torch.randn(3, 6)
    for recompute in (True, False, True):
        model.recompute = recompute
        wrapped(x).sum().backward()
    notes = ort.report(wrapped).notes
    assert _checks(ort.report(wrapped)) == 3, "each export's first call, and the first's second"
    assert any("recompute: True -> False" in note for note in notes)


def test_every_export_has_its_shapes_checked(ort: OrtModuleEngine) -> None:
    class Baked(nn.Linear):
        def forward(self, x: torch.Tensor, *, bake: bool = False) -> torch.Tensor:
            y = super().forward(x)
            return y * float(x.shape[0]) if bake else y

    wrapped = _wrap(ort, Baked(6, 4))
    for rows in (8, 7, 6, 5):
        wrapped(torch.randn(rows, 6))
    wrapped(torch.randn(8, 6), bake=True)
    x = torch.randn(7, 6)
    assert torch.allclose(wrapped(x, bake=True), ort.unwrap(wrapped)(x, bake=True), atol=1e-6)


def test_the_check_gives_every_generator_back(ort: OrtModuleEngine) -> None:
    class Draws(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            random.random()
            np.random.rand()
            return super().forward(x) * torch.rand(())

    wrapped = _wrap(ort, Draws(6, 4))
    states = random.getstate(), np.random.get_state()
    wrapped(torch.ones(3, 6))
    assert states[0] == random.getstate()
    assert np.array_equal(states[1][1], np.random.get_state()[1])
    assert any(note.startswith("not checked") for note in ort.report(wrapped).notes)


def test_what_forward_sets_is_put_back_and_told(ort: OrtModuleEngine) -> None:
    class Remembers(nn.Linear):
        last = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = len(x)
            return super().forward(x)

    model = Remembers(6, 4)
    wrapped = _wrap(ort, model)
    for rows in (3, 4, 5):
        wrapped(torch.randn(rows, 6))
    report = ort.report(wrapped)
    assert _exported_again(report) == 0
    assert any("forward sets Remembers.last" in note for note in report.notes)
    assert model.last is None


def test_what_transformers_notes_of_its_own_hooks_is_no_remark(ort: OrtModuleEngine) -> None:
    cell = next(each for each in specs.cells() if each.name == "segformer/segmentation/sdpa/0.0")
    model, (batch, *_) = specs.model(cell), specs.batches(cell)
    wrapped = _wrap(ort, model)
    wrapped(**batch).loss.backward()
    assert ort.report(wrapped).remarks == ()


def test_a_buffer_that_forward_replaces_is_given_back(ort: OrtModuleEngine) -> None:
    class Averages(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            return y

    model = Averages()
    mean = model.mean
    with pytest.raises(ExportFailed, match="mean"):
        _wrap(ort, model)(torch.randn(3, 6))
    assert model.mean is mean
    assert not mean.any()


def test_a_tuple_is_no_list(ort: OrtModuleEngine) -> None:
    class Kind(nn.Linear):
        def forward(self, xs: Any) -> torch.Tensor:
            return super().forward(xs[0]) * (2 if isinstance(xs, tuple) else 3)

    model = Kind(6, 4)
    wrapped = _wrap(ort, model)
    x = torch.randn(3, 6)
    for inputs in ((x,), [x]):
        assert torch.allclose(wrapped(inputs), model(inputs), rtol=1e-5, atol=1e-6)


def test_threads_wait_for_each_other(ort: OrtModuleEngine) -> None:
    """No count of another thread is lost when a check restores buffers."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    wrapped = _wrap(ort, model)
    errors: list[BaseException] = []

    def work(rows: int) -> None:
        try:
            for i in range(5):
                wrapped(torch.randn(rows + i, 6))
        except BaseException as error:  # noqa: BLE001 - a thread's error would be lost
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (3, 10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert model[1].num_batches_tracked == 15


def test_random_numbers_besides_dropout_are_said_to_be_unchecked(ort: OrtModuleEngine) -> None:
    wrapped = _wrap(ort, Noise(6, 4))
    wrapped(torch.ones(3, 6))
    assert any("random numbers" in note for note in ort.report(wrapped).notes)


def test_backward_hooks_are_refused(ort: OrtModuleEngine) -> None:
    net = Net()
    net.first.register_full_backward_hook(lambda _module, _inputs, _outputs: None)
    with pytest.raises(ExportFailed, match="first has a backward hook"):
        _wrap(ort, net)(torch.ones(3, 6))


def test_shapes_are_checked_three_times_and_then_by_bucket(ort: OrtModuleEngine) -> None:
    wrapped = _wrap(ort, Net())
    for rows in (2, 3, 5):
        wrapped(torch.randn(rows, 6))
    assert _checks(ort.report(wrapped)) == 3
    for rows in (9, 10, 11, 12, 13):
        wrapped(torch.randn(rows, 6))
    assert _checks(ort.report(wrapped)) == 4, "9 to 16 are one bucket"
    for rows in (9, 2, 5):
        wrapped(torch.randn(rows, 6))
    assert _checks(ort.report(wrapped)) == 4, "a shape that is known is not checked again"
    for power in range(5, 25):
        wrapped(torch.randn(3, 2 ** (power // 2), 6) if power % 2 else torch.randn(power * 32, 6))
    assert _checks(ort.report(wrapped)) <= 16 + 1, "at most sixteen, and each new export's first"


def test_without_the_check_nothing_is_compared(ort: OrtModuleEngine) -> None:
    wrapped = _wrap(ort, Net(), self_check=False)
    wrapped(torch.randn(3, 6))
    report = ort.report(wrapped)
    assert report.check_s == 0.0
    assert report.export_s > 0.0
    assert _checks(report) == 0


@pytest.mark.parametrize("check", [True, False])
def test_the_users_own_error_stays_theirs(ort: OrtModuleEngine, check: bool) -> None:
    wrapped = _wrap(ort, Net(), self_check=check)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        wrapped(torch.randn(3, 7))
    assert wrapped(torch.randn(3, 6)).shape == (3, 4)


def test_what_cannot_be_wrapped(ort: OrtModuleEngine) -> None:
    for model, message in (
        (nn.ReLU(), "no parameter that requires a gradient"),
        (nn.Linear(2, 2).requires_grad_(False), "no parameter that requires a gradient"),
        (nn.Sequential(_wrap(ort, Net())), "contains a wrapped model"),
        (nn.Linear(2, 2, device="meta"), "meta device"),
        (_wrap(ort, Net()), "already"),
    ):
        with pytest.raises(ValueError, match=message):
            ort.wrap(model, EngineSettings())


def test_a_wrapped_model_is_copied_and_pickled_as_one(ort: OrtModuleEngine) -> None:
    net = Net()
    wrapped = _wrap(ort, net)
    x = torch.randn(3, 6)
    wrapped(x)
    for twin in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert type(twin) is type(wrapped)
        assert torch.allclose(twin(x), wrapped(x))
        assert ort.unwrap(twin) is not net


def test_a_wrapped_container_is_one(ort: OrtModuleEngine) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    wrapped = _wrap(ort, model)
    assert len(wrapped) == 2
    assert wrapped[0] is model[0]
    assert [part is own for part, own in zip(wrapped, model, strict=True)] == [True, True]
    assert type(copy.deepcopy(wrapped)) is type(wrapped)
    assert wrapped(torch.ones(1, 3)).shape == (1, 3)
    with pytest.raises(TypeError, match="len"):
        len(_wrap(ort, Net()))
    assert bool(_wrap(ort, Net()))


def test_a_wrapped_model_behaves_as_the_model(ort: OrtModuleEngine) -> None:
    net = Net()
    wrapped = _wrap(ort, net)
    assert list(wrapped.state_dict()) == list(net.state_dict())
    assert [id(p) for p in wrapped.parameters()] == [id(p) for p in net.parameters()]
    assert wrapped.scale == 1.0
    wrapped.scale = 2.0
    assert net.scale == 2.0
    assert ort.unwrap(wrapped) is net


def test_long_work_is_told(ort: OrtModuleEngine) -> None:
    heard: list[str] = []
    token = progress.set(heard.append)
    try:
        _wrap(ort, Net())(torch.randn(3, 6))
    finally:
        progress.reset(token)
    assert any("exporting" in line for line in heard)
    assert any("checking" in line for line in heard)


def test_a_seed_repeats_the_dropout_of_a_run(ort: OrtModuleEngine) -> None:
    losses = []
    torch.manual_seed(0)
    start = Net(p=0.5).state_dict()
    x, y = torch.randn(8, 6), torch.arange(8) % 4
    for seed in (3, 3, 4):
        net = Net(p=0.5)
        net.load_state_dict(start)
        settings = FinetuneSettings.of(engine="ortmodule", seed=seed, device="cpu")
        stepper = ort.prepare(net, functional.cross_entropy, settings)
        torch.manual_seed(seed)  # as a run does
        losses.append([float(stepper.step([(x, y)], lr=1e-2).loss) for _ in range(4)])
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_a_wrapper_is_what_its_model_is_to_those_who_ask(ort: OrtModuleEngine) -> None:
    """The wrapper has its model's class, which libraries check; a replaced forward stays on it."""
    model = tiny.gpt2().eval()
    before = set(vars(model))
    wrapped = ort.wrap(model, EngineSettings())
    assert isinstance(wrapped, PreTrainedModel)
    assert wrapped.__class__ is type(model) is not type(wrapped)
    wrapped._original_forward = wrapped.forward
    wrapped._is_accelerate_prepared = True
    assert wrapped._is_accelerate_prepared
    assert set(vars(model)) == before
    ids = torch.ones(1, 3, dtype=torch.long)
    said = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert wrapped.generate(ids, **said).tolist() == model.generate(ids, **said).tolist()
    assert execution_of(wrapped).last_call is None, "torch generates"


class LogOfSigmoid(nn.Module):
    """A model that is wrong for some values: far below 0, ORT's sigmoid is 0 and torch's is not."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x + self.shift).log()


@pytest.mark.parametrize("rows", [3, 8])
def test_the_second_batch_is_checked_too(ort: OrtModuleEngine, rows: int) -> None:
    mild, extreme = torch.randn(rows, 3), torch.randn(rows, 3)
    extreme[-1] = -30.0
    wrapped = _wrap(ort, LogOfSigmoid())
    wrapped(mild)
    told = "right for the checked part of the batch that it was exported with and"
    with pytest.raises(SelfCheckFailed, match=told):
        wrapped(extreme)
    fitting = _wrap(ort, LogOfSigmoid())
    for factor, checks in ((1.0, 1), (float("nan"), 1), (1.0, 2), (1.0, 2)):
        fitting(factor * torch.randn(rows, 3))
        assert _checks(ort.report(fitting)) == checks, "what is not finite tells nothing"


def test_a_check_that_is_asked_for_compares_the_next_call(ort: OrtModuleEngine) -> None:
    wrapped = _wrap(ort, LogOfSigmoid(), self_check=False)
    wrapped(torch.randn(4, 3))
    right = ortlab.check(wrapped)
    wrapped(torch.randn(4, 3))
    assert right.passed
    assert right.verdict.endswith(", for inputs of shape [4, 3]")
    assert [(row.kind, row.count) for row in right.differences] == [
        ("output", 1),
        ("gradient", 1),
    ]
    assert all(row.of_ort is not None for row in right.differences)
    wrong = ortlab.check(wrapped)
    with pytest.raises(SelfCheckFailed, match="ORT would not train this model correctly"):
        wrapped(torch.full((4, 3), -30.0))
    assert wrong.passed is False
    assert "ORT would not train this model correctly" in wrong.verdict


class LogOfTokens(nn.Module):
    """A model that is correct for token 0 and wrong for token 1, as `LogOfSigmoid` far below 0."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(torch.tensor([[0.0], [-30.0]]), freeze=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.table(ids)).log()


def test_what_the_first_check_left_out_of_rows_is_refused_in_the_second_step(
    ort: OrtModuleEngine,
) -> None:
    ids = torch.arange(512).reshape(8, 64) % 2  # every second token is left out of the first check
    wrapped = _wrap(ort, LogOfTokens())
    wrapped(ids)
    with pytest.raises(SelfCheckFailed, match="and wrong for the next"):
        wrapped(ids)


class Tagger(nn.Module):
    """A tagger with a mean loss per token; with `places`, one class for all tokens together."""

    def __init__(self, *, places: int = 0) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.classes = nn.Linear(4 * max(1, places), 3)
        self.places = places

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = self.table(ids)
        scores = self.classes(found.flatten(1) if self.places else found.flatten(0, 1))
        return functional.cross_entropy(scores, labels.flatten())


_LABELLED = torch.full((8, 64), -100)
_LABELLED[:, 1] = 1


@pytest.mark.parametrize(
    ("places", "labels", "checked"),
    [
        (0, torch.ones(8, 64, dtype=torch.int64), "[2, 32], [2, 32]"),
        (0, _LABELLED, "[2, 64], [2, 64]"),
        (0, _LABELLED.roll(1, 1), "[2, 32], [2, 32]"),
        (64, torch.ones(8, dtype=torch.int64), "[2, 64], [2]"),
    ],
    ids=["every token", "none among the few", "one among the few", "all at once"],
)
def test_the_first_check_is_of_a_few_tokens_where_they_will_do(
    ort: OrtModuleEngine, places: int, labels: torch.Tensor, checked: str
) -> None:
    ids = torch.arange(512).reshape(8, 64) % 9
    wrapped = _wrap(ort, Tagger(places=places))
    eager = copy.deepcopy(ort.unwrap(wrapped))(ids, labels)
    torch.testing.assert_close(wrapped(ids, labels), eager)
    first = next(note for note in ort.report(wrapped).notes if "checked on" in note)
    assert first.startswith(f"checked on {checked}: ")


# --- additions to torch's module methods since ORTModule


def test_a_state_is_assigned_as_to_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    wrapped = OrtModuleEngine().wrap(model, EngineSettings())
    x = torch.randn(4, 3)
    wrapped(x)
    state = {name: value.clone() * 2 for name, value in model.state_dict().items()}
    wrapped.load_state_dict(state, assign=True)
    assert model[0].weight.data_ptr() == state["0.weight"].data_ptr()
    torch.testing.assert_close(wrapped(x), copy.deepcopy(model)(x))


def test_shared_parameters_are_told_as_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    model.append(model[0])
    wrapped = OrtModuleEngine().wrap(model, EngineSettings())
    names = [name for name, _ in wrapped.named_parameters(remove_duplicate=False)]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert len(list(wrapped.named_parameters())) == 2
    assert list(wrapped.named_buffers(remove_duplicate=False)) == []


@pytest.mark.parametrize("model", [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))])
def test_a_functional_call_names_the_model_itself(model: nn.Module) -> None:
    wrapped, x = OrtModuleEngine().wrap(model, EngineSettings()), torch.randn(2, 3)
    others = {name: p.detach() * 2 for name, p in model.named_parameters()}
    told = r"weight is a plain tensor.*functional_call.*ortlab\.unwrap\(model\)"
    with pytest.raises((ExportFailed, ValueError), match=told):
        torch.func.functional_call(wrapped, others, (x,))
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    expected = torch.func.functional_call(copy.deepcopy(model), others, (x,))
    assert torch.equal(
        torch.func.functional_call(OrtModuleEngine().unwrap(wrapped), others, (x,)), expected
    )
    wrapped(x)
