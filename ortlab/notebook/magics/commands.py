"""The commands of ``%ort``: their words, options and help texts."""

from __future__ import annotations

from IPython.core.error import UsageError

from ortlab.graph import CAPTURED_STAGES, STAGES
from ortlab.notebook.magics.parsing import Command, Option, Positional
from ortlab.settings import (
    OPTIMIZERS,
    Declaration,
    EngineSettings,
    ExportSettings,
    FinetuneSettings,
    FleetSettings,
    HistorySettings,
    PlanSettings,
    ProfileSettings,
    PruneSettings,
    RaceSettings,
    RecomputeSettings,
    TuneSettings,
    unknown_name,
)

WRAP = Command(
    "wrap",
    "Wrap models in an engine.",
    "Their names are bound to the wrappers. %%ort [NAME ...] as the first line of a cell takes the "
    "same options and wraps the models that the cell binds, or only the named ones.",
    (Positional("name", "model", "a model", "*"),),
    settings=EngineSettings,
)

_COPIED = (
    Positional("model", "model", "the model, wrapped or not; it does not change"),
    Positional("data", "loader", "training data: a loader, a dataset, a list of batches"),
)

_STAGES = tuple(dict.fromkeys([*CAPTURED_STAGES, *STAGES]))
_METRICS = Option("--metrics", "metrics of your own, one or several", kind="metrics")
_CALLBACKS = Option("--callbacks", "callbacks of your own, one or several", kind="callbacks")
_SCHEDULER = Option(
    "--lr-scheduler", "a scheduler of torch, or a factory", kind="scheduler", common=False
)
_COLLATE = Option(
    "--collate-fn", "function that makes a batch of samples", kind="function", common=False
)
_RUN = (Positional("run", "run", "name of a run; by default the last run", "?"),)

COMMANDS = {
    command.name: command
    for command in (
        WRAP,
        Command(
            "unwrap",
            "Bind names to their own modules again.",
            "Lists, dictionaries and objects that still refer to the wrapper are named.",
            positionals=(Positional("name", "wrapped", "a wrapped model", "+"),),
        ),
        Command(
            "finetune",
            "Train a model in the background.",
            "`run = %ort finetune model data` returns at once, `await run` waits for the end.",
            (
                Positional("model", "model", "the model, wrapped or not"),
                Positional("train", "loader", "training data: a loader, a dataset, any iterable"),
            ),
            settings=FinetuneSettings,
            extra=(
                Option("--eval-dataset", "evaluation data", kind="loader", alias="eval_data"),
                _METRICS,
                _CALLBACKS,
                _SCHEDULER,
                _COLLATE,
                Option("--resume-from", "a checkpoint file, or a run, to resume from"),
                Option("--name", "name of the run (default: the next run-N)"),
                Option(
                    "--config",
                    "TOML file of settings, as run.save_config() writes it",
                    kind="config",
                ),
            ),
            besides=(
                Declaration(
                    "fresh", bool, False, "start from the weights before the model's first run"
                ),
            ),
        ),
        Command(
            "race",
            "Train copies of a model in several set-ups side by side, to find the fastest.",
            "`race = %ort race model data` returns at once, `await race` waits for the end; "
            "race.settings are the best settings, race.apply() applies them to the model's run.",
            _COPIED,
            settings=RaceSettings,
            besides=tuple(RaceSettings.besides().values()),
        ),
        Command(
            "tune",
            "Search the engine, precision and micro-batch size that train a model fastest here.",
            "The global batch does not change; micro-batch sizes are searched for a Dataset only. "
            "It does not compare learning rates: train a run with each (%ort finetune model data "
            "--lr 1e-3 --fresh --name a), then %ort compare a b. "
            "`tune = %ort tune model data` returns at once, `await tune` waits for the end; "
            "tune.settings are the best settings, tune.apply() applies them to the next run.",
            _COPIED,
            settings=TuneSettings,
            besides=tuple(TuneSettings.besides().values()),
        ),
        Command(
            "check",
            "Compare the next call of a model with eager torch: outputs, gradients and buffers.",
            "The line below the cell becomes a table once the call is made, in a loop of your own "
            "or in a run. `check = %ort check model` gives check.passed and check.differences.",
            (Positional("model", "wrapped", "a wrapped model"),),
        ),
        Command(
            "graph",
            "Show the graphs that torch captured and ORT built of a model.",
            "A notebook shows forward and gradient side by side, with an outline of the modules. "
            "--stage shows one graph; --since compares its operators with those of another stage.",
            (Positional("model", "wrapped", "a wrapped model"),),
            extra=(
                Option(
                    "--batch", "input to make graphs for, if the model was not called", kind="batch"
                ),
                Option("--stage", f"one of {', '.join(_STAGES)}", choices=_STAGES),
                Option("--since", "the stage to compare it with", choices=_STAGES),
            ),
        ),
        Command(
            "memory",
            "Show the memory that a training step of a model needs, for any batch; nothing is run.",
            "A size is NAME=NUMBER (batch=32 seq=256); sizes that are left out are those of the "
            "last call. --budget finds the largest batch that fits.",
            (
                Positional("model", "wrapped", "a wrapped model"),
                Positional("sizes", "size", "a size as NAME=NUMBER, such as batch=32", "*"),
            ),
            extra=(
                Option("--budget", "available memory, such as 16GiB"),
                Option(
                    "--batch", "input to make graphs for, if the model was not called", kind="batch"
                ),
                Option("--optimizer", "optimizer whose state is counted", choices=OPTIMIZERS),
            ),
        ),
        Command(
            "recompute",
            "Show the memory that each recompute plan saves and the time it costs, or choose one.",
            "A size is NAME=NUMBER, as in %ort memory. --measure times steps to get the cost; "
            "--budget chooses the fastest plan that fits; --choose applies a plan of the table "
            "from the next step on: a name, several with commas, layers, or off. On engine ort, "
            "'budget 0.5' stores half of the activations. On engine ortmodule, --subgraphs lists "
            "ORT's own plans, such as BiasGelu+:1:-1, which --choose takes, too.",
            (
                Positional("model", "wrapped", "a wrapped model"),
                Positional("sizes", "size", "a size as NAME=NUMBER, such as batch=32", "*"),
            ),
            settings=RecomputeSettings,
            extra=(
                Option("--budget", "available memory, such as 16GiB"),
                Option("--choose", "plan to apply from the next step on", kind="plan"),
                Option(
                    "--batch", "input to make graphs for, if the model was not called", kind="batch"
                ),
                Option("--optimizer", "optimizer whose state is counted", choices=OPTIMIZERS),
            ),
        ),
        Command(
            "profile",
            "Time a step of a model in ORT and in eager torch.",
            "By phase, module, operator and source line; without a batch, random values in the "
            "shapes of the last call are used. `p = %ort profile model` gives p.by_node(), "
            "p.by_module(depth=3).",
            (Positional("model", "wrapped", "a wrapped model"),),
            settings=ProfileSettings,
            extra=(Option("--batch", "input of the model", kind="batch"),),
        ),
        Command(
            "lines",
            "Show the code of a model with the time and the memory that each line takes.",
            "For models on engine ort: time of the line's operators and of their gradients, saved "
            "activations, and whether ORT or torch runs it; a click on a line lists its nodes. "
            "`l = %ort lines model` gives l.nodes('model.py:12').",
            (Positional("model", "wrapped", "a wrapped model"),),
            settings=ProfileSettings,
            extra=(Option("--batch", "input of the model", kind="batch"),),
        ),
        Command(
            "panel",
            "Show the settings of a run, or of a model before its run, as controls.",
            "Each shows what a change costs, or why a value is not available. With data, the panel "
            "of a model has a button that starts a run; without a name it is for the last run.",
            (
                Positional("target", "target", "a model or a run", "?"),
                Positional("data", "loader", "training data of the model", "?"),
            ),
        ),
        Command(
            "apply",
            "Change settings of an active run, from the next step on.",
            "If a change fails, the run keeps its settings; %ort undo reverts the last change.",
            _RUN,
            settings=FinetuneSettings,
        ),
        Command(
            "checkpoint",
            "Save the exact state of a run to a file, after the step in flight.",
            "`path = %ort checkpoint` returns the path for %ort finetune --resume-from; for a run "
            "that is over it is the state at its end.",
            positionals=_RUN,
            extra=(Option("--to", "the file; by default one in the folder of the run"),),
        ),
        Command("undo", "Revert the last change of settings of a run.", positionals=_RUN),
        Command(
            "timeline",
            "Record a step of a run on workers: when each rank computes, communicates and waits.",
            "`t = %ort timeline` gives t.table() and, with all operators for ui.perfetto.dev, "
            't.save("trace.json").',
            positionals=_RUN,
        ),
        Command(
            "runs",
            "List, sort and filter saved runs of this kernel and of all others.",
            "--prune selects old runs by --older-than, --keep or --max-size and shows them; --yes "
            "removes them. --tensorboard writes runs as event files.",
            settings=HistorySettings,
            besides=(
                Declaration(
                    "prune",
                    bool,
                    False,
                    "remove old runs; needs --older-than, --keep or --max-size",
                ),
                *PruneSettings.declarations().values(),
            ),
            extra=(Option("--tensorboard", "folder for the event files"),),
        ),
        Command(
            "compare",
            "Compare the curves, settings, versions and results of runs.",
            "Two to eight, by name or number, as in %ort compare 3 5; `c = %ort compare 3 5` gives "
            "c.differences.",
            (Positional("runs", "kept", "name of a run, or the number of run-N", "+"),),
        ),
        Command("pause", "Pause a run after the step in flight.", positionals=_RUN),
        Command(
            "resume",
            "Resume a paused run, or continue one whose kernel died or that was stopped or failed.",
            "The latter continues as a new run from its newest intact checkpoint, linked with the "
            "old run and including its charts. Model, data and loss are the variables of the same "
            "names as before, or those that are named here.",
            (
                Positional(
                    "run", "resumable", "name or number of a run; by default the last run", "?"
                ),
                Positional("model", "model", "the model, if its name has changed", "?"),
                Positional("train", "loader", "training data, if its name has changed", "?"),
            ),
            extra=(
                Option("--eval-dataset", "evaluation data", kind="loader", alias="eval_data"),
                Option("--loss", "the loss, a function of the notebook", kind="loss"),
                _METRICS,
                _CALLBACKS,
                Option("--optimizer", "the optimizer, one of your own", kind="optimizer"),
                _SCHEDULER,
                _COLLATE,
            ),
        ),
        Command(
            "stop", "Stop a run, a race or a search after the step in flight.", positionals=_RUN
        ),
        Command(
            "workers",
            "Start worker processes that train together, or show the running ones.",
            "The table shows device, threads and memory of each, and every socket they listen on. "
            "Without --hosts and --profile they run on this machine. `%ort workers --hosts a,b "
            "--per-host 2` starts two on each host over SSH, after all hosts were checked; `%ort "
            "workers --slurm 4 --partition gpu` starts four as a job of Slurm, and `--mpi 4` by "
            "mpirun, on --hosts or those of the batch job that this kernel runs in. "
            "`w = %ort workers 2` gives w.run(f, x), which calls f(x) on each.",
            (Positional("count", "workers", "how many, or stop; by default they are shown", "?"),),
            extra=(
                Option("--hosts", "hosts to start them on over SSH, such as a,user@b,c:2222"),
                Option("--slurm", "how many to start as a job of Slurm"),
                Option("--mpi", "how many to start by mpirun"),
                Option("--per-host", "number of workers on each host"),
                Option("--partition", "Slurm's partition", common=False),
                Option("--time", "Slurm's time limit, such as 2:00:00", common=False),
                Option("--account", "Slurm's account", common=False),
                Option("--slurm-options", "more options of sbatch, such as 'gres=gpu:2 mem=64G'"),
                Option("--python", "path of Python on the hosts (default: this one's, or python3)"),
                Option("--address", "address of this machine for the hosts (default: it is found)"),
                Option("--profile", "an ipyparallel profile that defines where they run"),
            ),
        ),
        Command(
            "script",
            "Write a model's fine-tuning as a plain script for torchrun.",
            "It includes the classes of cells; weights and data are saved next to it. The output "
            "lists what must be filled in by hand.",
            (
                Positional("model", "model", "the model, wrapped or not"),
                Positional("data", "loader", "training data: a dataset, a list of batches", "?"),
            ),
            settings=FinetuneSettings,
            extra=(
                Option("--to", "the folder (default: standalone)"),
                Option("--make-model", "expression that creates the model, such as 'Net(6, 4)'"),
                Option("--make-data", "expression that creates the batches, such as 'loader()'"),
            ),
        ),
        Command(
            "export",
            "Write a trained model for inference anywhere, checked against torch.",
            "`exported = %ort export model out/` gives files, sizes and differences; out/ gets a "
            "README.md with programs that run the model. Without --batch the model is exported for "
            "the last batch that it was called with.",
            (
                Positional("model", "model", "the model, wrapped or not; it does not change"),
                Positional("path", "", "folder to write"),
            ),
            settings=ExportSettings,
            extra=(
                Option("--batch", "example input: a batch, or a loader", kind="batch"),
                Option("--second", "another batch; the sizes that differ may vary", kind="batch"),
                Option(
                    "--eval-dataset",
                    "labeled data, to report the accuracy of the files",
                    kind="loader",
                    alias="eval_data",
                ),
                Option(
                    "--trainable",
                    "parameters to train on a device, separated by commas, such as 'classifier.*'",
                ),
                Option("--loss", "loss for --trainable, if the model returns none", kind="loss"),
            ),
            besides=(
                Declaration(
                    "web",
                    bool,
                    False,
                    "show a form that runs the model in this page and in the kernel",
                ),
            ),
        ),
        Command(
            "zero",
            "Plan a fleet: the memory that training needs on each GPU at ZeRO's stages.",
            "`%ort zero plan --params 2.7B --gpus 16 --memory 40GiB` is for a number of "
            "parameters, `%ort zero plan model --gpus 4` for a model; nothing is run.",
            (
                Positional("action", "", "what to do: plan", choices=("plan",)),
                Positional("model", "model", "the model, wrapped or not", "?"),
            ),
            settings=FleetSettings,
            extra=(Option("--params", "number of parameters, such as 350M or 2.7B"),),
        ),
        Command(
            "plan",
            "Plan the training of a transformer on a fleet of GPUs: layouts, memory, time, cost.",
            "`%ort plan 175B --gpus 1024` is for a number of parameters, `%ort plan config` for a "
            "config of Hugging Face's transformers, or a model with one; `%ort plan published` "
            "compares plans with published runs. Nothing is run.",
            (
                Positional(
                    "model", "model", "parameters such as 7B, a config, its file, or a model"
                ),
            ),
            settings=PlanSettings,
            extra=(Option("--script", "folder that the files to launch the plan are written to"),),
        ),
        Command(
            "cache",
            "Show how many exported graphs are cached, and where.",
            positionals=(Positional("action", "", "clear removes them all", "?", ("clear",)),),
        ),
        Command(
            "device",
            "Show what this kernel runs on: CPU, threads, memory, GPUs, engines.",
        ),
        Command("status", "Show models with engine and graphs, and runs; so does %ort."),
        Command(
            "help",
            "Show all commands, or the options of one.",
            positionals=(Positional("command", "command", "a command", "?"),),
        ),
        Command("doctor", "Check what this machine has, what it lacks and how to fix it."),
    )
}


def command_called(name: str) -> Command:
    """Return the command called `name`.

    Args:
        name: Name of the command.

    Raises:
        UsageError: If there is none; the message lists the commands and offers the nearest.
    """
    if name in COMMANDS:
        return COMMANDS[name]
    found = unknown_name(name, COMMANDS, lists="%ort help")
    raise UsageError(f"%ort has no command {name!r}: {found}")


def overview() -> str:
    """Return the text of ``%ort?``: all commands with their usage."""
    width = max(map(len, COMMANDS))
    lines = [(command.name, command.summary) for command in COMMANDS.values()]
    return "\n".join(
        [
            "Train in ONNX Runtime.",
            "",
            *(f"  %ort {name:<{width}}  {summary}" for name, summary in lines),
            f"  %%ort {'':<{width - 1}}  Wrap the models that the cell binds.",
            "",
            "%ort COMMAND --help explains the options:",
            "",
            *(command.usage for command in COMMANDS.values()),
        ]
    )
