"""Tests of the search: settings skipped, on simulated speeds, and a real one of a tiny model."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ortlab
from ortlab.engines.ortmodule import compat
from ortlab.search.prune import Search, SearchPoint, Setup, settings_of
from ortlab.search.result import TuneResult
from ortlab.search.tune import Tune, setups_of
from ortlab.session import session
from ortlab.settings import TuneSettings
from tests.support.small_classifier import Net, pairs
from tests.support.typed_magics import Typist

pytestmark = pytest.mark.usefixtures("one_thread")

NO_ORT = compat.unavailable()
ENGINES = {"eager": 1.0, "compile": 1.1, "ortmodule": 1.3}
PRECISIONS = {"fp32": 1.0, "bf16": 1.4}
SIZES = {1: 0.5, 2: 0.8, 4: 1.0, 8: 0.95}
BEGIN_S = {"eager": 0.1, "compile": 25.0, "ortmodule": 4.0}


class Costs:
    """A track of simulated speeds without a clock: rates in samples per second, seconds spent."""

    def __init__(self, speeds: Mapping[SearchPoint, float], *, room: int = 10**9) -> None:
        self.speeds = speeds
        self.room = room
        self.spent_s = 0.0
        self.begun: list[Setup] = []
        self.measured: list[SearchPoint] = []
        self.together: list[set[SearchPoint]] = []
        self.broken: dict[Setup, str] = {}
        self._noise = itertools.cycle([1.01, 0.99, 1.0, 0.98, 1.02])

    def begin(self, setup: Setup, micro: int) -> str | None:
        self.begun.append(setup)
        self.spent_s += BEGIN_S[setup.engine]
        return self.broken.get(setup)

    def rounds(
        self, candidates: Sequence[SearchPoint], number: int
    ) -> Mapping[SearchPoint, Sequence[float]]:
        self.measured += [c for c in candidates if c not in self.measured]
        self.together.append(set(candidates))
        self.spent_s += sum((1 + number) * 8 / self.speeds[c] for c in candidates)
        return {c: [self.speeds[c] * next(self._noise) for _ in range(number)] for c in candidates}

    def too_large(self, candidate: SearchPoint) -> str | None:
        takes = candidate.micro // (2 if candidate.setup.recompute else 1)
        return f"takes {takes}, more than {self.room}" if takes > self.room else None

    def slow_to_begin(self, setup: Setup) -> bool:
        return BEGIN_S[setup.engine] > 5

    def forgets(self, setup: Setup) -> bool:
        return setup.engine == "ortmodule"


class Noisy(Costs):
    """Costs of a machine whose rounds are slower or faster for all, with noise of each turn.

    Args:
        speeds: True rates.
        seed: Seed of the noise.
        shared: Standard deviation of a round's speed, which drifts.
        own: Standard deviation of a turn's speed.
        spikes: Probability that a turn is disturbed and takes 1.7 times as long.
    """

    def __init__(
        self,
        speeds: Mapping[SearchPoint, float],
        seed: int = 0,
        *,
        shared: float = 0.2,
        own: float = 0.03,
        spikes: float = 0.05,
    ) -> None:
        super().__init__(speeds)
        self._random = random.Random(seed)
        self._shared, self._own, self._spikes = shared, own, spikes
        self._drift = 0.0

    def rounds(
        self, candidates: Sequence[SearchPoint], number: int
    ) -> Mapping[SearchPoint, Sequence[float]]:
        super().rounds(candidates, number)
        found: dict[SearchPoint, list[float]] = {candidate: [] for candidate in candidates}
        for _ in range(number):
            self._drift = 0.8 * self._drift + self._random.gauss(0, 0.6 * self._shared)
            for candidate, rates in found.items():
                noise = math.exp(self._drift + self._random.gauss(0, self._own))
                spike = 1.7 if self._random.random() < self._spikes else 1.0
                rates.append(self.speeds[candidate] * noise / spike)
        return found


def speeds(**changes: float) -> dict[SearchPoint, float]:
    """Return products of the rates of engine, precision and batch, scaled as ortmodule_bf16=0.5."""
    found = {}
    for (engine, e), (precision, p), (micro, m) in itertools.product(
        ENGINES.items(), PRECISIONS.items(), SIZES.items()
    ):
        factor = changes.get(f"{engine}_{precision}", 1.0)
        factor *= changes.get(f"{engine}_{precision}_{micro}", 1.0)
        found[SearchPoint(Setup(engine, precision), micro)] = 10 * e * p * m * factor
        again = SearchPoint(Setup(engine, precision, "layers"), micro)
        found[again] = 8 * e * p * m * factor
    return found


def searched(costs: Costs, **options: Any) -> Search:
    setups = [Setup(engine, precision) for engine in ENGINES for precision in PRECISIONS]
    search = Search(setups, list(SIZES), costs, **options)
    search.run()
    return search


def grid_s(costs: Costs, rounds: int = 10) -> float:
    """Return the time of the full grid, in which each cell starts and has all its rounds."""
    plain = {c: speed for c, speed in costs.speeds.items() if c.setup.recompute is None}
    return sum(BEGIN_S[c.setup.engine] + (2 + rounds) * 8 / speed for c, speed in plain.items())


# ---- skipped settings, on simulated speeds -------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"compile_bf16": 1.6},
        {"compile_fp32": 1.3, "compile_bf16": 0.75, "ortmodule_bf16": 0.75},
        {"ortmodule_bf16": 0.3, "compile_bf16": 0.3, "eager_bf16": 0.3},
        {"ortmodule_bf16_8": 1.2},
        {"eager_fp32": 3.0},
    ],
)
def test_it_ends_on_the_best_of_the_grid_in_less_than_a_third(changes: dict[str, float]) -> None:
    costs = Costs(speeds(**changes))
    search = searched(costs)
    best = search.best()
    assert best is not None
    plain = [speed for c, speed in costs.speeds.items() if c.setup.recompute is None]
    assert costs.speeds[best] >= 0.95 * max(plain), f"{best} with {costs.speeds[best]}"
    assert costs.spent_s < grid_s(costs) / 3, f"{costs.spent_s} of {grid_s(costs)}"


def test_what_cannot_win_is_not_begun_and_says_why() -> None:
    costs = Costs(speeds())
    search = searched(costs)
    assert Setup("compile", "fp32") not in costs.begun
    assert len(costs.begun) == len(set(costs.begun)), "a set-up began twice"
    left = search.found[SearchPoint(Setup("compile", "fp32"), 4)]
    assert left.state == "left out"
    assert "cannot win" in left.reason
    assert not left.rates
    small = search.found[SearchPoint(Setup("ortmodule", "bf16"), 1)]
    assert "samples/s expected, ortmodule bf16, batch size 4 is faster" in small.reason
    assert not small.rates
    of_tokens = searched(Costs(speeds()), unit="tokens").found[
        SearchPoint(Setup("ortmodule", "bf16"), 1)
    ]
    assert "tokens/s expected" in of_tokens.reason
    behind = search.found[SearchPoint(Setup("eager", "fp32"), 1)]
    assert behind.rates
    assert behind.state == "slower"
    assert "behind ortmodule bf16, batch size 4 by at least" in behind.reason
    assert all(found.state != "waits" for found in search.found.values())


def test_a_precision_that_suits_one_engine_alone_is_found() -> None:
    """bf16 is slow in eager torch but fast in ort: not a product, but within the slack."""
    costs = Costs(speeds(eager_bf16=0.65, compile_bf16=0.65, ortmodule_bf16=0.9))
    search = searched(costs)
    best = search.best()
    assert best is not None
    assert best.setup == Setup("ortmodule", "bf16")


def test_new_ones_are_measured_beside_the_leader() -> None:
    costs = Costs(speeds())
    searched(costs)
    alone, sizes, others = costs.together[:4], costs.together[4], costs.together[5:]
    reference = [SearchPoint(Setup("eager", "fp32"), micro) for micro in SIZES]
    assert alone == [{candidate} for candidate in reference]
    assert sizes == set(reference)
    assert len(others[0]) == 2
    assert all(len(together) > 1 for together in others)


def test_what_does_not_fit_is_never_measured() -> None:
    costs = Costs(speeds(), room=2)
    search = searched(costs)
    assert {c.micro for c in costs.measured} == {1, 2}
    best = search.best()
    assert best is not None
    assert best.micro == 2
    assert search.found[SearchPoint(Setup("eager", "fp32"), 8)].reason == "takes 8, more than 2"
    assert search.found[SearchPoint(Setup("ortmodule", "bf16"), 4)].reason == "takes 4, more than 2"


def test_recomputation_is_for_what_does_not_fit_without() -> None:
    fits = Costs(speeds())
    searched(fits, recompute="layers")
    assert not any(setup.recompute for setup in fits.begun)
    tight = Costs(speeds(), room=1)
    search = searched(tight, recompute="layers")
    best = search.best()
    assert best == SearchPoint(Setup("ortmodule", "bf16", "layers"), 2)  # 0.8 of 0.8, against 0.5
    assert {s.engine for s in tight.begun if s.recompute} == {"ortmodule"}
    assert settings_of(best, 8) == {
        "engine": "ortmodule",
        "precision": "bf16",
        "recompute": "layers",
        "batch_size": 2,
        "gradient_accumulation_steps": 4,
    }


def test_workers_are_another_way_to_execute() -> None:
    setups = setups_of(
        TuneSettings(engines="eager,ortmodule", precisions="fp32", workers="1,2", zero_stages="0,1")
    )
    assert [str(setup) for setup in setups] == [
        *("eager fp32", "ortmodule fp32"),
        *("eager fp32 x 2", "ortmodule fp32 x 2"),
        *("eager fp32 x 2 ZeRO 1", "ortmodule fp32 x 2 ZeRO 1"),
    ]
    assert len({setup.way for setup in setups}) == 6
    found = settings_of(SearchPoint(setups[-1], 4), 8)
    assert (found["workers"], found["zero_stage"]) == (2, 1)
    assert "workers" not in settings_of(SearchPoint(setups[0], 4), 8)


def test_one_that_fails_is_left_and_others_go_on() -> None:
    costs = Costs(speeds())
    costs.broken = {Setup("ortmodule", "bf16"): "no such kernel", Setup("eager", "fp32"): "tired"}
    search = searched(costs)
    failed = search.found[SearchPoint(Setup("ortmodule", "bf16"), 4)]
    assert (failed.state, failed.reason) == ("failed", "no such kernel")
    best = search.best()
    assert best is not None
    assert best.setup not in costs.broken


def test_all_may_fail_in_a_round() -> None:
    class Broken(Costs):
        def rounds(
            self, candidates: Sequence[SearchPoint], number: int
        ) -> Mapping[SearchPoint, Sequence[float]]:
            found = super().rounds(candidates, number)
            return found if len(self.together) <= 5 else {}

    search = searched(Broken(speeds()))
    assert search.best() is None
    assert {found.state for found in search.found.values()} == {"failed", "left out"}


# ---- noise, on simulated speeds ------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"compile_bf16": 1.5}, {"eager_fp32": 3.0}])
def test_the_fastest_is_not_dropped_for_noise(changes: dict[str, float]) -> None:
    """In 200 seeds the fastest is dropped twice at most, and wins in all but six.

    The lead of the fastest is 5%. Rounds differ by 20%, turns by 3%, and one turn of 20 takes 1.7
    times as long.
    """
    field = speeds(**changes)
    plain = {c: speed for c, speed in field.items() if c.setup.recompute is None}
    fastest = max(plain, key=lambda candidate: plain[candidate])
    dropped = missed = 0
    for seed in range(200):
        search = searched(Noisy(field, seed))
        best = search.best()
        assert best is not None
        dropped += search.found[fastest].state == "slower"
        missed += best != fastest
    assert dropped <= 2
    assert missed <= 6


def test_a_clearly_slower_one_is_dropped_after_its_first_rounds() -> None:
    for seed in range(50):
        costs = Noisy(speeds(), seed, own=0.01, spikes=0)
        search = searched(costs)
        slow = search.found[SearchPoint(Setup("eager", "fp32"), 1)]  # 0.27 of the fastest
        assert (slow.state, len(slow.rates)) == ("slower", 3)
        assert max(len(found.rates) for found in search.found.values()) <= 8
        assert costs.spent_s < grid_s(costs) / 3, f"{costs.spent_s} of {grid_s(costs)}"


def test_two_bad_rounds_do_not_drop_the_fastest() -> None:
    fastest = SearchPoint(Setup("ortmodule", "bf16"), 4)

    class Disturbed(Costs):
        def rounds(
            self, candidates: Sequence[SearchPoint], number: int
        ) -> Mapping[SearchPoint, Sequence[float]]:
            new = fastest not in self.measured
            found = dict(super().rounds(candidates, number))
            if new and fastest in found:
                found[fastest] = [
                    rate * share for rate, share in zip(found[fastest], (0.6, 0.7, 1), strict=True)
                ]
            return found

    search = searched(Disturbed(speeds()))
    assert search.best() == fastest
    assert len(search.found[fastest].rates) == 8


def test_rates_of_different_rounds_are_comparable() -> None:
    """A machine that becomes slower for all: the first candidates measured have no advantage."""
    field = speeds()
    costs = Noisy(field, shared=0, own=0, spikes=0)
    rounds = costs.rounds

    def slower_and_slower(candidates: Sequence[SearchPoint], number: int) -> Any:
        share = 0.9 ** len(costs.together)
        return {
            c: [share * rate for rate in each] for c, each in rounds(candidates, number).items()
        }

    costs.rounds = slower_and_slower  # type: ignore[method-assign]
    search = searched(costs)
    measured = {c: found.rate for c, found in search.found.items() if found.rates}
    assert len(measured) > 6
    scale = measured[SearchPoint(Setup("eager", "fp32"), 4)] / 10
    assert measured == pytest.approx({c: scale * field[c] for c in measured})


def simulated(costs: Costs, **options: Any) -> Tune:
    """Return a search of which the costs are the measurements."""

    class Simulated(Tune):
        begin, rounds, too_large = costs.begin, costs.rounds, costs.too_large
        slow_to_begin, forgets = costs.slow_to_begin, costs.forgets

    settings = TuneSettings(engines=",".join(ENGINES), global_batch=8, **options)
    loss = nn.functional.cross_entropy
    tune = Simulated(Net(), dataset(), settings, shared={"device": "cpu"}, loss=loss)
    tune.start()
    return tune


@pytest.mark.parametrize("seed", range(6))
def test_the_first_row_is_the_winner(seed: int) -> None:
    costs = Noisy(speeds(), seed, shared=0.3, own=0.08)
    costs.room = 4
    costs.broken = {Setup("compile", "bf16"): "no such kernel"}
    tune = simulated(costs)
    result = tune.result(60)
    ran = [row for row in result.rows if row.state in ("measured", "slower")]
    assert list(result.rows[: len(ran)]) == ran
    medians = [row.spread.median for row in ran if row.spread is not None]
    assert medians == sorted(medians, reverse=True)
    assert len(medians) == len(ran) > 4
    assert result.best() is result.rows[0]
    assert result.rows[0].state == "measured"
    assert tune.settings.items() >= result.rows[0].settings.items()
    assert f"{result.rows[0].label} is fastest with" in result.headline
    rest = result.rows[len(ran) :]
    assert {row.state for row in rest} == {"left out", "failed"}
    assert all(row.reason for row in rest)
    assert result.table()[0] is result.rows[0]
    again = TuneResult.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False)))
    assert (again.best(), repr(again)) == (again.rows[0], repr(result))


def test_a_fast_one_that_turns_out_too_large_is_below_all_that_fit() -> None:
    class Grown(Costs):
        def too_large(self, candidate: SearchPoint) -> str | None:
            grown = candidate.micro == 8 and candidate in self.measured
            return "takes 8, more than 4" if grown else None

    result = simulated(Grown(speeds(eager_fp32_8=5.0))).result(60)
    (large,) = (row for row in result.rows if row.label == "eager fp32, batch size 8")
    first = result.rows[0]
    assert first.spread is not None
    assert large.spread is not None
    assert large.spread.median > first.spread.median
    assert (large.state, large.reason) == ("left out", "takes 8, more than 4")
    assert result.best() is first
    scores = [row.score for row in result.rows]
    assert scores == sorted(scores, reverse=True)
    assert large.score == 0


def test_candidates_within_the_noise_of_the_winner_are_named() -> None:
    near = simulated(Noisy(speeds(ortmodule_bf16_8=1.05), shared=0.3, spikes=0)).result(60)
    first, second = (f"ortmodule bf16, batch size {micro}" for micro in (4, 8))
    assert {near.rows[0].label, near.rows[1].label} == {first, second}
    assert f"Within the noise of {near.rows[0].label}: {near.rows[1].label}." in repr(near)
    apart = simulated(Noisy(speeds(ortmodule_bf16_8=0.9), own=0.01, spikes=0)).result(60)
    assert apart.rows[0].label == first
    assert "Within the noise" not in repr(apart)
    assert [row.state for row in apart.rows].count("measured") == 1
    few = simulated(Noisy(speeds()), rounds=2).result(60)
    assert not any(row.state == "slower" for row in few.rows), "two rounds tell nothing apart"
    assert "Within the noise" in repr(few)


# ---- a real search -------------------------------------------------------------------------------

QUICK: dict[str, Any] = {"rounds": 2, "steps": 1, "device": "cpu", "loss": "cross_entropy"}


def dataset(samples: int = 32) -> TensorDataset:
    made = torch.Generator().manual_seed(4)
    inputs = torch.randn(samples, 4, generator=made)
    return TensorDataset(inputs, torch.randint(2, (samples,), generator=made))


@pytest.mark.usefixtures("threads_end")
def test_a_search_ends_with_settings_that_train() -> None:
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    engines = "eager" if NO_ORT else "eager,ortmodule"
    tune = ortlab.tune(
        model, dataset(), engines=engines, global_batch=8, sizes=2, learning_rate=1e-3, **QUICK
    )
    result = tune.result(120)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[n], tensor) for n, tensor in model.state_dict().items())
    assert len(result.rows) == 4 * len(engines.split(","))
    assert {row.settings["batch_size"] for row in result.rows} == {4, 8}
    assert all(
        row.settings["batch_size"] * row.settings["gradient_accumulation_steps"] == 8
        for row in result.rows
    )
    assert all(row.state != "waits" for row in result.rows)
    best = result.best()
    assert best is result.rows[0]
    assert best.rates
    assert best.peak_bytes > 0
    assert tune.settings == {
        "learning_rate": 1e-3,
        "device": "cpu",
        "loss": "cross_entropy",
        **best.settings,
    }
    shown = repr(result)
    assert f"{best.label} is fastest" in shown
    again = TuneResult.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False)))
    assert again.to_dict() == result.to_dict()
    assert "uses engine=" in tune.apply()
    run = ortlab.finetune(model, dataset(), loss="cross_entropy", max_steps=1)
    assert run.result(60).steps == 1
    assert run.settings.data.batch_size == best.settings["batch_size"]
    assert (
        run.settings.data.gradient_accumulation_steps
        == best.settings["gradient_accumulation_steps"]
    )


@pytest.mark.usefixtures("threads_end")
def test_the_best_settings_hold_in_a_run_that_trains() -> None:
    # Without BatchNorm, which cannot train on the single sample left at the end of an epoch.
    model, chosen = nn.Linear(4, 2), {"engines": "eager", "precisions": "fp32", **QUICK}
    tune = ortlab.tune(model, dataset(), global_batch=8, sizes=2, **chosen)
    best = tune.result(120).best()
    assert best is not None
    run = ortlab.finetune(
        model,
        dataset(),
        loss="cross_entropy",
        engine="eager",
        batch_size=3,
        num_train_epochs=100_000,
    )

    def until_it_has(size: int) -> None:
        while run.current_settings.data.batch_size != size:
            assert not run.wait_over(0.01)

    assert run.name in tune.apply(run)
    until_it_has(best.settings["batch_size"])
    run.undo()
    until_it_has(3)
    assert run.name in tune.apply()
    until_it_has(best.settings["batch_size"])
    run.stop()
    run.result(60)
    assert not run.recorder.events("warning")
    assert {name: run.current_settings[name] for name in best.settings} == best.settings


def test_a_loader_keeps_its_batches() -> None:
    tune = ortlab.tune(Net(), pairs(rows=4), engines="eager", global_batch=8, **QUICK)
    result = tune.result(60)
    assert {row.settings["gradient_accumulation_steps"] for row in result.rows} == {2}
    run = ortlab.finetune(
        Net(), pairs(rows=4), loss="cross_entropy", engine="eager", num_train_epochs=10**6
    )
    try:
        tune.apply(run)  # would refuse a batch_size, as the run's loader defines its own
    finally:
        run.stop()
        assert run.wait_over(60)
    assert any("no other micro-batch was tried" in note for note in result.notes)


def test_what_takes_too_much_is_left_out() -> None:
    result = ortlab.tune(
        Net(), dataset(), engines="eager", precisions="fp32", memory="1KB", sizes=2, **QUICK
    ).result(60)
    assert {row.state for row in result.rows} == {"left out"}
    assert all("more than" in row.reason for row in result.rows)
    assert result.best() is None
    with pytest.raises(ValueError, match="nothing was measured"):
        _ = result.settings
    assert "nothing was measured" in repr(result)


def test_one_that_fails_in_a_round_says_why() -> None:
    class Tired(Net):
        low: list[bool] = []  # noqa: RUF012 - of all copies

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.low.append(torch.is_autocast_enabled("cpu"))
            if self.low[-1] and sum(self.low) > 3:
                raise ValueError("tired of it")
            return super().forward(x)

    data = dataset()
    result = ortlab.tune(Tired(), data, engines="eager", global_batch=8, sizes=1, **QUICK).result(
        60
    )
    full, low = result.rows
    assert (full.state, full.reason) == ("measured", "")
    assert (low.state, low.reason, low.rates) == ("failed", "tired of it", ())
    assert result.best() is full


def test_a_stop_keeps_what_was_found() -> None:
    tune = ortlab.tune(
        Net(), dataset(), engines="eager", **{**QUICK, "rounds": 1_000_000, "steps": 3}
    )
    while tune.best() is None:
        assert not tune.wait_over(0.01)
    tune.stop()
    result = tune.result(60)
    assert result.interrupted
    assert result.best() is not None
    assert not math.isnan(result.took_s)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 6}, "not a multiple of the 4 samples"),
        ({"target": "tokens"}, "needs batches with input_ids"),
        ({"batch_size": 3}, "unknown setting 'batch_size'"),
        ({"memory": "0"}, "is not a memory size"),
    ],
)
def test_refused_before_anything_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ortlab.tune(Net(), pairs(), **options)
    assert not session.searches


def test_typed(ip: Typist) -> None:
    ip("net = Net(); data = batches()")
    ip(
        "tune = %ort tune net data --loss cross_entropy --engines eager --rounds 2 --steps 1 "
        "--memory 16GiB --target samples"
    )
    ip("result = tune.result(60)")
    assert "is fastest with" in ip("tune")
    assert "16.00 GiB" in ip("result")
    assert ip["tune"].settings["gradient_accumulation_steps"] == 1
    assert "no option --batch-size" in ip.refused("%ort tune net data --batch-size 3")


def test_several_learning_rates_are_refused_with_what_compares_them(ip: Typist) -> None:
    ip("net = Net(); data = batches()")
    advice = "train a run with each, as in %ort finetune model data --lr 1e-3 --fresh --name a"
    for command in ("tune", "race", "finetune"):
        for given in ("1e-3,1e-4", "1e-3 1e-4 1e-5"):
            told = ip.refused(f"%ort {command} net data --loss cross_entropy --lr {given}")
            assert f"takes a number, not '{given}'; to compare several, {advice}" in told
    assert advice not in ip.refused("%ort tune net data --lr x")
    assert "what to do with 'more'" in ip.refused("%ort tune net data more --lr 1e-3")
    for rates in ([1e-3, 1e-4], "1e-3,1e-4"):
        with pytest.raises(ValueError, match=f"to compare several, {advice}, then %ort compare"):
            ortlab.tune(Net(), pairs(), learning_rate=rates)  # type: ignore[arg-type]
    assert "It does not compare learning rates" in " ".join(ip("%ort tune --help").split())
    assert "does not compare learning rates" in str(ortlab.tune.__doc__)


def test_the_example_of_three_learning_rates_runs_as_documented(
    ip: Typist, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTLAB_HOME", str(tmp_path))
    text = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text(encoding="utf-8")
    _, example = text.split("## Compare three learning rates and keep the best")
    train, compare, keep = re.findall(r"```python\n(.*?)```", example, re.DOTALL)
    (magic,) = re.findall(r"`(%ort finetune [^`]*)`", example)
    (other,) = re.findall(r"`(%ort compare [^`]*)`", example)
    (later,) = re.findall(r"`(model\.load_state_dict\(ortlab\.open_run[^`]*)`", example)
    ip(train)
    first = [run.evaluations[0].loss for run in ip["runs"]]
    assert first == [first[0]] * 3, "all from the same weights"
    shown = ip(compare)
    for lr in ("0.3", "0.01", "0.0003"):
        assert f"lr-{lr} · lr {lr}" in shown
    assert "Evaluation loss" in shown
    assert ip(other).partition("\n")[2] == shown.partition("\n")[2]
    assert ip(keep).startswith("lr-0.01: loss")
    losses = [run.result().best.loss for run in ip["runs"]]
    assert ip["best"].result().best.loss == min(losses)

    def accuracy() -> float:
        inputs, targets = ip["valid"].tensors
        with torch.no_grad():
            return float((ip["model"](inputs).argmax(1) == targets).float().mean())

    assert accuracy() == pytest.approx(ip["best"].result().best.accuracy)
    ip("for p in model.parameters(): p.data.zero_()")
    ip(later)
    assert accuracy() == pytest.approx(ip["best"].result().best.accuracy)
    ip(f"again = {' '.join(magic.split())}\nawait again")
    assert (ip["again"].name, ip["again"].state) == ("lr-0.01-2", "finished")
    assert ip["again"].evaluations[0].loss == first[0]
