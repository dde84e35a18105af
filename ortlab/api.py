"""Public functions of ortlab, each a few lines over the session of this process."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack, overload

from ortlab.engines import doctor, wrapped_models
from ortlab.plan import result, zero_memory
from ortlab.session import session
from ortlab.settings import (
    EngineSettings,
    ExportSettings,
    FinetuneSettings,
    FleetSettings,
    HistorySettings,
    PlanSettings,
    ProfileSettings,
    PruneSettings,
    RaceSettings,
    TuneSettings,
)
from ortlab.settings.signatures import takes
from ortlab.utils import hardware
from ortlab.utils.errors import brief
from ortlab.utils.tables import Column, Table

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer

    from ortlab.checkpoint.checkpoint import Checkpoint
    from ortlab.cluster.checks import Elsewhere
    from ortlab.cluster.workers import Workers
    from ortlab.deploy.exported import Exported
    from ortlab.deploy.on_device_training import TrainingArtifacts
    from ortlab.deploy.torchrun_script import Script
    from ortlab.engines.base import LossFunction
    from ortlab.engines.doctor import Fact
    from ortlab.engines.step_check import StepCheck
    from ortlab.engines.torch.user_optimizer import OptimizerLike, SchedulerLike
    from ortlab.graph.capture import Graphs
    from ortlab.graph.memory import MemoryPlan
    from ortlab.graph.profile import Profile
    from ortlab.graph.recompute_plans import RecomputePlans
    from ortlab.graph.source_lines import SourceLines
    from ortlab.history.comparison import RunComparison
    from ortlab.history.listing import History
    from ortlab.history.prune import Pruning
    from ortlab.history.run_files import StoredRun
    from ortlab.history.saved_run import SavedRun
    from ortlab.metrics.user_metrics import Metrics
    from ortlab.plan.result import TrainingPlan
    from ortlab.plan.zero_memory import ZeroPlan
    from ortlab.search.race import Race
    from ortlab.search.tune import Tune
    from ortlab.settings.keywords import (
        EngineKeywords,
        ExportKeywords,
        FinetuneKeywords,
        FleetKeywords,
        HistoryKeywords,
        PlanKeywords,
        ProfileKeywords,
        RaceKeywords,
        ScriptKeywords,
        TuneKeywords,
    )
    from ortlab.training.callbacks import Callbacks
    from ortlab.training.data_loading import Collate
    from ortlab.training.kernel_status import KernelStatus
    from ortlab.training.loop_run import LoopRun
    from ortlab.training.run import Run
    from ortlab.training.tracker import Tracker
    from ortlab.utils.findings import Finding


B = TypeVar("B")
"""Type of a batch."""
_FORMER: Final = {"eval_data": "eval_dataset"}
"""Former name of an argument -> its name."""

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
@takes(EngineSettings.declarations().values())
def wrap(model: nn.Module, **settings: Unpack[EngineKeywords]) -> nn.Module:
    """Wrap a model so that an engine executes it.

    The result behaves like `model` and shares its parameters. Bind it to the model's name and
    train as before.

    Args:
        model: The model to wrap. It needs a parameter that requires a gradient.
        **settings: Settings of `ortlab.settings.EngineSettings`, such as ``engine="compile"``; the
            default engine, ``"auto"``, is ``"ortmodule"`` where that runs, ``"ort"`` where it does
            not or refuses the model, else eager torch.

    Returns:
        The wrapper. With ``engine="eager"`` it is the model itself.

    Raises:
        ValueError: If the model cannot be wrapped, or a setting is wrong.
        ortlab.engines.base.EngineUnavailable: If the engine cannot run on this machine.

    Example:
        >>> model = ortlab.wrap(model)
        >>> loss_function(model(x), y).backward()
    """
    return session.wrapped.wrap(model, EngineSettings.of(settings))


@brief
def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own module inside a wrapped model.

    In a notebook every name that is bound to the wrapper is bound to the module again. A warning
    names the containers and objects of the user that still refer to the wrapper.

    Args:
        model: A wrapped model.

    Raises:
        ValueError: If `model` is not wrapped.
    """
    original = session.wrapped.unwrap(model)
    if line := session.wrapped.still_wrapped(model, original):
        warnings.warn(line, stacklevel=3)
    return original


def models() -> Table[wrapped_models.ModelRow]:
    """Return a table of the wrapped models.

    A row shows the engine that was asked for and the one in use, device, precision, number of
    parameters, export time and the reason of a fallback. Notes below the table name what could not
    be checked, and the models that ``%%ort`` did not wrap, with the reasons.
    """
    return session.wrapped.table()


def status() -> KernelStatus:
    """Return the status of this kernel: its wrapped models, its runs, and how to go on.

    Returns:
        The status. ``status.models`` is the table of the wrapped models: engine asked for and used,
        graphs, segments that ORT and torch run with their shares of the time, fallback;
        ``status.runs`` that of the runs, races and searches: state, step, engine;
        ``status.workers`` a line about the workers. More about the models: `models`.
    """
    return session.status()


@brief
def check(model: nn.Module) -> StepCheck:
    """Compare the next call of a wrapped model with eager torch: one whole step, in any loop.

    The call is made in ORT, in eager torch and in eager torch with float64, with the same weights
    and random numbers; gradients are those of all outputs, weighted at random. Weights, ``.grad``,
    buffers and random states do not change. With engine ``"ort"``, an operator whose result is
    wrong runs in torch from then on. With engine ``"ortmodule"``, dropout is off. A call under
    ``torch.no_grad()`` is compared without gradients.

    Args:
        model: A model wrapped in engine ``"ort"`` or ``"ortmodule"``, or one that a run trains
            with them in this process.

    Returns:
        The check: ``check.passed``, ``check.verdict`` and ``check.differences`` once the call is
        made, and ``check.wait()`` for a run in the background.

    Raises:
        ValueError: If the model does not run in ORT.

    Example:
        >>> check = ortlab.check(model)
        >>> loss = model(x).sum()
        >>> check
    """
    return session.check(model)


@brief
def graphs(model: nn.Module, batch: Any = None) -> Graphs:
    """Return the graphs of a wrapped model that ORT runs, stage by stage.

    Nothing is trained for it. ``graphs(model).gradient`` is one of the graphs, and
    ``graphs(model).diff("gradient", "execution")`` shows how the operators changed. The last
    results of `profile` and `memory_plan` for the model are drawn over the graphs.

    Args:
        model: A model wrapped in engine ``"ort"`` or ``"ortmodule"``.
        batch: Input to make the graphs for if the model has not been called yet: a dictionary, a
            tuple or a tensor.

    Raises:
        ValueError: If the model is not wrapped in one of these engines, runs in eager torch, or has
            not been called and there is no batch.

    Example:
        >>> graphs = ortlab.graphs(model, batch)
        >>> graphs.diff("gradient", "execution")
    """
    return session.graphs(model, batch)


@brief
def memory_plan(model: nn.Module, batch: Any = None, *, optimizer: str = "adamw") -> MemoryPlan:
    """Return the memory that a training step of a wrapped model needs, for any batch size.

    Nothing is executed; the plan is computed from the graph. It counts parameters, gradients,
    activations and the state of the optimizer.

    Args:
        model: A model wrapped in engine ``"ortmodule"``.
        batch: Input to export the model for if it has not been called yet, as in `graphs`.
        optimizer: Optimizer whose state is counted, ``"adamw"`` or ``"sgd"``.

    Returns:
        The plan. ``plan.dims`` are the names of the sizes that may vary.

    Raises:
        ValueError: As for `graphs`.

    Example:
        >>> plan = ortlab.memory_plan(model)
        >>> plan.peak_bytes(batch=32, seq=256), plan.max_batch("16GiB", seq=256)
    """
    return session.memory_plan(model, batch, optimizer=optimizer)


@brief
def recompute_plans(
    model: nn.Module, batch: Any = None, *, optimizer: str = "adamw"
) -> RecomputePlans:
    """Return what the backward pass of a wrapped model could recompute, and the memory that saves.

    Args:
        model: A model wrapped in engine ``"ortmodule"``.
        batch: Input to export the model for if it has not been called yet, as in `graphs`.
        optimizer: Optimizer whose state is counted, ``"adamw"`` or ``"sgd"``.

    Returns:
        The plans. ``.at(batch=32)`` is for other sizes, ``.measure()`` times each plan,
        ``.least_time("2GiB")`` names the fastest that fits, and ``.choose("layers")`` applies a
        plan from the next step on. ``.subgraphs`` lists what ORT's own plans recompute.

    Raises:
        ValueError: If the model is not wrapped in engine ``"ortmodule"``, or has no graph of a
            training step yet.

    Example:
        >>> plans = ortlab.recompute_plans(model).at(batch=32)
        >>> plans.choose(plans.least_time("2GiB"))
    """
    return session.recompute_plans(model, batch, optimizer=optimizer)


@brief
@takes(ProfileSettings.declarations().values())
def profile(model: nn.Module, batch: Any = None, **settings: Unpack[ProfileKeywords]) -> Profile:
    """Time a training step of a wrapped model by phase, module, operator and line, next to torch.

    A step is forward and backward from the model's own loss, or from the sum of all its outputs,
    without the optimizer, and under `torch.autocast` if the model trains that way. A model in
    evaluation mode is only called. Weights, ``.grad``, buffers and random states do not change.
    The measurement uses sessions of its own, which need additional memory.

    Args:
        model: A model wrapped in engine ``"ortmodule"`` or ``"ort"``.
        batch: Input of the model: a dictionary, a tuple or a tensor. Without one, random values in
            the shapes of the last call are used.
        **settings: Settings of `ortlab.settings.ProfileSettings`; ``steps=5`` is the number of
            steps to time.

    Raises:
        ValueError: If the model is not wrapped in one of these engines, a run is training it, or
            the batch does not fit.

    Example:
        >>> profile = ortlab.profile(model, batch)
        >>> profile.by_module(depth=3)
    """
    return session.profile(model, batch, **settings)


@brief
@takes(ProfileSettings.declarations().values())
def lines(model: nn.Module, batch: Any = None, **settings: Unpack[ProfileKeywords]) -> SourceLines:
    """Return the code of a wrapped model, line by line, with time, saved memory and operators.

    Each line has the time of its operators and of their gradients in a step (see `profile`), the
    size of its results that are stored for the backward pass, and whether ORT or torch runs them.

    Args:
        model: A model wrapped in engine ``"ort"``, whose capture knows the lines.
        batch: Input of the model, as in `profile`.
        **settings: Settings of `ortlab.settings.ProfileSettings`; ``steps=5`` is the number of
            steps to time.

    Returns:
        The lines. ``.nodes("model.py:12")`` lists the operators of one.

    Raises:
        ValueError: If the model is not wrapped in engine ``"ort"`` or runs in eager torch, a run is
            training it, or the batch does not fit.

    Example:
        >>> ortlab.lines(model, batch)
    """
    return session.lines(model, batch, **settings)


@brief
@takes(HistorySettings.declarations().values())
def list_runs(**settings: Unpack[HistoryKeywords]) -> History:
    """Return the saved runs of this process and of all others.

    Args:
        **settings: Settings of `ortlab.settings.HistorySettings`, which sort and filter:
            ``sort="loss"``, ``engine="ortmodule"``, ``state="finished"``, ``model="Bert"``,
            ``tag="paper"``, ``limit=50``.

    Returns:
        A sequence of `ortlab.history.entry.RunEntry`, active runs of this process first. Metrics
        are not read.

    Raises:
        ValueError: If a setting is unknown or wrong.
    """
    return session.history(**settings)


@brief
def open_run(run: str | int) -> Run | SavedRun:
    """Open a run by its name or number.

    Args:
        run: Name of the run, or its number; 3 means "run-3".

    Returns:
        The run itself if it is one of this process, otherwise one that is read from its folder.
        Both have ``metrics``, ``notes``, ``tags``, ``checkpoints``, ``environment``,
        ``to_frame()``, ``to_tensorboard(folder)`` and ``to_mlflow()``.

    Raises:
        ValueError: If there is no such run.

    Example:
        >>> run = ortlab.open_run(3)
        >>> run.to_frame().plot("step", "loss")
    """
    return session.open_run(run)


@brief
def compare_runs(*runs: str | int | StoredRun) -> RunComparison:
    """Compare two to eight runs: their curves, settings, versions and results.

    Args:
        *runs: Names, numbers or runs, of this process or saved.

    Raises:
        ValueError: If a run is not found, or there are fewer than two or more than eight.

    Example:
        >>> ortlab.compare_runs(3, 5).differences
    """
    return session.compare_runs(*runs)


@brief
@takes(HistorySettings.declarations().values())
def prune_runs(
    *,
    older_than: str | None = None,
    keep: int | None = None,
    max_size: str | None = None,
    yes: bool = False,
    **filters: Unpack[HistoryKeywords],
) -> Pruning:
    """Remove old runs.

    A run is removed if any of `older_than`, `keep` and `max_size` selects it. Runs in training, in
    any process, are never removed.

    Args:
        older_than: Remove runs that started longer ago, such as ``"30d"`` or ``"8w"``.
        keep: Remove all but this many of the newest runs.
        max_size: Remove the oldest runs beyond this total size, such as ``"10GiB"``.
        yes: Remove the runs. By default the function only returns what would be removed.
        **filters: Settings of `ortlab.settings.HistorySettings` that select the runs to look at:
            ``engine``, ``state``, ``model``, ``tag``.

    Returns:
        The runs that were removed or, without `yes`, would be.

    Raises:
        ValueError: If neither `older_than`, `keep` nor `max_size` is given.
    """
    from ortlab.history.prune import prune  # heavy: numpy

    given = {"older_than": older_than, "keep": keep, "max_size": max_size, "yes": yes}
    return prune(PruneSettings.of(given), HistorySettings.of(filters))


def check_setup() -> Table[Finding]:
    """Return a table of checks: what this machine has, what it lacks and how to fix it."""
    findings = doctor.checks()
    return Table(
        findings,
        _FINDING_COLUMNS,
        notes=[f"ORT {'can' if doctor.can_run(findings) else 'cannot'} train here"],
    )


def device() -> Table[Fact]:
    """Return a table of what this kernel runs on: CPU, threads, memory limits, GPUs, engines."""
    facts = doctor.facts()
    return Table(facts, _FACT_COLUMNS, notes=hardware.advice())


@brief
@takes(FinetuneSettings.declarations().values(), renamed=_FORMER)
def finetune(
    model: nn.Module,
    train: Iterable[Any],
    *,
    eval_dataset: Iterable[Any] | None = None,
    loss: str | LossFunction | None = None,
    metrics: Metrics | None = None,
    callbacks: Callbacks | None = None,
    optimizer: OptimizerLike | None = None,
    lr_scheduler: SchedulerLike | None = None,
    collate_fn: Collate | None = None,
    resume_from: str | int | Path | Checkpoint | StoredRun | None = None,
    hold: bool | None = None,
    config: str | Path | None = None,
    fresh: bool = False,
    name: str | None = None,
    **settings: Unpack[FinetuneKeywords],
) -> Run:
    """Train a model in the background, in place, and return the run at once.

    In a notebook wait with ``await run``, in a script with ``run.result()``. Both raise the error
    that ended the run.

    Args:
        model: The model to train. A wrapped model runs on its own engine unless ``engine=`` is
            given.
        train: Training data: a loader, a dataset, or any iterable of batches.
        eval_dataset: Evaluation data, in the same forms.
        loss: A function ``loss(output, target)`` or one of the names in `ortlab.settings.LOSSES`;
            None if the model returns its own loss.
        metrics: Metrics of your own for each evaluation, one or several (a list, or a dict by
            name): functions ``(predictions, targets)`` that return a number or a dict of numbers,
            objects of torchmetrics, functions of scikit-learn's form ``(y_true, y_pred)``, or the
            ``compute_metrics`` of a Hugging Face Trainer. The predictions are the model's output,
            such as logits of shape [samples, classes], of all of ``eval_dataset``; scikit-learn's
            ``y_pred`` gets the classes. ``keep_best="f1"`` keeps the best checkpoint by one of
            them. A metric that raises is left out with a warning.
        callbacks: One or several objects with some of the methods of `ortlab.Callback`, such as
            ``on_evaluate(run)``, which the run calls between two steps.
        optimizer: Name of an optimizer (``"adamw"`` by default, ``"sgd"``, ``"lamb"``), or your
            own: a torch optimizer of the model's parameters, its class, or a function of the
            trainable parameters, such as ``functools.partial(torch.optim.SGD, lr=0.1)``. Its groups
            keep their options, and their learning rates, which ``lr_scheduler_type`` scales;
            ``learning_rate`` is that of the first group.
        lr_scheduler: A torch scheduler of your own, bound to that optimizer, or a class or function
            of the optimizer. It is stepped after each optimizer step; one that needs a metric, such
            as ReduceLROnPlateau, after each evaluation, with the loss or the metric ``keep_best``.
        collate_fn: A function of your own that makes a batch of a list of samples, where the data
            is a Dataset. For a sampler of your own, pass a DataLoader.
        resume_from: A checkpoint file (``run.checkpoint()`` writes one, and every run saves
            ``checkpoints/final.safetensors`` in its folder when it ends), or a run by its name,
            number or folder, whose newest intact checkpoint is used. The new run uses the same
            settings except those that are given; settings that name files or skip checks are never
            taken from a checkpoint. It continues at the same place of the same data (see
            `ortlab.training.data_loading.batches`). If the engine runs the same kernels, losses
            and weights equal those of an uninterrupted run bit for bit.
        hold: Whether the run waits, as if paused, when data raises an error, a loss is not finite
            or memory runs out. Waiting for the run then raises the error with advice, and
            ``run.resume()`` continues. False ends the run with the last good weights. The default
            is True in a notebook and False in a script. A run that has not finished its first step
            ends in any case if data or values are wrong, and so does one whose data can be read
            only once.
        config: A TOML file of settings, as ``run.save_config()`` writes it. Settings that are given
            here win over those in the file.
        fresh: Start from the weights and buffers that the model had before its first run in this
            process. Without it, a model that a run has trained trains on, which the run says. They
            are kept on disk, in the folder of that run, until the model or the process ends.
        name: Name of the run; None for the next run-N. If there is such a run already, as when a
            cell is run again, the new one gets a number, such as lr-0.01-2, and says so.
        **settings: Settings of `ortlab.settings.FinetuneSettings`, such as ``learning_rate=3e-5``.

    Raises:
        ValueError: If a setting, the model or the data is wrong, if another run trains the model,
            or if the checkpoint is damaged or belongs to another model, optimizer, order or amount
            of data.
        ortlab.engines.base.EngineUnavailable: If the engine cannot run on this machine.

    Example:
        >>> run = ortlab.finetune(model, loader, loss="cross_entropy", num_train_epochs=3)
        >>> result = await run
    """
    return session.finetune(
        model,
        train,
        eval_dataset=eval_dataset,
        loss=loss,
        metrics=metrics,
        callbacks=callbacks,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        collate_fn=collate_fn,
        resume_from=resume_from,
        hold=hold,
        config=config,
        fresh=fresh,
        name=name,
        **settings,
    )


@brief
@takes(FinetuneSettings.declarations().values(), renamed=_FORMER)
def resume(
    run: str | int | StoredRun,
    model: nn.Module | None = None,
    train: Iterable[Any] | None = None,
    *,
    eval_dataset: Iterable[Any] | None = None,
    loss: str | LossFunction | None = None,
    metrics: Metrics | None = None,
    callbacks: Callbacks | None = None,
    optimizer: OptimizerLike | None = None,
    lr_scheduler: SchedulerLike | None = None,
    collate_fn: Collate | None = None,
    **settings: Unpack[FinetuneKeywords],
) -> Run:
    """Resume a paused run, or continue a saved run that did not finish.

    A saved run whose kernel died, or that was stopped or failed, continues as a new run from its
    newest intact checkpoint. The new run includes the metrics up to there and is linked with the
    old one.

    Args:
        run: Name or number of the run, or the run.
        model: The model; None for the variable that has the same name as at that time.
        train: Training data; None as for `model`.
        eval_dataset: Evaluation data; None as for `model`.
        loss: Loss function or its name; None as for `model`.
        metrics: Metrics of your own; None as for `model`.
        callbacks: Callbacks; None as for `model`.
        optimizer: Optimizer of your own; None as for `model`.
        lr_scheduler: Scheduler of your own; None as for `model`.
        collate_fn: Function that makes a batch of samples; None as for `model`.
        **settings: Settings to change, such as ``engine="eager"``.

    Returns:
        The paused run, or the new run.

    Raises:
        ValueError: If a variable is missing, the run has finished or is in training in another
            process, or for the reasons given in `finetune`.

    Example:
        >>> run = ortlab.resume("run-3")
        >>> result = await run
    """
    return session.resume(
        run,
        model,
        train,
        eval_dataset=eval_dataset,
        loss=loss,
        metrics=metrics,
        callbacks=callbacks,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        collate_fn=collate_fn,
        **settings,
    )


@brief
@takes(RaceSettings.accepted().values())
def race(
    model: nn.Module,
    data: Iterable[Any],
    *,
    loss: str | LossFunction | None = None,
    **settings: Unpack[RaceKeywords],
) -> Race:
    """Train copies of a model in several set-ups side by side, in the background.

    The set-ups are combinations of engines and precisions. The model itself does not change.
    Meanwhile each set-up needs memory for a copy of the model, its gradients and its optimizer,
    and compiled code of torch.compile is dropped. In a notebook wait with ``await race``, in a
    script with ``race.result()``. ``race.stop()`` or an interrupt ends the race with what was
    measured.

    Args:
        model: The model, wrapped or not.
        data: Training data as in `finetune`; an iterable that can be read only once is refused.
        loss: Loss as in `finetune`.
        **settings: Settings of `ortlab.settings.RaceSettings`, such as ``engines="eager,compile"``,
            ``precisions="fp32,bf16"`` or ``preset="examples"``, and settings of a run that all
            set-ups share, such as ``batch_size`` and ``learning_rate``.

    Returns:
        The race. ``race.settings`` are the best settings, and ``race.apply()`` applies them to the
        model's active run or makes them the defaults of its next runs.

    Raises:
        ValueError: If a run or another search is active, or for the reasons given in `finetune`. A
            set-up that cannot run does not raise; its row shows the reason.

    Example:
        >>> race = ortlab.race(model, loader, engines="eager,ortmodule")
        >>> await race
        >>> run = ortlab.finetune(model, loader, **race.settings)
    """
    return session.race(model, data, loss=loss, **settings)


@brief
@takes(TuneSettings.accepted().values())
def tune(
    model: nn.Module,
    data: Iterable[Any],
    *,
    loss: str | LossFunction | None = None,
    **settings: Unpack[TuneKeywords],
) -> Tune:
    """Search the settings that train a model fastest on this machine, in the background.

    The search varies engine, precision and micro-batch size at a fixed ``global_batch``, using
    gradient accumulation for the rest, and recomputes activations where a micro-batch does not fit
    into memory. Candidates that cannot fit according to their memory plan are skipped, and so are
    those that are predicted to be much slower than the leader. A measured candidate is dropped only
    when its rounds tell that it is slower (see `ortlab.search.prune`). Micro-batch sizes are
    searched for a Dataset only; a loader keeps its own batches. The model itself does not change.

    It does not compare learning rates: train a run with each, as in ``finetune(model, data,
    learning_rate=1e-3, fresh=True, name="a")``, then call `compare_runs`.

    Args:
        model: The model, wrapped or not.
        data: Training data as in `race`.
        loss: Loss as in `finetune`.
        **settings: Settings of `ortlab.settings.TuneSettings`, such as ``memory="16GiB"`` (default:
            the free memory) or ``target="tokens"`` to count tokens instead of samples, and settings
            of a run that all candidates share.

    Returns:
        The search; wait with ``await tune`` or ``tune.result()``. ``tune.settings`` are the best
        settings, and ``tune.apply()`` makes them the defaults of the model's next runs.

    Raises:
        ValueError: As for `race`.

    Example:
        >>> tune = ortlab.tune(model, dataset, global_batch=64, memory="16GiB")
        >>> await tune
        >>> run = ortlab.finetune(model, dataset, **tune.settings)
    """
    return session.tune(model, data, loss=loss, **settings)


@brief
def workers(
    count: int | None = None,
    *,
    profile: str | None = None,
    hosts: str | Sequence[str] | None = None,
    slurm: bool | Mapping[str, Any] = False,
    mpi: bool = False,
    per_host: int | None = None,
    python: str | None = None,
    address: str | None = None,
) -> Workers:
    """Start worker processes that train together, or return the running ones.

    Args:
        count: Number of workers. If as many are running in the same place, they are returned;
            otherwise they are stopped and new ones start. None returns the running workers, or
            starts `per_host` on each of `hosts`.
        profile: An ipyparallel profile that defines where workers run; None for this machine.
        hosts: Hosts to start workers on over SSH, such as "a,b" or ["user@a", "b:2222"]; aliases of
            ssh_config are names of hosts, too. They are checked before anything starts.
        slurm: True to start workers as a job of Slurm, or a dictionary of sbatch's options for it,
            such as {"partition": "gpu", "time": "2:00:00", "gres": "gpu:2"}. This waits as long as
            the job does, and an interrupt cancels it.
        mpi: True to start workers by Open MPI's mpirun, on `hosts` or those of the batch job that
            this process runs in.
        per_host: Number of workers on each host. Default: an equal part of `count`, or 1; with
            `slurm` what Slurm chooses.
        python: Path of Python on the hosts. Default: the path of this process's Python if there is
            one, else python3. It needs the same versions of ortlab, torch and ipyparallel.
        address: IPv4 address of this machine by which all hosts reach it. Default: the one from
            which this machine sends to them.

    Returns:
        The workers. ``workers(2).run(f, x)`` calls ``f(x)`` on both, with copies of ``f`` and
        ``x``.

    Raises:
        ValueError: If `count` is None and no workers are running, if the running ones are busy, or
            if the hosts and numbers do not go together.
        RuntimeError: If workers cannot be started; the message has a line for each host that cannot
            run them, with the reason and what to do. If ipyparallel is missing, the message says
            how to install it.

    Example:
        >>> workers = ortlab.workers(2)
        >>> workers.run(os.getpid)
    """
    by_slurm = slurm is True or isinstance(slurm, Mapping)
    if hosts is not None or by_slurm or mpi:
        from ortlab.cluster.hosts import Hosts  # heavy: psutil
        from ortlab.cluster.mpi import MpiHosts  # heavy: psutil
        from ortlab.cluster.slurm import SlurmJob  # heavy: psutil

        if profile is not None:
            raise ValueError("profile excludes hosts, slurm and mpi: a profile names its own hosts")
        if by_slurm and (hosts is not None or mpi):
            raise ValueError(
                "slurm excludes hosts and mpi: Slurm chooses the hosts; name some by its option, "
                "as in slurm={'nodelist': 'a,b'}"
            )
        own: dict[str, Any] = {"python": python, "address": address}
        chosen: Elsewhere
        if by_slurm:
            options = slurm if isinstance(slurm, Mapping) else {}
            chosen = SlurmJob.chosen(options, count, per_host, **own)
        elif mpi:
            chosen = MpiHosts.chosen(hosts, count, per_host, **own)
        else:
            assert hosts is not None
            chosen = Hosts.chosen(hosts, count, per_host, **own)
        return session.start_workers(chosen.count, hosts=chosen)
    given = {"per_host": per_host, "python": python, "address": address}
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} needs hosts, as in hosts='a,b', or slurm or mpi")
    if count is not None:
        return session.start_workers(count, profile=profile)
    if session.workers is None:
        raise ValueError(
            "there are no workers yet; start some with %ort workers 2, or ortlab.workers(2)"
        )
    return session.workers


@overload
def track(
    model: nn.Module,
    /,
    *,
    name: str | None = None,
    optimizer: Optimizer | None = None,
    lr_scheduler: Any = None,
    resume_from: str | int | Path | StoredRun | None = None,
) -> LoopRun: ...


@overload
def track(loader: Iterable[B], /, *, name: str | None = None) -> Tracker[B]: ...


@brief
def track(
    model_or_loader: nn.Module | Iterable[B],
    /,
    *,
    name: str | None = None,
    optimizer: Optimizer | None = None,
    lr_scheduler: Any = None,
    resume_from: str | int | Path | StoredRun | None = None,
) -> LoopRun | Tracker[B]:
    """Show a training loop of your own live, as a run of a model or around its batches.

    With a model, the loop is a run like those of `finetune`: it is saved, and the history,
    comparisons and exporters have it. Every optimizer step in the ``with`` block is recorded, with
    its loss, learning rate, times and memory; ``run.log(loss=..., f1=...)`` sets or adds values.
    Around batches, the loop has charts only. The loss is the value given to ``log(loss=...)``, or
    else the scalar that ``backward`` is called on.

    Args:
        model_or_loader: The model that the loop trains, or an iterable of batches.
        name: Name of the run, or title of the charts; None for one made here.
        optimizer: Optimizer of the loop. With it the run saves checkpoints, every 10 minutes and at
            the end, and ``run.checkpoint()`` saves one.
        lr_scheduler: Scheduler of the loop, if checkpoints are to hold its state.
        resume_from: A run, its name or number, or a checkpoint file, to continue from: weights,
            optimizer, scheduler and random states are restored, and ``run.step`` says how many
            steps were done. The place in the data is up to the loop.

    Raises:
        ValueError: If the checkpoint is missing, damaged or of another model or optimizer.

    Example:
        >>> with ortlab.track(model, name="baseline") as run:
        ...     for x, y in loader:
        ...         step(x, y)
        ...     run.log(f1=score(model))
        >>> for x, y in ortlab.track(loader):
        ...     step(x, y)
    """
    return session.track(
        model_or_loader,
        name=name,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        resume_from=resume_from,
    )


@overload
def export(
    model: nn.Module,
    path: str | Path,
    batch: Any = None,
    *,
    second: Any = None,
    eval_dataset: Iterable[Any] | None = None,
    trainable: None = None,
    **settings: Unpack[ExportKeywords],
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


# Its body is one call: the length is its docstring, which says what is written and refused.
@brief
@takes(ExportSettings.declarations().values(), renamed=_FORMER)
def export(
    model: nn.Module,
    path: str | Path,
    batch: Any = None,
    *,
    second: Any = None,
    eval_dataset: Iterable[Any] | None = None,
    trainable: str | Sequence[str] | None = None,
    loss: str | LossFunction | None = None,
    optimizer: str = "adamw",
    weight_decay: float = 0.0,
    **settings: Unpack[ExportKeywords],
) -> Exported | TrainingArtifacts:
    """Write a model for inference, or for on-device training, into a folder.

    For inference the model is exported in evaluation mode, with dropout removed and BatchNorm on
    its running statistics; its own mode does not change. Inputs are named after the parameters of
    forward, outputs after the fields of the result, weights as in the state_dict. Labels are left
    out. Sizes may vary if `second` differs in them or, without `second`, if eager torch accepts
    other values. Every file is then compared with torch in onnxruntime: on the example, on random
    and extreme values, on other sizes and on padded rows. A size at which only the graph is wrong
    is fixed in the graph, with a note. The folder appears when every check has passed; it replaces
    a folder only if that holds nothing but an earlier export.

    With `trainable` the folder gets the files of ORT's on-device training API instead: graphs of a
    training step, of an evaluation and of the optimizer, and the weights. Loss and gradients are
    compared with eager torch.

    Args:
        model: The model, wrapped or not.
        path: Folder to write.
        batch: Example input: a dictionary, a tuple, a tensor, or a loader whose first batch is
            taken. None for the last batch that ortlab saw for this model. With `trainable` it must
            contain the labels.
        second: Another input; the sizes in which the two differ may vary.
        eval_dataset: Labeled data, to report the accuracy of each file next to torch's.
        trainable: Parameters to train on the device: names or patterns such as
            ``"classifier.*"``, or ``"*"`` for all.
        loss: Loss for `trainable`, a function or a name; None if the model returns its own.
        optimizer: Optimizer for `trainable`: ``"adamw"``, with torch's update rule, or ``"sgd"``.
        weight_decay: Weight decay of that optimizer.
        **settings: Settings of `ortlab.settings.ExportSettings` for inference. ``fp16=True`` and
            ``int8=True`` write further files and report their differences. ``opset=17`` is the
            ONNX opset, 14 to 20. ``external_data=True`` writes weights to a file of their own, as
            always happens from 2 GiB on.

    Returns:
        The written files with their sizes and differences.

    Raises:
        ValueError: If the model cannot be exported as given.
        ortlab.deploy.check.CheckFailed: If an output differs from torch by more than 1e-4 of its
            size, or 1e-2 where parameters have 16 bits.
        NotInGraph: If forward does something that a graph cannot express; a RuntimeError.
        RuntimeError: If the folder cannot be written.

    Example:
        >>> exported = ortlab.export(model, "out", batch, fp16=True)
        >>> ortlab.export(model, "device", batch, trainable="classifier.*", loss="cross_entropy")
    """
    from ortlab.deploy import inference  # heavy: onnx

    return inference.export(
        session,
        model,
        path,
        batch,
        second=second,
        eval_dataset=eval_dataset,
        trainable=trainable,
        loss=loss,
        optimizer=optimizer,
        weight_decay=weight_decay,
        **settings,
    )


@brief
@takes(FinetuneSettings.declarations().values())
def script(
    model: nn.Module,
    data: Iterable[Any] | None = None,
    *,
    to: str | Path = "standalone",
    make_model: str | None = None,
    make_data: str | None = None,
    loss: Any = None,
    **settings: Unpack[ScriptKeywords],
) -> Script:
    """Write the fine-tuning of a model as a plain training script.

    The folder gets ``train.py`` with the source of classes and functions that cells define, and
    ``model.safetensors`` with the weights. ZeRO stages 0 and 1 use torch (DistributedDataParallel,
    ZeroRedundancyOptimizer), stages 2 and 3 use DeepSpeed. The script trains and writes
    ``trained.safetensors``; it does not evaluate.

    Args:
        model: The model. The script creates models of transformers, a Sequential of torch layers
            and classes without arguments by itself; others need `make_model`.
        data: Training data. A Dataset and a list of batches are written next to the script, up to
            1 GiB; other data needs `make_data`.
        to: Folder to write.
        make_model: Expression that creates the model, such as ``"Net(6, 4)"``.
        make_data: Expression for an iterable of the batches of all processes together.
        loss: Loss as in `finetune`.
        **settings: Settings of `finetune`.

    Returns:
        The script, which lists the lines that the user must fill in.

    Raises:
        ValueError: If the script cannot express a setting, or the folder holds another script.

    Example:
        >>> ortlab.script(model, dataset, loss="cross_entropy", workers=2, num_train_epochs=3)
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
@takes(FleetSettings.declarations().values())
def zero_plan(model: str | int | nn.Module, **settings: Unpack[FleetKeywords]) -> ZeroPlan:
    """Return the memory that training needs on each GPU at ZeRO stages 0 to 3.

    Nothing is executed, and for a number of parameters nothing is imported. Activations are
    counted if ``hidden``, ``layers``, ``sequence`` and ``batch`` are given, or if engine
    ``"ortmodule"`` has a graph of the model.

    Args:
        model: Number of parameters (``"2.7B"``, ``350_000_000``), or a model, wrapped or not.
        **settings: Settings of `ortlab.settings.FleetSettings`, such as ``gpus=16``;
            ``memory="40GiB"`` marks the stages that fit.

    Raises:
        ValueError: If `model` is not a number of parameters, or only some of the sizes are given.

    Example:
        >>> ortlab.zero_plan("2.7B", gpus=16, memory="40GiB")
    """
    return zero_memory.zero_plan(session, model, **settings)


@brief
@takes(PlanSettings.declarations().values())
def training_plan(model: Any, **settings: Unpack[PlanKeywords]) -> TrainingPlan:
    """Return the fastest ways to train a transformer on a fleet of GPUs, with memory and time.

    Nothing is executed: it is arithmetic, with one constant for each generation of GPUs, which is
    fitted on a published run; ``ortlab plan --published`` shows the error for others.

    Args:
        model: Number of parameters (``"175B"``), alone or with ``layers``, ``hidden`` and
            ``heads``; a config of Hugging Face's transformers, as an object, a dictionary or the
            path of its ``config.json``; or a model with such a config. No weights are needed.
        **settings: Settings of `ortlab.settings.PlanSettings`: the ``hardware``, and ``gpus``, or
            ``tokens`` and ``days`` for the fewest GPUs that train the tokens within the days.

    Raises:
        ValueError: If the numbers do not go together; the message names the nearest that do.

    Example:
        >>> plan = ortlab.training_plan("7B", gpus=64, hardware="h100-80gb", tokens="300B")
        >>> plan.write("launch")
    """
    return result.training_plan(model, **settings)
