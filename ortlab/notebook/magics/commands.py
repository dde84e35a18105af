"""The commands of ``%ort``: their words, options and help texts."""

from __future__ import annotations

from IPython.core.error import UsageError

from ortlab.graph import STAGES
from ortlab.notebook.magics.parsing import Command, Option, Positional
from ortlab.settings import (
    OPTIMIZERS,
    Declaration,
    EngineSettings,
    ExportSettings,
    FinetuneSettings,
    FleetSettings,
    HistorySettings,
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
    "Their names are bound to the wrappers. %%ort [NAME ...], as the first line of a cell, takes "
    "the same options and wraps the models that the cell binds, or those that it names.",
    (Positional("name", "model", "a model", "*"),),
    settings=EngineSettings,
)

_COPIED = (
    Positional("model", "model", "the model, wrapped or not; it stays as it is"),
    Positional("data", "loader", "its data: a loader, a dataset, a list of batches"),
)

_RUN = (Positional("run", "run", "a run's name; without it the last run", "?"),)

COMMANDS = {
    command.name: command
    for command in (
        WRAP,
        Command(
            "unwrap",
            "Give names their own module back.",
            positionals=(Positional("name", "wrapped", "a wrapped model", "+"),),
        ),
        Command(
            "finetune",
            "Train a model in the background.",
            "`run = %ort finetune model data` returns at once, `await run` waits for the end.",
            (
                Positional("model", "model", "the model, wrapped or not"),
                Positional("train", "loader", "its data: a loader, a dataset, any iterable"),
            ),
            settings=FinetuneSettings,
            extra=(
                Option("--eval-data", "the data that it is evaluated on", kind="loader"),
                Option("--resume-from", "a checkpoint's file, or a run, to go on from"),
            ),
        ),
        Command(
            "race",
            "Train copies of a model in several set-ups side by side: which is fastest here.",
            "`race = %ort race model data` returns at once, `await race` waits for the end; "
            "race.settings are the best one's, race.apply() has its run take them.",
            _COPIED,
            settings=RaceSettings,
            besides=tuple(RaceSettings.besides().values()),
        ),
        Command(
            "tune",
            "Search engine, precision and micro-batch for those that train a model fastest here.",
            "The global batch stays the same; micro-batches are searched for a Dataset. "
            "`tune = %ort tune model data` returns at once, `await tune` waits; tune.settings are "
            "the best, tune.apply() has its next run take them.",
            _COPIED,
            settings=TuneSettings,
            besides=tuple(TuneSettings.besides().values()),
        ),
        Command(
            "graph",
            "Show the graphs that ORT made of a model.",
            "A notebook has forward and gradient side by side, with an outline of the modules. "
            "With --stage one of the graphs, with --since too what became of another's operators.",
            (Positional("model", "wrapped", "a wrapped model"),),
            extra=(
                Option(
                    "--batch", "what the model is exported for, if it was not called", kind="batch"
                ),
                Option("--stage", f"one of {', '.join(STAGES)}", choices=tuple(STAGES)),
                Option("--since", "the stage to compare it with", choices=tuple(STAGES)),
            ),
        ),
        Command(
            "memory",
            "Show what a training step of a model takes of memory, for any batch; nothing is run.",
            "A size is NAME=NUMBER (batch=32 seq=256); those left out are the last call's. With "
            "--budget the largest batch that fits.",
            (
                Positional("model", "wrapped", "a wrapped model"),
                Positional("sizes", "size", "NAME=NUMBER: a size, as in batch=32", "*"),
            ),
            extra=(
                Option("--budget", "memory that there is, as in 16GiB"),
                Option(
                    "--batch", "what the model is exported for, if it was not called", kind="batch"
                ),
                Option("--optimizer", "whose state counts", choices=OPTIMIZERS),
            ),
        ),
        Command(
            "recompute",
            "Show what recompute saves and costs a model, plan by plan, or choose a plan.",
            "A size is NAME=NUMBER, as in %ort memory. --measure times the model's steps, for the "
            "cost; --budget chooses what costs least time of what fits; --choose takes a plan from "
            "the table, several with commas, layers, or off, from the next step on.",
            (
                Positional("model", "wrapped", "a wrapped model"),
                Positional("sizes", "size", "NAME=NUMBER: a size, as in batch=32", "*"),
            ),
            settings=RecomputeSettings,
            extra=(
                Option("--budget", "memory that there is, as in 16GiB"),
                Option("--choose", "the plan to hold from the next step on", kind="plan"),
                Option(
                    "--batch", "what the model is exported for, if it was not called", kind="batch"
                ),
                Option("--optimizer", "whose state counts", choices=OPTIMIZERS),
            ),
        ),
        Command(
            "profile",
            "Time a step of a model in ORT and in eager torch.",
            "By phase, module and operator; without a batch on made-up values in the form of the "
            "last call. `p = %ort profile model` keeps it: p.by_node(), p.by_module(depth=3).",
            (Positional("model", "wrapped", "a wrapped model"),),
            settings=ProfileSettings,
            extra=(Option("--batch", "what the model is called with", kind="batch"),),
        ),
        Command(
            "panel",
            "Show the settings of a run, or of a model before one, as controls.",
            "Each says what a change costs and why what cannot be had cannot. With data a model's "
            "panel has a button that starts a run; without a name it is the last run's.",
            (
                Positional("target", "target", "a model or a run", "?"),
                Positional("data", "loader", "what the model is to be trained on", "?"),
            ),
        ),
        Command(
            "apply",
            "Change settings while a run trains, from the next step on.",
            "A change that fails leaves the run with what it had; %ort undo goes back.",
            _RUN,
            settings=FinetuneSettings,
        ),
        Command(
            "checkpoint",
            "Keep a run's exact state in a file, after the step in flight.",
            "`path = %ort checkpoint` holds the file's name, for %ort finetune --resume-from; of a "
            "run that is over it is what it ended with.",
            positionals=_RUN,
            extra=(Option("--to", "the file; without it one in the run's folder"),),
        ),
        Command("undo", "Go back to what held before a run's last change.", positionals=_RUN),
        Command(
            "runs",
            "List the runs that are kept, of this kernel and all others, to sort and search.",
            "With --prune those go that --older-than, --keep or --max-size say: shown first, and "
            "removed with --yes. With --tensorboard they are written as event files.",
            settings=HistorySettings,
            besides=(
                Declaration("prune", bool, False, "remove old runs: see --older-than and others"),
                *PruneSettings.declarations().values(),
            ),
            extra=(Option("--tensorboard", "the folder that gets their event files"),),
        ),
        Command(
            "compare",
            "Lay runs over one another: curves, and what differs in settings, versions, results.",
            "Two to eight, by name or number, as in %ort compare 3 5; `c = %ort compare 3 5` "
            "keeps it: c.differences.",
            (Positional("runs", "kept", "a run's name, or the number of run-N", "+"),),
        ),
        Command("pause", "Pause a run after the step in flight.", positionals=_RUN),
        Command(
            "resume",
            "Let a run go on: one that is paused, or one whose kernel died, that was stopped or "
            "failed.",
            "The latter goes on as a new run, linked with it and with its charts, from the newest "
            "checkpoint that is whole, on what model, data and loss were called, or on those that "
            "are named here.",
            (
                Positional(
                    "run", "resumable", "a run's name or number; without it the last run", "?"
                ),
                Positional("model", "model", "the model, where it is called otherwise", "?"),
                Positional("train", "loader", "its data, where that is called otherwise", "?"),
            ),
            extra=(
                Option("--eval-data", "the data that it is evaluated on", kind="loader"),
                Option("--loss", "its loss, a function of the notebook", kind="loss"),
            ),
        ),
        Command(
            "stop", "Stop a run, a race or a search after the step in flight.", positionals=_RUN
        ),
        Command(
            "workers",
            "Start processes that train together, or show those that run.",
            "Each is shown with its device, threads and memory, and every socket they listen on. "
            "Without --profile they are on this machine; `w = %ort workers 2` keeps them: "
            "w.run(f, x) calls f(x) on each.",
            (Positional("count", "workers", "how many, or stop; without it they are shown", "?"),),
            extra=(Option("--profile", "an ipyparallel profile that says where they run"),),
        ),
        Command(
            "script",
            "Write a model's fine-tuning as a plain script for torchrun.",
            "Classes of cells go along, weights and data lie beside it, and what cannot be known "
            "is told, to be filled in.",
            (
                Positional("model", "model", "the model, wrapped or not"),
                Positional("data", "loader", "its data: a dataset, a list of batches", "?"),
            ),
            settings=FinetuneSettings,
            extra=(
                Option("--to", "the folder; without it standalone"),
                Option("--make-model", "the expression that makes the model, as in 'Net(6, 4)'"),
                Option("--make-data", "the expression that makes batches, as in 'loader()'"),
            ),
        ),
        Command(
            "export",
            "Write a trained model for inference anywhere, checked beside torch.",
            "`exported = %ort export model out/` gives its files, sizes and differences; out/ gets "
            "a README.md with programs that run it. Without --batch it is exported for the last "
            "batch that was seen.",
            (
                Positional("model", "model", "the model, wrapped or not; it stays as it is"),
                Positional("path", "", "the folder that it gets into"),
            ),
            settings=ExportSettings,
            extra=(
                Option("--batch", "what it is called with: a batch, or a loader", kind="batch"),
                Option("--second", "another batch: the sizes that differ may vary", kind="batch"),
                Option("--eval-data", "labelled data, for the files' accuracy", kind="loader"),
                Option(
                    "--trainable",
                    "parameters that a device trains on, with commas, as in 'classifier.*'",
                ),
                Option("--loss", "for --trainable, where the model has none", kind="loss"),
            ),
            besides=(
                Declaration(
                    "web", bool, False, "a form that runs it in this page, beside the kernel"
                ),
            ),
        ),
        Command(
            "zero",
            "Plan a fleet: what training takes of each GPU at ZeRO's stages, and which fit.",
            "`%ort zero plan --params 2.7B --gpus 16 --memory 40GiB` is for a number of "
            "parameters, `%ort zero plan model --gpus 4` for a model; nothing is run.",
            (
                Positional("action", "", "what to do: plan", choices=("plan",)),
                Positional("model", "model", "the model, wrapped or not", "?"),
            ),
            settings=FleetSettings,
            extra=(Option("--params", "how many parameters, as in 350M or 2.7B"),),
        ),
        Command(
            "cache",
            "Show how many exported graphs are cached, and where.",
            positionals=(Positional("action", "", "removes them all", "?", ("clear",)),),
        ),
        Command(
            "device",
            "Show where this kernel computes: processor, threads, memory, GPUs, engines.",
        ),
        Command("doctor", "Check what this machine has, what it lacks and how to mend it."),
    )
}


def command_called(name: str) -> Command:
    """The command called `name`; UsageError lists them and offers the nearest."""
    if name in COMMANDS:
        return COMMANDS[name]
    raise UsageError(f"%ort has no command {name!r}: {unknown_name(name, COMMANDS)}")


def overview() -> str:
    """What ``%ort?`` shows."""
    width = max(map(len, COMMANDS))
    lines = [("", "Show the wrapped models, what was left as it is, and why.")]
    lines += [(command.name, command.summary) for command in COMMANDS.values()]
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
