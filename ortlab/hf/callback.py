"""A transformers callback: a Trainer's run as live charts and in the history."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ortlab.engines.base import wrapped_model
from ortlab.hf.following import TrainerRun
from ortlab.session import session
from ortlab.settings import FinetuneSettings

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerState, TrainingArguments

FP16_ON_CPU = "accelerate trains in float32 on a CPU, without a word"
"""What becomes of ``fp16=True`` there."""

_OPTIMIZERS = {"adamw": "adamw", "sgd": "sgd"}
_SCHEDULES = ("linear", "constant", "cosine")


class OrtLabCallback(TrainerCallback):
    """Shows each run of a `transformers.Trainer` live and keeps it: ``callbacks=[OrtLabCallback]``.

    Loss, learning rate, throughput, times and memory of every step, whatever the Trainer logs, its
    evaluations, and the gradient norm where it is logged. The model may be wrapped or not. `name`
    names the run. Of several processes the first one tells.

    A Trainer whose ``train`` raises does not say so: the run then counts as failed when the next
    one begins, or Python ends. `ortlab.hf.Trainer` tells.

    ORT's own dropout, on a GPU, goes on from a seed of its own at the beginning and at each
    checkpoint, so that a run that is resumed there draws what the undisturbed one did.
    """

    def __init__(self, name: str | None = None) -> None:
        self.run: TrainerRun | None = None
        """The run that goes on, or the last one."""
        self._name = name

    def __repr__(self) -> str:
        return f"OrtLabCallback(run={self.run!r})"

    # What the Trainer calls gets its arguments, state and control, and by name what it holds.

    def on_train_begin(self, *told: Any, **held: Any) -> None:
        """A run begins."""
        args, state, _ = told
        model = held["model"]
        _restart_dropout(model, args, state)
        if not state.is_world_process_zero:
            return
        self.ended(None, why="train ended without a word: it raised, or was interrupted")
        self.run = TrainerRun(
            model,
            total_steps=state.max_steps,
            step=state.global_step,
            settings=_settings(model, args, state),
            arguments=_arguments(args),
            name=self._name,
        )
        session.trainers.append(self.run)
        atexit.register(self._with_python)
        if _is_idle_fp16(args):
            self.run.tell("warning", f"fp16=True has no effect: {FP16_ON_CPU}")
        session.show(self.run)

    def on_step_begin(self, *_: Any, **held: Any) -> None:
        """An optimizer step begins."""
        if self.run is not None:
            scaler = getattr(held.get("optimizer"), "scaler", None)
            self.run.begin_step(scaled=scaler is not None and scaler.is_enabled())

    def on_step_end(self, *told: Any, **_: Any) -> None:
        """It is over."""
        _, state, control = told
        if self.run is not None:
            self.run.end_step(state.global_step, float(state.epoch or 0.0))
            if self.run.stopping:
                control.should_training_stop = True

    def on_log(self, *_: Any, **held: Any) -> None:
        """What the Trainer logs."""
        if self.run is not None and not self.run.over():
            self.run.log(held["logs"])
            self.run.free()

    def on_evaluate(self, *_: Any, **held: Any) -> None:
        """An evaluation is over."""
        if self.run is not None:
            self.run.evaluated(held["metrics"])

    def on_save(self, *told: Any, **held: Any) -> None:
        """A checkpoint was written."""
        args, state, _ = told
        _restart_dropout(held["model"], args, state)
        if self.run is not None:
            self.run.tell("note", f"checkpoint-{state.global_step} is written")
            self.run.free()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """``train`` is about to return."""
        self.ended(None)

    def ended(self, error: BaseException | None, why: str | None = None) -> None:
        """The run is over, if one goes on: with an `error`, or for a reason that `why` tells."""
        if self.run is not None:
            atexit.unregister(self._with_python)
            self.run.end(error, why)

    def _with_python(self) -> None:
        self.ended(None, why="Python ended before train did")


def _is_idle_fp16(args: TrainingArguments) -> bool:
    return bool(args.fp16) and args.device.type == "cpu"


def _restart_dropout(model: nn.Module, args: TrainingArguments, state: TrainerState) -> None:
    if (wrapped := wrapped_model(model)) is not None:
        wrapped.reseed(args.seed + state.global_step)


def _settings(model: nn.Module, args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
    """The settings that the Trainer's arguments come to, as far as there are such."""
    known: dict[str, Any] = {"engine": "eager"}
    if (wrapped := wrapped_model(model)) is not None:
        known = wrapped.settings.as_dict()
    precision = known.get("precision", "fp32")
    if args.bf16 or (args.fp16 and not _is_idle_fp16(args)):
        precision = "bf16" if args.bf16 else "fp16"
    optimizer = str(getattr(args.optim, "value", args.optim)).partition("_")[0]
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    chosen = {
        "precision": precision,
        "max_steps": state.max_steps,
        "epochs": max(int(args.num_train_epochs), 1),
        "batch_size": args.per_device_train_batch_size,
        "accumulation": args.gradient_accumulation_steps,
        "lr": float(args.learning_rate),
        "weight_decay": float(args.weight_decay),
        "warmup_steps": args.get_warmup_steps(state.max_steps),
        "clip_norm": float(args.max_grad_norm) or None,
        "seed": args.seed,
        "workers": args.world_size,
    }
    if (zero := getattr(args, "hf_deepspeed_config", None)) is not None:
        chosen["zero_stage"] = zero.get_value("zero_optimization.stage", 0)
    if optimizer in _OPTIMIZERS:
        chosen["optimizer"] = _OPTIMIZERS[optimizer]
    if schedule in _SCHEDULES:
        chosen["schedule"] = schedule
    declared = FinetuneSettings.declarations()
    defaults = {name: each.default for name, each in declared.items()}
    known = {name: value for name, value in known.items() if name in declared}
    return {**defaults, **known, **chosen}


def _arguments(args: TrainingArguments) -> dict[str, Any]:
    """The Trainer's own arguments without its folders; tokens are not among them."""
    told: dict[str, Any] = args.to_sanitized_dict()
    return {name: value for name, value in told.items() if not name.endswith(("_dir", "_token"))}
