"""The public functions: each a few lines over the session of this process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from ortlab.engines import doctor, wrapped_models
from ortlab.plan import zero_memory
from ortlab.session import session
from ortlab.settings import (
    EngineSettings,
    HistorySettings,
    PruneSettings,
)
from ortlab.utils import hardware
from ortlab.utils.errors import brief
from ortlab.utils.tables import Column, Table

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from ortlab.checkpoint.checkpoint import Checkpoint
    from ortlab.cluster.workers import Workers
    from ortlab.deploy.exported import Exported
    from ortlab.deploy.on_device_training import TrainingArtifacts
    from ortlab.deploy.torchrun_script import Script
    from ortlab.engines.base import LossFunction
    from ortlab.engines.doctor import Fact
    from ortlab.graph.capture import Graphs
    from ortlab.graph.memory import MemoryPlan
    from ortlab.graph.profile import Profile
    from ortlab.graph.recompute import RecomputePlans
    from ortlab.history.comparison import RunComparison
    from ortlab.history.listing import History
    from ortlab.history.prune import Pruning
    from ortlab.history.run_files import StoredRun
    from ortlab.history.saved_run import SavedRun
    from ortlab.plan.zero_memory import ZeroPlan
    from ortlab.search.race import Race
    from ortlab.search.tune import Tune
    from ortlab.training.run import Run
    from ortlab.training.tracker import Tracker
    from ortlab.utils.findings import Finding


B = TypeVar("B")
"""A batch, whatever a loader gives."""
_SIGNS: Final = {True: "ok", False: "MISSING", None: "-"}


_FINDING_COLUMNS: Final[tuple[Column[Finding], ...]] = (
    Column("check", lambda finding: finding.name),
    Column("", lambda finding: _SIGNS[finding.ok]),
    Column("found", lambda finding: finding.found),
    Column("what to do", lambda finding: finding.fix),
)


_FACT_COLUMNS: Final[tuple[Column[Fact], ...]] = (
    Column("", lambda fact: fact.what),
    Column("here", lambda fact: fact.found),
)


@brief
def wrap(model: nn.Module, **settings: Any) -> nn.Module:
    """`model` as an engine executes it, ORTModule unless ``engine=`` says otherwise.

    The result behaves as the model does and shares its parameters: bind it to the model's name and
    train on. The settings are those of `ortlab.settings.EngineSettings`. ValueError for what cannot
    be wrapped, `ortlab.engines.base.EngineUnavailable` where the engine cannot run.
    """
    return session.wrapped.wrap(model, EngineSettings.of(settings))


@brief
def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside the wrapped `model`.

    In a notebook every name that held the wrapper holds the module again.
    """
    return session.wrapped.unwrap(model)


def models() -> Table[wrapped_models.ModelRow]:
    """The wrapped models: engine asked for and used, device, precision, size, time to export.

    Below them which could not be checked, and what ``%%ort`` left as it was, and why.
    """
    return session.wrapped.table()


@brief
def graphs(model: nn.Module, batch: Any = None) -> Graphs:
    """The graphs that ORT made of the wrapped `model`, stage by stage; nothing is trained for it.

    ``graphs(model).gradient`` is one of them, ``graphs(model).diff("exported", "forward")`` what
    became of the operators. What `profile` measured of the model goes with them. A model that was
    not called yet is exported for `batch`: a dictionary, a tuple or a tensor. ValueError where it
    is not wrapped in engine ort, or neither called nor given a batch.
    """
    return session.graphs(model, batch)


@brief
def memory_plan(model: nn.Module, batch: Any = None, *, optimizer: str = "adamw") -> MemoryPlan:
    """What a training step of the wrapped `model` takes of memory, for any batch; nothing is run.

    ``memory_plan(model).peak_bytes(batch=32, seq=256)`` is the peak, with parameters, gradients and
    the state of the `optimizer` ("adamw" or "sgd"); ``.max_batch("16GiB", seq=256)`` the largest
    batch that fits; ``.dims`` are the names of the sizes. `batch` is as in `graphs`.
    """
    return session.memory_plan(model, batch, optimizer=optimizer)


@brief
def recompute_plans(
    model: nn.Module, batch: Any = None, *, optimizer: str = "adamw"
) -> RecomputePlans:
    """What the backward pass of the wrapped `model` could compute again, and what that saves.

    ``recompute_plans(model).measure()`` times what it costs, ``.at(batch=32)`` is for other sizes,
    ``.choose("layers")`` lets a plan hold from the next step on, ``.least_time("2GiB")`` names the
    cheapest that fits. `batch` is as in `graphs`. ValueError where the model is not wrapped in
    engine ort, or has no graph of a training step yet.
    """
    return session.recompute_plans(model, batch, optimizer=optimizer)


@brief
def profile(model: nn.Module, batch: Any = None, **settings: Any) -> Profile:
    """What a step of the wrapped `model` takes: by phase, module, operator and node, beside torch.

    `batch` is what the model takes: a dictionary, a tuple or a tensor; without it made-up values in
    the form of the last call. ``steps=5`` is how many steps are timed. Forward and backward from
    the model's own loss, or from all its outputs, in sessions of its own, without the optimizer;
    under `torch.autocast` where the model trains so. A model in evaluation mode is called alone.
    Weights, ``.grad``, buffers and random states stay as they are; meanwhile there is a second
    session, with the memory that it takes. ValueError where the model is not wrapped in engine ort,
    is in training in a run, or the batch does not fit.
    """
    return session.profile(model, batch, **settings)


@brief
def list_runs(**settings: Any) -> History:
    """The runs that are kept, of this process and all others: what ``%ort runs`` shows.

    `settings` are those of `HistorySettings`: ``sort="loss"``, ``engine="ort"``,
    ``state="finished"``, ``model="Bert"``, ``tag="paper"``, ``limit=50``. It is a sequence of
    `ortlab.history.entry.RunEntry`, the runs of this process that go on first; metrics are not
    read. ValueError for an unknown setting.
    """
    return session.history(**settings)


@brief
def open_run(run: str | int) -> Run | SavedRun:
    """A run by its name or number (3 is that of "run-3"): its numbers, charts and notes.

    One of this process is the run itself; any other is read from its folder. Both have
    ``to_frame()``, ``metrics``, ``notes``, ``tags``, ``checkpoints``, ``environment``,
    ``to_tensorboard(folder)`` and ``to_mlflow()``. ValueError where there is none.
    """
    return session.open_run(run)


@brief
def compare_runs(*runs: str | int | StoredRun) -> RunComparison:
    """Two to eight runs side by side: curves, and what differs in settings, versions and results.

    By names or numbers, of this process or of the history. ValueError where one is not found.
    """
    return session.compare_runs(*runs)


@brief
def prune_runs(
    *,
    older_than: str | None = None,
    keep: int | None = None,
    max_size: str | None = None,
    yes: bool = False,
    **filters: Any,
) -> Pruning:
    """Removes old runs: those that began longer ago than ``"30d"``, beyond the newest `keep`, or
    beyond the size that the newest take together.

    Without `yes` nothing is removed, and what would go is shown. `filters` (engine, state, model,
    tag) choose which runs are looked at. Runs in training, in any process, stay. ValueError where
    nothing says what is to go.
    """
    from ortlab.history.prune import prune  # heavy: numpy

    given = {"older_than": older_than, "keep": keep, "max_size": max_size, "yes": yes}
    return prune(PruneSettings.of(given), HistorySettings.of(filters))


def check_setup() -> Table[Finding]:
    """What this machine has, what it lacks for ORTModule and the charts, and how to mend it."""
    findings = doctor.checks()
    return Table(
        findings,
        _FINDING_COLUMNS,
        notes=[f"ORTModule {'can' if doctor.can_run(findings) else 'cannot'} run here"],
    )


def device() -> Table[Fact]:
    """Where this kernel computes: processor, threads, memory and its limits, GPUs, engines."""
    facts = doctor.facts()
    return Table(facts, _FACT_COLUMNS, notes=hardware.advice())


@brief
def finetune(
    model: nn.Module,
    train: Iterable[Any],
    *,
    eval_data: Iterable[Any] | None = None,
    loss: str | LossFunction | None = None,
    resume_from: str | int | Path | Checkpoint | StoredRun | None = None,
    hold: bool | None = None,
    **settings: Any,
) -> Run:
    """Trains `model` in the background, in place, and returns the `Run` at once.

    `train` and `eval_data` are loaders, datasets or any iterables of batches. `loss` is a function
    ``loss(output, target)`` or a name of `ortlab.settings.LOSSES`; without it the model returns its
    own. The other settings are those of `ortlab.settings.FinetuneSettings`; a wrapped model runs on
    own engine unless ``engine=`` is given. In a notebook ``await run``, in a script
    ``run.result()``; both raise what the run raised.

    With `hold`, as in a notebook, a run is not ended by data that raises, by numbers that are not
    finite, or by memory that does not suffice: it waits as in a pause, the wait for it raises the
    error with what to do, and ``run.resume()`` goes on. Without, as in a script, it ends there with
    the last good weights. Before a first step is done there is nothing to keep, and what is wrong
    with data or numbers ends it anyhow; so it does where data can be read only once.

    `resume_from` is the file of a checkpoint (``run.checkpoint()`` writes one, and each run ends
    with ``checkpoints/final.safetensors`` in its folder), or a run, by its name, number or folder:
    of that the newest checkpoint that is whole. The run goes on there, with the same
    settings where no others are given (but for those that name files or leave out a check, which
    are this session's own), on the same data (see `ortlab.training.data_loading.batches` for how
    its place is found again). Weights and losses are, to the last bit, those of the run that took
    it and went on, where the engine computes with the same kernels. ValueError for a file that is
    damaged or foreign, and for another model, optimizer, order or amount of data.
    """
    return session.finetune(
        model,
        train,
        eval_data=eval_data,
        loss=loss,
        resume_from=resume_from,
        hold=hold,
        **settings,
    )


@brief
def resume(
    run: str | int | StoredRun,
    model: nn.Module | None = None,
    train: Iterable[Any] | None = None,
    *,
    eval_data: Iterable[Any] | None = None,
    loss: str | LossFunction | None = None,
    **settings: Any,
) -> Run:
    """Lets a run go on: one that is paused, or one of the history that did not finish.

    The latter, whose kernel died or that was stopped or failed, goes on as a new run, from the
    newest checkpoint that is whole; it has the numbers up to there and is linked with it. Model,
    data and loss are what the user calls as they were called then, where they are not given; they
    may be on another engine (``engine=``). ValueError says which name is missing, and where model,
    data or loss do not fit, as `finetune` does.
    """
    return session.resume(run, model, train, eval_data=eval_data, loss=loss, **settings)


@brief
def race(
    model: nn.Module,
    data: Iterable[Any],
    *,
    loss: str | LossFunction | None = None,
    **settings: Any,
) -> Race:
    """Trains copies of `model` in several set-ups side by side, in the background: a `Race`.

    ``engines="eager,ort"`` and ``precisions="fp32,bf16"`` say which; ``preset="examples"`` is
    another field. The other settings are those of `ortlab.settings.RaceSettings`, and those of a
    run that all set-ups share (``batch_size``, ``lr``, ORT's options). `data` and `loss` are as in
    `finetune`; what can be read only once is refused. In a notebook ``await race``, in a script
    ``race.result()`` waits for the `ortlab.search.result.RaceResult`; ``race.stop()`` and an
    interrupt end it with what was measured. ``ortlab.finetune(model, data, **race.settings)``
    trains with the best, ``race.apply()`` has it hold in the model's run, or in its next ones.

    The model stays as it is; meanwhile there is a copy of it for each set-up, with gradients and
    optimizer. What torch.compile has in memory is dropped. ValueError where something is in
    training just now, or for what `finetune` refuses; a set-up that cannot run says why in its row.
    """
    return session.race(model, data, loss=loss, **settings)


@brief
def tune(
    model: nn.Module,
    data: Iterable[Any],
    *,
    loss: str | LossFunction | None = None,
    **settings: Any,
) -> Tune:
    """Searches the settings that train `model` fastest here, in the background: a `Tune`.

    Engine, precision and micro-batch at a fixed ``global_batch`` (with accumulation for the rest),
    and recomputation where a micro-batch does not fit into ``memory="16GiB"``, or into what is
    free. What cannot fit by its memory plan is skipped, what cannot win is left out early; see
    `ortlab.search.prune`. Micro-batches are searched for a Dataset; a loader keeps its own batches.
    ``target="tokens"`` counts tokens in the place of samples. The other settings are those of
    `ortlab.settings.TuneSettings`, and those of a run that all candidates share. ``await tune`` or
    ``tune.result()`` waits for the `ortlab.search.result.TuneResult`;
    ``ortlab.finetune(model, data, **tune.settings)`` trains with the best, ``tune.apply()`` has it
    hold in the model's next runs. The model stays as it is. ValueError as in `race`.
    """
    return session.tune(model, data, loss=loss, **settings)


@brief
def workers(count: int | None = None, *, profile: str | None = None) -> Workers:
    """`count` processes that train together, on this machine or where an ipyparallel profile says.

    They are started, or those that run are given again where number and profile are the same; with
    others they end and are started anew. Without `count` those that run. ``workers(2).run(f, x)``
    calls ``f(x)`` on both, by value; see `ortlab.cluster.workers.Workers`. ValueError for no number
    where none run, RuntimeError where they cannot be started: without ipyparallel it says how to
    install it.
    """
    if count is not None:
        return session.start_workers(count, profile=profile)
    if session.workers is None:
        raise ValueError("there are no workers yet; %ort workers 2, or ortlab.workers(2)")
    return session.workers


@brief
def track(loader: Iterable[B], *, name: str | None = None) -> Tracker[B]:
    """Iterates over `loader` and shows the user's own training loop, live.

    The loss is what ``t.log(loss=...)`` is given, or the scalar that ``backward`` is called on.
    """
    return session.track(loader, name=name)


@overload
def export(
    model: nn.Module,
    path: str | Path,
    batch: Any = None,
    *,
    second: Any = None,
    eval_data: Iterable[Any] | None = None,
    trainable: None = None,
    **settings: Any,
) -> Exported: ...


@overload
def export(
    model: nn.Module,
    path: str | Path,
    batch: Any = None,
    *,
    trainable: str | Sequence[str],
    loss: str | LossFunction | None = None,
    optimizer: str = "adamw",
    weight_decay: float = 0.0,
) -> TrainingArtifacts: ...


@brief
def export(
    model: nn.Module,
    path: str | Path,
    batch: Any = None,
    *,
    second: Any = None,
    eval_data: Iterable[Any] | None = None,
    trainable: str | Sequence[str] | None = None,
    loss: str | LossFunction | None = None,
    optimizer: str = "adamw",
    weight_decay: float = 0.0,
    **settings: Any,
) -> Exported | TrainingArtifacts:
    """Writes the graph of `model` for inference into the folder `path`, and says how far it is off.

    `model` may be wrapped or not; it is exported as it evaluates (dropout gone, BatchNorm by its
    running statistics) and stays in the mode that it is in. `batch` is an example of what it is
    called with: a dictionary, a tuple, a tensor, or a loader, whose first batch it is; without it
    the last one that ortlab saw for this model. Labels are left out. Inputs are called as forward's
    parameters, outputs as the fields of the model's result, weights as in its state_dict.

    Sizes that may vary are those in which a `second` batch differs, or else those that eager torch
    takes otherwise. Before anything is done the file is run in onnxruntime beside torch: on the
    example, random values, each other size, padded rows, and values at the ends of their range.
    `ortlab.deploy.check.CheckFailed` names the output that is off by more than 1e-4 of its size
    (1e-2 where parameters have 16 bits); a size at which the graph alone is wrong is fixed in it,
    with a note.

    ``fp16=True`` and ``int8=True`` write further files, whose difference is told, and with labelled
    `eval_data` their accuracy beside torch's. ``opset=17`` is the version of ONNX's operators, 14
    to 20; ``external_data=True`` writes the weights into a file of their own, as is done for those
    of 2 GiB and more. The folder appears when all is checked; one that holds an earlier export
    alone is replaced.

    With `trainable`, names of parameters or patterns such as "classifier.*" (or "*"), the folder
    gets what ORT's on-device training API trains those with instead: graphs of a training step, of
    an evaluation and of the `optimizer` ("adamw" as torch has it, or "sgd"), and the weights. The
    `batch` has the labels then, and `loss` is a name or a function where the model has none of its
    own. Loss and gradients are compared with eager torch's before it is done.

    ValueError for what cannot be exported as it is given, `NotInGraph` (a RuntimeError) where
    forward does what no graph can, RuntimeError where the folder cannot be written.
    """
    from ortlab.deploy import inference  # heavy: onnx

    return inference.export(
        session,
        model,
        path,
        batch,
        second=second,
        eval_data=eval_data,
        trainable=trainable,
        loss=loss,
        optimizer=optimizer,
        weight_decay=weight_decay,
        **settings,
    )


@brief
def script(
    model: nn.Module,
    data: Iterable[Any] | None = None,
    *,
    to: str | Path = "standalone",
    make_model: str | None = None,
    make_data: str | None = None,
    loss: Any = None,
    **settings: Any,
) -> Script:
    """Writes the fine-tuning of `model` on `data` as a plain script into the folder `to`.

    Stages 0 and 1 of ZeRO are torch's (DistributedDataParallel, ZeroRedundancyOptimizer), 2 and 3
    DeepSpeed's; the other settings are those of `finetune`. ``train.py`` has the source of classes
    and functions that cells define, ``model.safetensors`` the weights. A model of transformers, a
    Sequential of torch's layers and a class without arguments are made anew by themselves; of
    another one `make_model` is the expression that makes it, as in ``"Net(6, 4)"``. A Dataset whose
    samples make batches, and a list of batches, are written beside the script, up to 1 GiB;
    `make_data` is an expression for other data, whose value is an iterable of batches of all
    processes together. What cannot be known is a line to fill in, and the `Script` says which.

    The script trains and writes ``trained.safetensors``; it evaluates nothing. ValueError for
    settings that it has no lines for, and for a folder that holds another script.
    """
    from ortlab.deploy import torchrun_script  # heavy: torch

    return torchrun_script.script(
        session,
        model,
        data,
        to=to,
        make_model=make_model,
        make_data=make_data,
        loss=loss,
        **settings,
    )


@brief
def zero_plan(model: str | int | nn.Module, **settings: Any) -> ZeroPlan:
    """What training `model` takes of each of ``gpus`` devices, at ZeRO's stages 0 to 3.

    `model` is a number of parameters (``"2.7B"``, ``350_000_000``) or a module, wrapped or not;
    ``memory="40GiB"`` marks what fits. Activations are counted where ``hidden``, ``layers``,
    ``sequence`` and ``batch`` are given, and for a model that engine ort has made a graph of. The
    other settings are those of `ortlab.settings.FleetSettings`. Nothing is run, and nothing is
    imported for a number. ValueError for what is no number of parameters, and for sizes without
    the others that they need.
    """
    return zero_memory.zero_plan(session, model, **settings)
