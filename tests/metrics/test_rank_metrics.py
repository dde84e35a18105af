"""Tests of the comparison of ranks: recorders with known figures, and a real run on two workers."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.utils.data import TensorDataset

import ortlab
from ortlab.metrics import rank_metrics
from ortlab.metrics.recorder import NAN, Event, Recorder, Sample
from ortlab.session import session
from ortlab.settings import FinetuneSettings

MIB = 1024**2


class Told:
    """A recorder that is filled like that of a run on workers."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.step = 0

    def steps(self, count: int, own_ms: list[float], *, wait_ms: float = 2.0, **more: Any) -> Told:
        """Add steps in which rank i computes for `own_ms[i]`; the fastest waits for the slowest."""
        step_ms = max(own_ms, default=5.0) + wait_ms
        for _ in range(count):
            self.step += 1
            communication_ms = wait_ms if own_ms else NAN
            self.recorder.add(Sample(step=self.step, communication_ms=communication_ms))
            for rank, own in enumerate(own_ms):
                figures = {
                    "loss": 1 / self.step + rank,
                    "samples": 4,
                    "samples_per_s": 4e3 / step_ms,
                    "step_ms": step_ms,
                    "communication_ms": step_ms - own,
                    **{name: of[rank] if isinstance(of, list) else of for name, of in more.items()},
                }
                self.recorder.rank(rank).add(Sample(step=self.step, **figures))
        return self

    def change(self) -> Told:
        self.recorder.event(Event("change", self.step, 0.0, "lr=1 (was 2)", {"cost_s": 0.0}))
        return self

    def standing(self, **settings: Any) -> rank_metrics.Standing:
        return rank_metrics.standing(
            self.recorder, FinetuneSettings.of(**settings) if settings else None
        )


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    yield told
    told.recorder.close()


def held(parameters: float, gradients: float, optimizer: float) -> dict[str, Any]:
    return {
        "parameter_bytes": parameters,
        "gradient_bytes": gradients,
        "optimizer_bytes": optimizer,
    }


def slowest(standing: rank_metrics.Standing) -> list[int]:
    return [rank.rank for rank in standing.ranks if rank.slowest]


def test_a_rank_is_told_by_its_last_steps(told: Told) -> None:
    memory = {
        "base_bytes": 100 * MIB,
        "peak_bytes": 190 * MIB,
        **held(10 * MIB, 20 * MIB, 30 * MIB),
    }
    told.steps(40, [99.0, 99.0]).steps(rank_metrics.RECENT, [8.0, 6.0], **memory)
    first, second = told.standing().ranks
    assert first.step == second.step == told.step
    assert first.loss == pytest.approx(1 / told.step)
    assert second.loss == pytest.approx(1 / told.step + 1)
    assert first.step_ms == 10
    assert first.samples_per_s == pytest.approx(400)
    assert (first.communication_ms, second.communication_ms) == (2, 4)
    assert second.communication == pytest.approx(0.4)
    assert second.computing_ms == 6
    assert (first.parameters, first.gradients, first.optimizer_state) == (
        10 * MIB,
        20 * MIB,
        30 * MIB,
    )
    assert first.rest == 30 * MIB
    assert first.peak == 90 * MIB
    assert first.current
    assert slowest(told.standing()) == [0]


def test_one_step_that_takes_long_moves_no_median(told: Told) -> None:
    told.steps(20, [8.0, 8.0]).steps(1, [900.0, 8.0])
    assert [rank.step_ms for rank in told.standing().ranks] == [10, 10]
    assert [rank.samples_per_s for rank in told.standing().ranks] == [400, 400]
    assert slowest(told.standing()) == []


@pytest.mark.parametrize(
    ("memory", "rest"),
    [
        ({"base_bytes": 50, "peak_bytes": 90}, 30),
        ({"base_bytes": 50, "peak_bytes": 60}, 0),
        ({"base_bytes": 50, "peak_bytes": 55}, NAN),  # the model reused pages allocated before
        ({"base_bytes": 50}, NAN),
        ({"peak_bytes": 90}, NAN),
        ({"base_bytes": 50, "peak_bytes": 90, "cuda_peak_bytes": 25}, 15),
    ],
)
def test_the_rest_of_the_peak(told: Told, memory: dict[str, float], rest: float) -> None:
    told.steps(3, [1.0], **held(2, 3, 5), **memory)
    (rank,) = told.standing().ranks
    assert rank.rest == pytest.approx(rest, nan_ok=True)
    assert rank.held == 10
    assert rank.peak == 10 + (0 if math.isnan(rest) else rest)


@pytest.mark.parametrize(
    ("own_ms", "expected"),
    [
        ([10.0, 12.0], [1]),
        ([10.0, 10.9], []),  # 9%, but less than 1 ms
        ([100.0, 104.0], []),  # 4 ms, but less than 5%
        ([100.0, 106.0], [1]),
        ([10.0, 10.0], []),
        ([30.0], []),
        ([10.0, 20.0, 10.0, 21.0], [3]),  # the others are compared by their median
        ([10.0, NAN, 14.0], [2]),
    ],
)
def test_the_slowest_is_marked_where_it_clearly_is(
    told: Told, own_ms: list[float], expected: list[int]
) -> None:
    told.steps(9, own_ms)
    assert slowest(told.standing()) == expected
    named = [note for note in told.standing().notes() if "slowest" in note]
    assert len(named) == len(expected)
    assert all(f"rank {expected[0]} is" in note for note in named)


def test_the_slowest_computes_longest_whatever_it_waits(told: Told) -> None:
    """Steps end together, so ranks differ only in the time outside of communication."""
    told.steps(9, [10.0, 14.0], wait_ms=50.0)
    (note,) = told.standing().notes()
    assert note == ("rank 1 is the slowest: 14 ms per step without communication, the others 10 ms")


def test_steps_from_before_a_change_do_not_count(told: Told) -> None:
    told.steps(20, [8.0, 8.0]).change().steps(2, [18.0, 18.0])
    assert [rank.step_ms for rank in told.standing().ranks] == [20, 20]
    told.change()
    assert [rank.step_ms for rank in told.standing().ranks] == [20, 20], "before its first step"


def test_a_run_that_goes_on_in_one_process_keeps_its_ranks(told: Told) -> None:
    told.steps(20, [8.0, 12.0], **held(4, 4, 4))
    assert told.standing().until is None
    told.change().steps(1, [])
    standing = told.standing(workers=2, zero_stage=1)
    assert standing.until == 20
    assert standing.notes()[0] == (
        "the workers trained until step 20; the run continued in one process"
    )
    assert slowest(standing) == [1]
    assert standing.saving is not None
    told.change().steps(1, [30.0, 30.0])
    again = told.standing(workers=2, zero_stage=1)
    assert again.until is None
    assert [rank.step_ms for rank in again.ranks] == [32, 32], "those from before are gone"


def test_ranks_that_left_are_told_apart(told: Told) -> None:
    told.steps(20, [8.0, 8.0, 8.0, 40.0], **held(4, 4, 2)).change()
    told.steps(2, [8.0, 8.0], **held(4, 4, 4))
    standing = told.standing(workers=2, zero_stage=1)
    assert [rank.current for rank in standing.ranks] == [True, True, False, False]
    assert [rank.remark for rank in standing.ranks] == ["", "", "until step 20", "until step 20"]
    assert slowest(standing) == []
    assert standing.saving is not None
    assert standing.saving.held == 24, "of those that train"
    assert standing.saving.workers == 2


def test_ranks_are_told_one_after_another(told: Told) -> None:
    """A view may read the recorder between two ranks."""
    told.steps(5, [8.0, 8.0])
    told.recorder.add(Sample(step=6, communication_ms=1.0))
    told.recorder.rank(0).add(Sample(step=6, step_ms=10.0, communication_ms=2.0))
    told.recorder.rank(2)
    standing = told.standing()
    assert [(rank.rank, rank.current) for rank in standing.ranks] == [(0, True), (1, True)]
    assert standing.until is None


def test_without_ranks_there_is_nothing(told: Told) -> None:
    assert told.standing(workers=2) == rank_metrics.Standing()
    told.steps(3, [])
    assert told.standing(workers=2) == rank_metrics.Standing()
    assert repr(rank_metrics.table(told.recorder)) == "no rank has trained yet"
    assert rank_metrics.lines(told.recorder, 8).loss.shape == (0, 0)


P = 5_000_000
"""Number of parameters. In fp32 they take 4 bytes each, gradients 4, AdamW's moments 8, SGD's 4."""


@pytest.mark.parametrize(
    ("workers", "stage", "optimizer", "each", "saved"),
    [
        (2, 0, "adamw", (4, 4, 8), 0.0),
        (2, 1, "adamw", (4, 4, 4), 0.25),
        (4, 1, "adamw", (4, 4, 2), 0.375),
        (2, 1, "sgd", (4, 4, 2), 1 / 6),
        (2, 1, "lamb", (4, 4, 4), 0.25),
        (2, 2, "adamw", (4, 2, 4), 0.375),
        (2, 3, "adamw", (2, 2, 4), 0.5),
        (2, 2, "sgd", (4, 2, 2), 1 / 3),
    ],
)
def test_what_zero_saves_is_what_the_paper_says(
    told: Told,
    workers: int,
    stage: int,
    optimizer: str,
    each: tuple[int, int, int],
    saved: float,
) -> None:
    told.steps(3, [1.0] * workers, **held(*(P * size for size in each)))
    saving = told.standing(workers=workers, zero_stage=stage, optimizer=optimizer).saving
    assert saving is not None
    whole = 16 if optimizer != "sgd" else 12
    assert saving.whole == workers * whole * P
    assert saving.held == workers * sum(each) * P
    assert saving.measured == pytest.approx(saved)
    assert saving.expected == pytest.approx(saved)
    assert (f"{saved:.1%}" in str(saving)) is (stage > 0)
    assert f"ZeRO stage {stage} on {workers} workers" in str(saving)


@pytest.mark.parametrize(
    ("stage", "changes", "each", "saved"),
    [
        (1, {"param_dtype": "bf16"}, (2, 2, 6), 6 / 16),
        (2, {"param_dtype": "bf16"}, (2, 1, 6), 7 / 16),
        (3, {"param_dtype": "bf16"}, (1, 1, 6), 0.5),
        (3, {"param_dtype": "bf16", "offload_optimizer": True}, (1, 1, 6), 0.5),
        (2, {"offload_optimizer": True}, (4, 2, 6), 4 / 16),
    ],
)
def test_what_16_bit_weights_save(
    told: Told, stage: int, changes: dict[str, Any], each: tuple[int, int, int], saved: float
) -> None:
    """2 + 2 + 12 bytes a parameter; with the optimizer on the host, fp32 has a copy there, too."""
    told.steps(3, [1.0] * 2, **held(*(P * size for size in each)))
    saving = told.standing(workers=2, zero_stage=stage, **changes).saving
    assert saving is not None
    assert saving.whole == 2 * 16 * P
    assert saving.measured == pytest.approx(saved)
    assert saving.expected == pytest.approx(saved)


def test_what_is_in_host_memory_is_none_of_the_device_s(told: Told) -> None:
    cuda = {"cuda_peak_bytes": 9.0 * P, "host_bytes": 6.0 * P}
    told.steps(3, [1.0] * 2, **held(1 * P, 1 * P, 6 * P), **cuda)
    standing = told.standing(workers=2, zero_stage=3, offload_optimizer=True)
    assert [rank.rest for rank in standing.ranks] == [7 * P, 7 * P]
    assert (
        "57.2 MiB of the training state is in host memory, where the optimizer runs"
        in standing.notes()
    )


def test_at_stage_0_it_says_what_stage_1_would_save(told: Told) -> None:
    told.steps(3, [1.0] * 4, **held(4 * P, 4 * P, 8 * P))
    saving = told.standing(workers=4, zero_stage=0).saving
    assert str(saving) == (
        "ZeRO stage 0 on 4 workers: a total of 305.2 MiB of parameters, gradients and optimizer "
        "state, one copy per worker; stage 1 would save 114.4 MiB (37.5%), as the formula predicts "
        "(arXiv:1910.02054)"
    )


def test_what_is_held_is_not_what_was_predicted(told: Told) -> None:
    """Measured are a rank that partitions nothing, whatever the setting, and a rank that pads."""
    told.steps(3, [1.0] * 2, **held(4 * P, 4 * P, [8 * P, 8 * P + 1600]))
    saving = told.standing(workers=2, zero_stage=1).saving
    assert saving is not None
    assert saving.expected == pytest.approx(0.25)
    assert -1e-3 < saving.measured < 0
    assert "1.6 KiB (0.0%) more than at stage 0" in str(saving)


@pytest.mark.parametrize(
    ("settings", "state", "saved", "told_so"),
    [
        ({"tensor_parallel": 2}, [8, 8, 4, 4], 0, "one copy per 2 workers; stage 1 would save"),
        ({"tensor_parallel": 4}, [8, 8, 4, 4], 0, "one copy per 4 workers"),
        ({"pipeline_stages": 2, "zero_stage": 1}, [4, 4, 2, 2], 0.25, "(25.0%) less than"),
    ],
)
def test_ranks_may_have_parts_of_a_model(
    told: Told, settings: dict[str, Any], state: list[int], saved: float, told_so: str
) -> None:
    """ZeRO partitions among ranks with the same part; here two have twice as much as the others."""
    parts = [4 * P, 4 * P, 2 * P, 2 * P]
    told.steps(3, [1.0] * 4, **held(parts, parts, [size * P for size in state]))  # type: ignore[arg-type]
    saving = told.standing(workers=4, **settings).saving
    assert saving is not None
    assert saving.whole == 48 * P
    assert saving.measured == saving.expected == pytest.approx(saved)
    assert told_so in str(saving)
    assert ("stage 1 would" in str(saving)) is (saving.at_one < saving.whole and not saved)


def test_frozen_parameters_have_neither_gradients_nor_state(told: Told) -> None:
    told.steps(3, [1.0] * 2, **held(4 * P, P, P))
    saving = told.standing(workers=2, zero_stage=1).saving
    assert saving is not None
    assert saving.whole == 2 * (4 + 1 + 2) * P
    assert saving.expected == saving.measured == pytest.approx(1 / 7)


def test_parameters_of_two_bytes_have_moments_of_two_bytes(told: Told) -> None:
    told.steps(3, [1.0] * 2, **held(2 * P, 2 * P, 2 * P))
    saving = told.standing(workers=2, zero_stage=1).saving
    assert saving is not None
    assert saving.expected == saving.measured == pytest.approx(0.25)


def test_nothing_is_said_of_zero_where_it_is_not_known(told: Told) -> None:
    told.steps(3, [1.0] * 2)
    assert told.standing(workers=2).saving is None, "nobody counted bytes"
    told.steps(3, [1.0] * 2, **held(4, 4, 8))
    assert told.standing().saving is None, "without settings"
    assert told.standing(workers=3).saving is None, "one is missing"
    assert told.standing(workers=2).saving is not None


def test_the_settings_are_those_that_ranks_trained_under() -> None:
    one, two, three = (FinetuneSettings.of(workers=count) for count in (1, 2, 3))
    run = SimpleNamespace(current_settings=one, earlier_settings=[one, three, two, one])
    assert rank_metrics.trained_under(run) is two
    assert rank_metrics.trained_under(SimpleNamespace(current_settings=three)) is three
    assert rank_metrics.trained_under(SimpleNamespace(current_settings=one)) is None
    assert rank_metrics.trained_under(object()) is None


def test_lines_have_equal_shares_of_the_steps(told: Told) -> None:
    told.steps(40, [9.0, 4.0], wait_ms=1.0)
    lines = rank_metrics.lines(told.recorder, 4)
    assert (lines.first, lines.last) == (1, 40)
    own = [np.mean([1 / step for step in range(at, at + 10)]) for at in (1, 11, 21, 31)]
    assert lines.loss == pytest.approx(np.array([own, np.array(own) + 1]))
    assert lines.samples_per_s == pytest.approx(400)


def test_a_rate_is_samples_over_time_and_a_gap_is_a_gap(told: Told) -> None:
    told.steps(9, [0.0], wait_ms=1.0).steps(1, [0.0], wait_ms=91.0)
    told.steps(10, []).steps(5, [0.0, 0.0], wait_ms=4.0).steps(5, [0.0])
    lines = rank_metrics.lines(told.recorder, 3)
    assert lines.samples_per_s[0] == pytest.approx([400, NAN, 1e3 * 40 / 30], nan_ok=True)
    assert lines.samples_per_s[1] == pytest.approx([NAN, NAN, 1000], nan_ok=True)
    assert rank_metrics.lines(told.recorder, 100).loss.shape == (2, 30)


def test_a_table_is_a_rank_a_row(told: Told) -> None:
    told.steps(1200, [8.0, 6.0], **held(10 * MIB, 10 * MIB, 10 * MIB))
    table = rank_metrics.table(told.recorder, FinetuneSettings.of(workers=2, zero_stage=1))
    assert list(table) == list(told.standing().ranks)
    head, _, first, second, *notes = repr(table).splitlines()
    assert head.split()[:5] == ["rank", "step", "loss", "samples/s", "step"]
    assert "1,200" in first
    assert "2 ms (20%)" in first
    assert "4 ms (40%)" in second
    assert first.count("10.0 MiB") == 3
    assert first.endswith("slowest")
    assert "?" in first, "the rest of the peak is not known"
    assert notes == list(table.notes)
    assert notes[1].startswith("ZeRO stage 1 on 2 workers: a total of 60.0 MiB")


class Uneven(nn.Module):
    """Takes longer on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if distributed.is_initialized():
            time.sleep(0.02 * distributed.get_rank())
        return self.layers(x)


@pytest.mark.skipif(os.name != "posix", reason="gloo over loopback")
def test_two_workers_stand_as_they_do() -> None:
    if session.workers is not None:
        session.workers.stop()
        session.workers = None
    drawn = torch.Generator().manual_seed(3)
    inputs = torch.randn(160, 64, generator=drawn)
    data = TensorDataset(inputs, torch.randint(0, 4, (160,), generator=drawn))
    model = Uneven()
    try:
        run = ortlab.finetune(
            model, data, engine="eager", device="cpu", loss="cross_entropy", batch_size=16,
            workers=2, zero_stage=1,
        )  # fmt: skip
        run.result(120)
    finally:
        if session.workers is not None:
            session.workers.stop()
            session.workers = None
    standing = rank_metrics.standing(run.recorder, rank_metrics.trained_under(run))
    first, second = standing.ranks
    assert slowest(standing) == [1]
    assert second.computing_ms >= 20
    assert first.communication > second.communication
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert first.parameters == first.gradients == second.parameters == second.gradients == size
    assert standing.saving is not None
    assert standing.saving.whole == 2 * 4 * size
    assert standing.saving.measured == pytest.approx(standing.saving.expected, rel=0.05)
    assert standing.saving.expected == pytest.approx(0.25, rel=1e-4)
    assert all(rank.rest >= 0 and rank.samples_per_s > 0 for rank in standing.ranks)
    assert dataclasses.astuple(standing.ranks[0])[:2] == (0, 10)
