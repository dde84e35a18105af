"""The choice of kernels: measured once, stored in the user's cache, and reused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import ortlab
from ortlab import cli
from ortlab.engines.ortmodule.compat import extensions
from ortlab.engines.ortmodule.kernels import kernel_choice, substitutes
from tests.support.kernel_nodes import operators


@pytest.fixture(autouse=True)
def no_timings(ops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up an empty timing cache for the test; the built extension stays available."""
    built = extensions.cache_folder().resolve()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    extensions.cache_folder().parent.mkdir(parents=True, mode=0o700)
    extensions.cache_folder().symlink_to(built)


def _model() -> nn.Module:
    torch.manual_seed(0)
    norm = nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.GELU(), nn.Dropout(0.1))
    return nn.Sequential(*norm, nn.Linear(24, 4), nn.Softmax(-1))


def _trained(rows: int = 6, **settings: Any) -> nn.Module:
    """Return a wrapped model after one step; it is always exported."""
    model = ortlab.wrap(_model(), cache=False, self_check=False, **settings)
    torch.manual_seed(1)
    model(torch.randn(rows, 12)).square().mean().backward()
    return model


def _kept() -> dict[str, list[float]]:
    return json.loads(kernel_choice.path().read_text(encoding="utf-8"))


def _write(timings: Any) -> None:
    kernel_choice.path().parent.mkdir(parents=True, exist_ok=True)
    kernel_choice.path().write_text(json.dumps(timings), encoding="utf-8")


def test_it_is_measured_once_and_kept(tmp_path: Path) -> None:
    _trained()
    assert kernel_choice.path().is_relative_to(tmp_path)
    first = _kept()
    assert first
    for name, (ort_us, torch_us) in first.items():
        assert " > " in name
        assert 0 < ort_us < 1e6
        assert 0 < torch_us < 1e6
    stamp = kernel_choice.path().stat().st_mtime_ns
    _trained()
    assert kernel_choice.path().stat().st_mtime_ns == stamp
    assert not list(kernel_choice.path().parent.glob(".*"))


def test_other_sizes_are_measured_too_and_added() -> None:
    _trained()
    first = _kept()
    _trained(rows=11)
    second = _kept()
    assert {name: second[name] for name in first} == first
    assert len(second) > len(first)
    assert any("11x24" in name for name in second.keys() - first.keys())


def test_what_was_measured_can_be_forgotten_for_a_while() -> None:
    _trained()
    kept, known = kernel_choice.path(), _kept()
    with kernel_choice.forgotten():
        assert not kernel_choice.path().exists()
        _trained(rows=11)
        assert _kept().keys() != known.keys()
    assert kernel_choice.path() == kept
    assert _kept() == known


def test_its_names_tell_operator_and_sizes() -> None:
    _trained()
    (norm,) = [name for name in _kept() if name.startswith("LayerNormalization ")]
    assert norm.endswith("> ortlab_kernels::layer_norm")
    assert "6x24" in norm


@pytest.mark.parametrize("ort_is_faster", [True, False])
def test_what_the_file_says_is_believed(ort_is_faster: bool) -> None:
    """Stored timings decide both ways; kernels without a timing stay unchanged."""
    _trained()
    chosen = [1.0, 1000.0] if ort_is_faster else [1000.0, 1.0]
    _write(dict.fromkeys(_kept(), chosen))
    found = operators(_trained())
    alone, ours = operators(_trained(kernels="ort")), operators(_trained(kernels="torch"))
    assert "LayerNormalization" in alone
    assert "ortlab_kernels::layer_norm" in ours
    assert ("LayerNormalization" in found) is ort_is_faster
    assert ("ortlab_kernels::layer_norm" in found) is not ort_is_faster
    if not ort_is_faster:
        assert found == ours
    assert all(each == chosen for each in _kept().values())  # not measured again


def test_one_of_them_alone() -> None:
    """Each name applies to its own nodes: ORT's Softmax stays where only it is faster."""
    _trained()
    timings = {name: [1000.0, 1.0] for name in _kept()}
    for name in timings:
        if name.startswith("Softmax "):
            timings[name] = [1.0, 1000.0]
    _write(timings)
    found = operators(_trained())
    assert "Softmax" in found
    assert "ortlab_kernels::softmax" not in found
    assert "ortlab_kernels::softmax_backward" in found
    assert "ortlab_kernels::layer_norm" in found


@pytest.mark.parametrize(
    ("ort_ms", "ours_ms", "enough"),
    [
        ([60.0], [2.0], True),
        ([60.0], [25.0], False),  # a single call may take twice as long by chance
        ([6.0], [0.2], False),  # or because an ORT thread had to wake up
        ([30.0, 28.0], [24.0, 23.0], True),
        ([9.0, 3.0], [4.0, 4.1], False),
        ([9.0, 8.0], [4.0, 4.1], True),
        ([9.0, 3.0, 9.0], [4.0, 4.1, 4.0], False),
        ([24.0, 13.0, 29.0], [14.0, 14.1, 14.0], True),
        ([9.0, 3.0, 9.0, 3.0], [4.0, 4.1, 4.0, 4.0], True),
        ([1.0, 1.1, 1.2, 1.1], [1.0, 1.1, 1.2, 1.0], False),
    ],
)
def test_rounds_end_when_they_tell_which_is_faster(
    ort_ms: list[float], ours_ms: list[float], enough: bool
) -> None:
    spent_s = (sum(ort_ms) + sum(ours_ms)) / 1000
    assert kernel_choice._suffices([ort_ms, ours_ms], spent_s) is enough
    assert kernel_choice._suffices([ours_ms, ort_ms], spent_s) is enough


@pytest.mark.parametrize(
    ("taken", "told"),
    [([3.0], 3.0), ([4.0, 8.0, 9.0], 7.0), ([4.0, 9.0, 4.0, 9.0, 70.0], 6.5)],
    ids=str,
)
def test_every_call_counts_but_one_that_was_held_up(taken: list[float], told: float) -> None:
    """Half of ORT's calls may take twice as long, as in training, so the minimum is no guide."""
    assert kernel_choice._typical(taken) == pytest.approx(told)


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        '"text"',
        '{"a": 1}',
        '{"a": [1]}',
        '{"a": ["x", 2]}',
        '{"a": null}',
        '{"a": [null, 1]}',
        "\xff\xfe",
        "\0" * 100,
    ],
)
def test_a_damaged_file_is_as_none(damage: str) -> None:
    kernel_choice.path().parent.mkdir(parents=True)
    kernel_choice.path().write_bytes(damage.encode("latin-1"))
    assert kernel_choice._read() == {}


def test_a_damaged_file_is_measured_again() -> None:
    _trained()
    names = set(_kept())
    whole = kernel_choice.path().read_bytes()
    kernel_choice.path().write_bytes(whole[: len(whole) // 2])
    _trained()
    assert set(_kept()) == names


@contextlib.contextmanager
def _a_file_for_a_folder() -> Iterator[None]:
    """Put a file where the folder would be: unlike a read-only folder, this also stops root."""
    folder = kernel_choice.path().parent
    folder.write_text("not a folder", encoding="utf-8")
    yield
    assert folder.read_text(encoding="utf-8") == "not a folder"


def test_a_folder_that_cannot_be_written_does_no_harm() -> None:
    with _a_file_for_a_folder():
        model = _trained()
        gradients = [p.grad for p in model.parameters()]
        assert all(each is not None and each.isfinite().all() for each in gradients)


def test_measuring_moves_no_random_number() -> None:
    """No kernel that draws from torch's generator is timed."""
    model = onnx.ModelProto()
    model.CopyFrom(ortlab.graphs(_trained(kernels="ort")).execution.model)
    (batch,) = (each.name for each in model.graph.input if "original_module" not in each.name)
    chosen = kernel_choice.KernelChoice(model.graph.input, {batch: (6, 12)})
    torch.manual_seed(3)
    before = torch.get_rng_state()
    substitutes.substitute(model, low=False, better=chosen.better)
    assert torch.equal(torch.get_rng_state(), before)
    chosen.keep()
    assert any("> ortlab_kernels::layer_norm" in name for name in _kept())
    assert not any("dropout" in name.lower() for name in _kept())  # used whichever is faster


def test_the_step_that_measures_draws_as_every_other() -> None:
    def drawn() -> torch.Tensor:
        model = ortlab.wrap(_model(), cache=False, self_check=False)
        torch.manual_seed(3)
        model(torch.ones(6, 12))
        return torch.get_rng_state()

    assert not kernel_choice.path().exists()
    measuring = drawn()
    assert kernel_choice.path().exists()
    assert torch.equal(drawn(), measuring)


def test_the_number_of_threads_is_another_machine(threads: None) -> None:
    found = set()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.add(kernel_choice.path())
    assert len(found) == 3


def test_ort_is_timed_with_as_many_threads_as_torch(
    threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    class Recorded(onnxruntime.InferenceSession):  # type: ignore[misc]
        def __init__(self, model: bytes, options: Any, *others: Any, **named: Any) -> None:
            given.append(options.intra_op_num_threads)
            super().__init__(model, options, *others, **named)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Recorded)
    torch.set_num_threads(3)
    _trained()
    assert given
    assert set(given) == {3}


def test_nothing_is_measured_where_all_are_taken_or_none() -> None:
    _trained(kernels="torch")
    _trained(kernels="ort")
    assert not kernel_choice.path().exists()


def test_the_command_shows_what_was_measured(ops: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "kernels"]) == 0
    assert "nothing was measured yet" in capsys.readouterr().out
    kernel_choice.path().parent.mkdir(parents=True)
    timings = {"Softmax axis=-1 4x8 > ortlab_kernels::softmax": [30.0, 20.0]}
    kernel_choice.path().write_text(json.dumps(timings))
    assert cli.main(["bench", "kernels"]) == 0
    line = next(each for each in capsys.readouterr().out.splitlines() if "Softmax" in each)
    assert line.split() == ["Softmax", "axis=-1", "4x8", "softmax", "30", "20", "ortlab"]
