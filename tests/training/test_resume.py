"""Tests that a resumed run is bitwise the one that saved a checkpoint and continued."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

import ortlab
from ortlab.checkpoint.checkpoint import Checkpoint, _digest
from ortlab.engines.base import EngineUnavailable, NotFinite, Stepper
from ortlab.engines.registry import engine
from ortlab.engines.torch.stepper import Eager
from ortlab.history.saved_run import SavedRun
from ortlab.metrics.recorder import INDEX, Recorder
from ortlab.settings import FinetuneSettings
from ortlab.training import data_loading, trainer
from ortlab.training.control import Control
from ortlab.training.run import Run
from tests.support.needed_engines import needs
from tests.support.resuming import CASES, Course, Gated, examples, network
from tests.support.waiting import HANGS_S, until

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def gone_on(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Stop every case here and finish all in another process; return folder and usable cases."""
    torch.compiler.reset()  # code compiled by other tests here affects what is compiled next
    folder, names = tmp_path_factory.mktemp("resumed"), []
    for name, case in CASES.items():
        try:
            engine(case.settings["engine"])
        except EngineUnavailable:
            continue
        names.append(name)
        stayed = Course(case).finish(keep=folder / f"{name}.ckpt")
        safetensors.torch.save_file(stayed, folder / f"{name} stayed.safetensors")
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-m", "tests.support.resuming", str(folder), *names], cwd=root, check=True
    )
    return folder, names


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_in_another_process(gone_on: tuple[Path, list[str]], name: str) -> None:
    folder, names = gone_on
    if name not in names:
        pytest.skip(f"engine {CASES[name].settings['engine']!r} cannot run here")
    stayed = safetensors.torch.load_file(folder / f"{name} stayed.safetensors")
    resumed = safetensors.torch.load_file(folder / f"{name}.safetensors")
    assert len(resumed["losses"]) == 5  # 9 steps: 3 epochs of 5 micro-batches, two per step
    assert list(stayed) == list(resumed)
    for entry, value in stayed.items():
        assert torch.equal(value, resumed[entry]), entry


@pytest.mark.parametrize("case", ["eager", "ort with dropout"])
def test_other_random_states_give_other_losses(gone_on: tuple[Path, list[str]], case: str) -> None:
    """Other random states change the masks, so the test above depends on the restored states."""
    folder, names = gone_on
    if case not in names:
        pytest.skip(f"engine {CASES[case].settings['engine']!r} cannot run here")
    kept = Checkpoint.load(folder / f"{case}.ckpt")
    losses = [
        Course(CASES[case], _drawing_otherwise(kept, seed)).finish()["losses"] for seed in (1, 2)
    ]
    assert not torch.equal(*losses)


def _drawing_otherwise(kept: Checkpoint, seed: int) -> Checkpoint:
    """Return `kept` with other random states for torch and for an engine's own generator."""
    random = dataclasses.replace(
        kept.position.random, host=torch.Generator().manual_seed(seed).get_state()
    )
    position = dataclasses.replace(kept.position, random=random, engine_seed=seed)
    return dataclasses.replace(kept, position=position)


# --- kinds of data


class Augmented(Dataset[Any]):
    """Draws from every generator, as augmentations do."""

    def __init__(self) -> None:
        self.inputs, self.target = examples(22).tensors

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        noise = 0.1 * torch.randn(4) + float(np.random.rand())
        return self.inputs[index] + noise, self.target[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from examples(22)


class Halves(Sampler[int]):
    """Draws which half comes first, and its order, from Python's and numpy's generators."""

    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Iterator[int]:
        halves = [range(11), range(11, 22)]
        random.shuffle(halves)
        for half in halves:
            yield from np.random.permutation(half).tolist()


class Growing(Sampler[list[int]]):
    """Batches of 2 to 6 samples, in an order that torch draws."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(torch.randperm(22).tolist())
        for size in (2, 2, 3, 4, 5, 6):
            yield [next(order) for _ in range(size)]


def noisy(samples: list[Any]) -> Any:
    inputs, targets = map(torch.stack, zip(*samples, strict=True))
    return inputs + 0.1 * torch.randn(inputs.shape), targets


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def loader(data: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(examples(22) if data is None else data, batch_size=4, **options)


WHOLE = [2] * 11
"""Sizes of an epoch's batches of two."""
DATA: dict[str, Callable[[], Any]] = {
    "a dataset": lambda: examples(22),
    "a dataset that draws": Augmented,
    "a stream of samples": Stream,
    "a list": lambda: list(loader()),
    "a loader that shuffles": lambda: loader(shuffle=True),
    "a loader that shuffles and draws": lambda: loader(Augmented(), shuffle=True),
    "a generator of the loader's": lambda: loader(shuffle=True, generator=generator()),
    "a generator of the sampler's": lambda: loader(
        sampler=RandomSampler(range(22), generator=generator())
    ),
    "a sampler with weights": lambda: loader(
        sampler=WeightedRandomSampler([1.0] * 22, 22, generator=generator())
    ),
    "with replacement": lambda: loader(
        sampler=RandomSampler(range(22), replacement=True, num_samples=22)
    ),
    "a sampler of one's own": lambda: loader(sampler=Halves()),
    "a batch sampler of one's own": lambda: DataLoader(examples(22), batch_sampler=Growing()),
    "a collate_fn that draws": lambda: loader(shuffle=True, collate_fn=noisy),
    "a loader of a stream": lambda: loader(Stream()),
    "workers": lambda: loader(Augmented(), shuffle=True, num_workers=2),
    "workers that stay": lambda: loader(
        shuffle=True, num_workers=2, persistent_workers=True, generator=None
    ),
    "workers that stay, a generator": lambda: loader(
        shuffle=True, num_workers=1, persistent_workers=True, generator=generator()
    ),
}


def trained(
    data: Any,
    begin: Checkpoint | None = None,
    *,
    stop: int | None = None,
    held_out: Any = None,
    model: nn.Module | None = None,
    **values: Any,
) -> tuple[list[float], dict[str, torch.Tensor], Checkpoint | None, Recorder]:
    """Return losses, weights, the checkpoint after step `stop`, and the recorder."""
    if isinstance(data, Dataset):
        values = {"batch_size": 4, **values}
    settings = FinetuneSettings.of(
        **{"engine": "eager", "device": "cpu", "lr": 0.05, "num_train_epochs": 3}
        | {"lr_scheduler_type": "constant", **values}
    )
    model, recorder, kept = model or network(), Recorder(), None
    course = trainer.Trainer(
        Eager().prepare(model, functional.cross_entropy, settings),
        data_loading.batches(data, settings),
        settings,
        control=Control(),
        recorder=recorder,
        evaluation=None
        if held_out is None
        else data_loading.batches(held_out, settings, evaluation=True),
        begin=begin,
    )
    for done, _ in enumerate(course.steps(), 1):
        if done == stop:
            kept = course.checkpoint()
    recorder.close()
    return recorder.rows()[:, INDEX["loss"]].tolist(), model.state_dict(), kept, recorder


def assert_goes_on(data: Callable[[], Any], stop: int, path: Path, **values: Any) -> None:
    losses, weights, kept, _ = trained(data(), stop=stop, **values)
    assert kept is not None
    begin = Checkpoint.load(kept.save(path))
    torch.rand(3)
    np.random.rand()
    later, resumed, *_ = trained(data(), begin, **values)
    assert later == losses[stop:]
    for name, value in weights.items():
        assert torch.equal(value, resumed[name]), name


@pytest.mark.parametrize(
    ("name", "stop"),
    # Worker processes are slow to start.
    [(name, stop) for name in DATA for stop in (5, 6, 8) if stop > 5 or "workers" not in name],
)
def test_the_place_in_the_data_is_found_again(name: str, stop: int, tmp_path: Path) -> None:
    """Stops before the last of an epoch's six steps, at its end, in the middle of the next one."""
    assert_goes_on(DATA[name], stop, tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    ("name", "stop", "sizes"),
    [
        ("a dataset that draws", 5, [2, *WHOLE, *WHOLE]),
        ("a dataset", 6, [*WHOLE, *WHOLE]),
        ("a dataset that draws", 8, [2] * 7 + WHOLE),
        ("a stream of samples", 8, [2] * 7 + WHOLE),
        ("a loader that shuffles and draws", 8, None),
    ],
)
def test_a_file_that_counts_micro_batches_is_read(
    name: str, stop: int, sizes: list[int] | None, tmp_path: Path
) -> None:
    """Format 1 counts micro-batches; a Dataset also resumes from it with another batch size."""
    losses, weights, kept, _ = trained(DATA[name](), stop=stop)
    assert kept is not None
    begin = Checkpoint.load(in_form_1(kept, tmp_path / "a.ckpt"))
    assert (begin.position.unit, begin.position.epoch) == ("micro-batches", stop // 7)
    assert begin.position.read == stop - 6 * begin.position.epoch
    later, resumed, *_ = trained(DATA[name](), begin)
    assert later == losses[stop:]
    for entry, value in weights.items():
        assert torch.equal(value, resumed[entry]), entry
    if sizes is not None:
        *_, rest = trained(DATA[name](), begin, batch_size=2)
        assert rest.rows()[:, INDEX["samples"]].tolist() == sizes


def test_a_file_that_counts_micro_batches_of_other_data(tmp_path: Path) -> None:
    begin = Checkpoint.load(in_form_1(kept_at(3), tmp_path / "a.ckpt"))
    with pytest.raises(
        ValueError, match=r"has 50 samples per epoch, .* had 6 micro-batches; pass the data"
    ):
        trained(examples(50), begin)


def in_form_1(kept: Checkpoint, path: Path) -> Path:
    """Save `kept` as a file of format 1, whose positions count micro-batches of four."""

    def counted(samples: int | None) -> int | None:
        made = kept.position.unit == "micro-batches" or samples is None
        return samples if made else math.ceil(samples / 4)

    with safetensors.safe_open(kept.save(path), "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    state = json.loads(metadata["state"])
    place = dict(state["position"]["dict"])
    place["batch"], place["length"] = counted(place.pop("read")), counted(place["length"])
    del place["unit"]
    state["position"]["dict"] = [[name, value] for name, value in place.items()]
    text = json.dumps(state)
    metadata |= {"ortlab": "1", "state": text, "sha256": _digest(1, text, tensors)}
    safetensors.torch.save_file(tensors, path, metadata)
    return path


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_accumulation_and_what_is_left_of_an_epoch(stop: int, tmp_path: Path) -> None:
    values = {"gradient_accumulation_steps": 4, "lr_scheduler_type": "linear", "warmup_steps": 2}
    assert_goes_on(lambda: loader(shuffle=True), stop, tmp_path / "a.ckpt", **values)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb"])
def test_weights_that_do_not_lie_in_rows(optimizer: str, tmp_path: Path) -> None:
    """The fused optimizers process weights and their state in memory order."""

    def images() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(36, 3)
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    data = [(torch.randn(4, 2, 5, 5), torch.arange(4) % 3) for _ in range(4)]
    losses, weights, kept, _ = trained(data, stop=3, model=images(), optimizer=optimizer)
    assert kept is not None
    begin = Checkpoint.load(kept.save(tmp_path / "a.ckpt"))
    later, resumed, *_ = trained(data, begin, model=images(), optimizer=optimizer)
    assert later == losses[3:]
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


@pytest.mark.parametrize("eval_every", [None, 3])
def test_every_evaluation_is_made_once(eval_every: int | None, tmp_path: Path) -> None:
    """A checkpoint is taken before the evaluation that is due at the same step."""
    for stop in (6, 9):
        values = {"eval_steps": eval_every, "held_out": examples(6)}
        *_, kept, whole = trained(examples(22), stop=stop, **values)
        assert kept is not None
        *_, rest = trained(examples(22), kept, **values)
        evaluated = [(event.step, event.text) for event in whole.events("eval")]
        resumed = [(event.step, event.text) for event in rest.events("eval")]
        assert resumed == [each for each in evaluated if each[0] >= stop]
        assert resumed[0][0] == (stop if eval_every or stop == 6 else 12)


class Unmeasured:
    """Batches in an order drawn from torch's own generator, without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(loader(shuffle=True))


@pytest.mark.parametrize(
    "data", [lambda: loader(shuffle=True, generator=generator()), Unmeasured, lambda: examples(22)]
)
def test_a_run_that_is_over_goes_on_with_more_epochs(
    data: Callable[[], Any], tmp_path: Path
) -> None:
    def at_the_end(epochs: int, begin: Checkpoint | None = None) -> tuple[list[float], Checkpoint]:
        settings = FinetuneSettings.of(
            engine="eager",
            device="cpu",
            lr=0.05,
            num_train_epochs=epochs,
            lr_scheduler_type="constant",
        )
        recorder = Recorder()
        course = trainer.Trainer(
            Eager().prepare(network(), functional.cross_entropy, settings),
            data_loading.batches(data(), settings),
            settings,
            control=Control(),
            recorder=recorder,
            begin=begin,
        )
        for _ in course.steps():
            pass
        recorder.close()
        return recorder.rows()[:, INDEX["loss"]].tolist(), course.state()

    whole, _ = at_the_end(3)
    first, ended = at_the_end(2)
    second, _ = at_the_end(3, Checkpoint.load(ended.save(tmp_path / "a.ckpt")))
    assert first + second == whole
    nothing, _ = at_the_end(2, ended)
    assert nothing == []


def test_the_state_in_a_paused_evaluation_is_that_between_two_steps(tmp_path: Path) -> None:
    settings = FinetuneSettings.of(
        engine="eager", device="cpu", lr=0.05, num_train_epochs=2, batch_size=4
    )
    control, recorder = Control(), Recorder()

    class Pausing(Dataset[Any]):
        """Requests a pause when it is evaluated after the first epoch."""

        read = 0

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            Pausing.read += 1
            torch.rand(1)
            if Pausing.read == 9:
                control.pause()
            return examples()[index]

    course = trainer.Trainer(
        Eager().prepare(network(), functional.cross_entropy, settings),
        data_loading.batches(examples(22), settings),
        settings,
        control=control,
        recorder=recorder,
        evaluation=data_loading.batches(Pausing(), settings, evaluation=True),
    )
    thread = threading.Thread(target=lambda: [None for _ in course.steps()])
    thread.start()
    while not control.waiting:
        assert thread.is_alive()
    taken = control.checkpoint().result(timeout=HANGS_S)
    control.resume()
    thread.join(HANGS_S)
    recorder.close()
    assert not thread.is_alive()
    assert (taken.position.step, taken.position.evaluated) == (6, 0)
    values = {"num_train_epochs": 2, "lr_scheduler_type": "linear"}
    later, *_ = trained(examples(22), taken, **values)
    whole, *_ = trained(examples(22), **values)
    assert later == whole[6:] == recorder.rows()[6:, INDEX["loss"]].tolist()


# --- checkpoints that do not fit


def kept_at(step: int, data: Any = None) -> Checkpoint:
    *_, kept, _ = trained(examples(22) if data is None else data, stop=step)
    assert kept is not None
    return kept


@pytest.mark.parametrize(
    ("values", "data", "message"),
    [
        ({"seed": 5}, None, r"seed=5 does not match the checkpoint, which has seed=0"),
        ({"optimizer": "sgd"}, None, r"optimizer='sgd' .* which has optimizer='adamw'"),
        ({}, examples(50), r"the data has 50 samples per epoch, but the checkpoint's had 22 s"),
        ({}, Stream(), "has an unknown number of samples per epoch"),
        (
            {},
            DataLoader(examples(22)),
            "data has 22 micro-batches per epoch, .* had 22 samples",
        ),
    ],
)
def test_a_run_that_cannot_go_on(values: dict[str, Any], data: Any, message: str) -> None:
    kept = kept_at(3)
    with pytest.raises(ValueError, match=message):
        trained(examples(22) if data is None else data, kept, **values)


def test_a_loader_that_draws_otherwise() -> None:
    kept = kept_at(3, loader(shuffle=True))
    with pytest.raises(ValueError, match=r"has 1 generators of its own, .* had 0"):
        trained(loader(shuffle=True, generator=generator()), kept)


def test_data_that_ends_before_the_place() -> None:
    kept = kept_at(4, loader(Stream()))
    with pytest.raises(ValueError, match=r"ended after 2 micro-batches, .* taken after 4"):
        trained(iter(list(loader())[:2]), kept, num_train_epochs=1)


def changed(**layers: nn.Module) -> nn.Module:
    model = network()
    for name, layer in layers.items():
        setattr(model, name, layer)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: nn.Sequential(nn.Linear(4, 8), *network()[1:]),
            r"0\.weight is float32\[16, 4\] in the checkpoint and float32\[8, 4\] in the model",
        ),
        (lambda: changed(more=nn.Linear(1, 1)), r"more\.weight is not in the checkpoint"),
        (lambda: network()[:4], r"4\.weight is not in the model, 4\.bias is not in the model;"),
        (
            lambda: network().to(torch.bfloat16),
            r"0\.weight is float32\[16, 4\] .* bfloat16\[16, 4\] in the model, .*, and \d+ more",
        ),
        (
            lambda: frozen(),
            r"optimizer has groups of \[2, 4\] parameters, and this one of \[1, 1\]",
        ),
    ],
)
def test_another_model_is_refused_before_anything_changes(
    model: Callable[[], nn.Module], message: str
) -> None:
    kept, other = kept_at(3), model()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        trained(examples(22), kept, model=other)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())


def frozen() -> nn.Module:
    model = network().requires_grad_(False)
    model[4].requires_grad_(True)
    return model


def test_an_optimizer_state_of_other_shapes_is_refused() -> None:
    kept = kept_at(3)
    state = {**kept.optimizer["state"]}
    state[0] = {**state[0], "exp_avg": torch.zeros(3, 3)}
    settings = FinetuneSettings.of(engine="eager", device="cpu")
    stepper = Eager().prepare(network(), functional.cross_entropy, settings)
    with pytest.raises(
        ValueError, match=r"exp_avg of shape \[3, 3\] for 0\.weight, whose shape is \[16, 4\]"
    ):
        stepper.load_state_dict(
            {"model": kept.model, "optimizer": {**kept.optimizer, "state": state}}
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"state": {99: {"exp_avg": torch.zeros(3)}}},
        {"state": {"a": {}}},
        {"state": {0: 3}},
        {"state": [1]},
        {"state": None},
        {"param_groups": None},
        {"param_groups": [1]},
        {"param_groups": [{"params": 3}]},
        {"param_groups": [{}]},
    ],
)
def test_an_optimizer_state_that_no_optimizer_has_is_refused(changes: dict[str, Any]) -> None:
    kept = kept_at(3)
    settings = FinetuneSettings.of(engine="eager", device="cpu")
    stepper = Eager().prepare(network(), functional.cross_entropy, settings)
    told = (
        "optimizer (state is not in torch's format|has state for parameter .*, but there are only "
        "6 parameters); use"
    )
    with pytest.raises(ValueError, match=told):
        stepper.load_state_dict({"model": kept.model, "optimizer": {**kept.optimizer, **changes}})


def test_loading_leaves_the_checkpoint_as_it_is() -> None:
    kept = kept_at(3)
    before = kept.copy()
    first, *_ = trained(examples(22), kept)
    second, *_ = trained(examples(22), kept)
    assert first == second
    for name, value in before.optimizer["state"][0].items():
        assert torch.equal(kept.optimizer["state"][0][name], value), name


def test_other_settings_hold_from_there_on() -> None:
    kept = kept_at(3)
    *_, recorder = trained(examples(22), kept, lr=0.01, weight_decay=0.5, num_train_epochs=1)
    assert recorder.rows()[:, INDEX["lr"]].tolist() == pytest.approx([0.01] * 3)
    whole, *_ = trained(examples(22))
    decayed, *_ = trained(examples(22), kept, weight_decay=0.9, lr=0.05)
    assert decayed[0] == whole[3]
    assert decayed[2:] != whole[5:]


# --- runs and finetune


CHOSEN = {"loss": "cross_entropy", "engine": "eager", "device": "cpu", "batch_size": 4}


def column(run: Run, name: str = "loss") -> list[float]:
    values: list[float] = run.recorder.rows()[:, INDEX[name]].tolist()
    return values


def test_a_checkpoint_in_a_pause_and_a_run_from_it(home: Path) -> None:
    model = Gated(turns=4)
    run = ortlab.finetune(
        model, examples(22), num_train_epochs=3, eval_dataset=examples(6), **CHOSEN
    )
    model.turns.pause(run, 5)
    path = run.checkpoint(home / "a.ckpt")
    assert run.state == "paused"
    assert path == home / "a.ckpt"
    run.resume()
    model.turns.give()
    run.result()
    other = Gated(turns=0)
    resumed = ortlab.finetune(other, examples(22), resume_from=path, eval_dataset=examples(6))
    until(lambda: resumed.step == 5)
    assert resumed.status().left_s is None  # it has made no step yet to estimate from
    other.turns.give()
    result = resumed.result()
    assert (resumed.settings, result.steps) == (run.settings, 18)
    assert column(resumed, "step") == list(range(6, 19))
    assert column(resumed) == column(run)[5:]
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    notes = [event.text for event in resumed.recorder.events("note")]
    assert notes == ["continues a.ckpt from step 5"]


def test_a_run_says_which_run_it_continues(home: Path) -> None:
    chosen = {**CHOSEN, "max_steps": 4, "save_steps": 2, "keep_checkpoints": 9}
    first = ortlab.finetune(network(), examples(22), **chosen)
    first.result()
    (early,) = [each.path for each in first.checkpoints if "2" in each.name]
    for given, step in ((first, 4), (first.name, 4), (early, 2)):
        run = ortlab.finetune(
            network(), examples(22), eval_dataset=examples(6), resume_from=given, max_steps=6
        )
        run.result()
        told = f"continues {first.name} from step {step}"
        assert run.resumed == run.status().lines[0] == told
        assert not [line for line in run.status().lines if "before training" in line]
        assert SavedRun(run.folder).status().lines[0] == told
        assert told in {event.text for event in run.recorder.events("note")}
        (entry,) = [each for each in ortlab.list_runs() if each.name == run.name]
        assert (entry.resumed, entry.continues) == (told, "")
        assert f"{run.name}: {told}" in repr(ortlab.status())
        assert told in repr(ortlab.list_runs())
    taken = Checkpoint.load(early)
    run = ortlab.finetune(network(), examples(22), resume_from=taken, max_steps=3)
    run.result()
    assert run.status().lines[0] == "resumed from a checkpoint at step 2"
    assert not first.resumed


def test_a_checkpoint_waits_for_the_step_in_flight(home: Path) -> None:
    model = Gated(turns=2)
    run = ortlab.finetune(model, examples(22), **CHOSEN)
    model.turns.until_asked(3)
    paths: list[Path] = []
    asking = [threading.Thread(target=lambda: paths.append(run.checkpoint())) for _ in range(2)]
    for thread in asking:
        thread.start()
    until(lambda: len(run._control._asked) == 2)
    assert not paths
    model.turns.give(1)
    for thread in asking:
        thread.join(HANGS_S)
    assert paths == [run.folder / "checkpoints" / "step-3.safetensors"] * 2
    assert Checkpoint.load(paths[0]).position.step == 3
    model.turns.give()
    run.result()


def test_a_run_that_is_over_has_its_checkpoint(home: Path) -> None:
    run = ortlab.finetune(network(), examples(22), num_train_epochs=2, **CHOSEN)
    run.result()
    final = run.checkpoint()
    assert final == run.folder / "checkpoints" / "final.safetensors"
    copied = Checkpoint.load(run.checkpoint(home / "copy.ckpt"))
    assert copied.position.step == 12
    model = network()
    more = ortlab.finetune(
        model, examples(22), resume_from=final, num_train_epochs=3, learning_rate=0.01
    )
    assert more.result().steps == 18
    assert column(more, "step") == list(range(13, 19))
    assert more.settings.optim.learning_rate == 0.01


def test_a_run_that_was_stopped_goes_on(home: Path) -> None:
    model = Gated(turns=3)
    run = ortlab.finetune(model, examples(22), **CHOSEN)
    model.turns.until_asked(4)
    run.stop()
    model.turns.give()
    assert run.result().steps == 4
    rest = ortlab.finetune(Gated(turns=1000), examples(22), resume_from=run.checkpoint())
    assert rest.result().steps == 6
    whole = ortlab.finetune(Gated(turns=1000), examples(22), **CHOSEN)
    whole.result()
    assert column(run) + column(rest) == column(whole)


def test_a_run_that_failed_goes_on_after_the_batch_that_was_bad(home: Path) -> None:
    data = [(torch.randn(4, 4), torch.arange(4) % 3) for _ in range(5)]
    bad = (torch.full((4, 4), math.nan), torch.arange(4) % 3)
    chosen = {**CHOSEN, "batch_size": 16, "lr_scheduler_type": "constant"}
    run = ortlab.finetune(network(0.0), [*data[:2], bad, *data[2:]], **chosen)
    with pytest.raises(NotFinite):
        run.result()
    rest = ortlab.finetune(network(0.0), [*data[:2], bad, *data[2:]], resume_from=run.checkpoint())
    rest.result()
    clean = ortlab.finetune(network(0.0), data, **chosen)
    clean.result()
    assert column(rest, "step") == [3, 4, 5]
    assert column(rest) == column(clean)[2:]


def test_a_run_that_never_began_has_no_checkpoint(home: Path) -> None:
    def fails(_: FinetuneSettings) -> Stepper:
        raise RuntimeError("no compiler")

    settings = FinetuneSettings.of(engine="eager", device="cpu")
    run = Run(network(), fails, examples(), settings=settings)
    with pytest.raises(RuntimeError, match=r"was not started: call run.start\(\) first"):
        run.checkpoint()
    run.start()
    with pytest.raises(RuntimeError, match="has no checkpoint: it failed at step 0"):
        run.checkpoint()


def test_a_checkpoint_chooses_no_files_and_leaves_out_no_check(home: Path) -> None:
    of_others = {
        "save_onnx": str(home / "written"),
        "self_check": False,
        "memory_plans": str(home / "plans.json"),
        "tuning_results": str(home / "tuned"),
        "skip_checks": "disabled",
    }
    declared = FinetuneSettings.declarations()
    assert {name for name, each in declared.items() if each.here} == set(of_others)
    kept = kept_at(3)
    kept = dataclasses.replace(kept, settings=kept.settings | of_others | {"learning_rate": 0.03})
    path = kept.save(home / "a.ckpt")
    run = ortlab.finetune(
        *(network(), examples(22)), resume_from=path, loss="cross_entropy", tuning_results="mine"
    )
    run.result()
    held = {name: run.settings[name] for name in of_others}
    own = {name: declared[name].default for name in of_others}
    assert held == own | {"tuning_results": "mine"}
    assert run.settings.optim.learning_rate == 0.03
    (told,) = [event.text for event in run.recorder.events("warning") if "restore" in event.text]
    assert told.startswith("self_check=True, not False; ")
    assert told.endswith(
        ": a checkpoint does not restore self_check, save_onnx, memory_plans, skip_checks; "
        "give the value you want"
    )
    assert told in run.status().badges


def test_what_finetune_refuses_leaves_no_run(home: Path) -> None:
    path = kept_at(3).save(home / "a.ckpt")
    with pytest.raises(
        ValueError, match=r"does not match the model: 0\.weight is not in the model"
    ):
        ortlab.finetune(nn.Linear(4, 3), examples(22), loss="mse", resume_from=path)
    with pytest.raises(ValueError, match=r"seed=4 does not match the checkpoint, which has seed=0"):
        ortlab.finetune(network(), examples(22), loss="mse", resume_from=path, seed=4)
    with pytest.raises(ValueError, match="there is no checkpoint at none"):
        ortlab.finetune(network(), examples(22), loss="mse", resume_from="none")
    mine = dataclasses.replace(kept_at(3), settings={**kept_at(3).settings, "loss": "mine"})
    with pytest.raises(ValueError, match=r"loss is a function called 'mine', .* once more: loss="):
        ortlab.finetune(network(), examples(22), resume_from=mine)
    assert not (home / "runs").exists()


@pytest.mark.parametrize("to", ["compile", "ort", "ortmodule"])
def test_another_engine_goes_on_where_eager_stopped(home: Path, to: str) -> None:
    needs(to)
    # Batches of one size: four micro-batches of five.
    *_, kept, _ = trained(examples(20), stop=5, model=network(0.0), batch_size=5)
    whole, *_ = trained(examples(20), model=network(0.0), batch_size=5)
    assert kept is not None
    run = ortlab.finetune(
        network(0.0), examples(20), resume_from=kept, engine=to, loss="cross_entropy"
    )
    run.result()
    assert run.engine_used == to
    assert column(run) == pytest.approx(whole[5:], rel=1e-4)
