"""Callback of transformers that shows a Trainer's run as live charts and saves its history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ortlab.engines.base import wrapped_model
from ortlab.session import session
from ortlab.training.trainer_run import TrainerRun, settings_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerState, TrainingArguments

FP16_ON_CPU = "accelerate silently trains in float32 on a CPU"
"""Effect of ``fp16=True`` on a CPU."""

_OPTIMIZERS = {"adamw": "adamw", "sgd": "sgd"}
_SCHEDULES = ("linear", "constant", "cosine")


class OrtLabCallback(TrainerCallback):
    """Shows each run of a `transformers.Trainer` live and saves it: ``callbacks=[OrtLabCallback]``.

    It records loss, learning rate, throughput, times and memory of every step regardless of what
    the Trainer logs, its evaluations, and the gradient norm if it is logged. The model may be
    wrapped or not. With several processes only the first one reports.

    A Trainer whose ``train`` raises does not tell its callbacks. The run then counts as failed when
    the next one begins or Python exits. `ortlab.hf.Trainer` reports the error at once.

    On a GPU, ORT's dropout is reseeded at the beginning and at each checkpoint, so that a run that
    resumes there draws the same masks as an uninterrupted one.

    Args:
        name: Name of the run; None for the next run-N.
    """

    def __init__(self, name: str | None = None) -> None:
        self.run: TrainerRun | None = None
        """The active run, or the last one."""
        self._name = name

    def __repr__(self) -> str:
        return f"OrtLabCallback(run={self.run!r})"

    # The Trainer passes its arguments, state and control, and by name the objects that it uses.

    def on_train_begin(self, *arguments: Any, **objects: Any) -> None:
        """Begin a run."""
        args, state, _ = arguments
        model = objects["model"]
        _restart_dropout(model, args, state)
        if not state.is_world_process_zero:
            return
        if self.run is not None:
            self.run.supersede()
        entry = session.wrapped.entry(model)
        self.run = TrainerRun(
            model,
            total_steps=state.max_steps,
            step=state.global_step,
            settings=_settings(model, args, state),
            arguments=_arguments(args),
            name=self._name,
            choice="" if entry is None else entry.choice,
        )
        session.trainers.append(self.run)
        if _is_idle_fp16(args):
            self.run.tell("warning", f"fp16=True has no effect: {FP16_ON_CPU}")
        session.show(self.run)

    def on_step_begin(self, *_: Any, **objects: Any) -> None:
        """Begin an optimizer step."""
        if self.run is not None:
            scaler = getattr(objects.get("optimizer"), "scaler", None)
            self.run.begin_step(scaled=scaler is not None and scaler.is_enabled())

    def on_step_end(self, *arguments: Any, **_: Any) -> None:
        """End an optimizer step."""
        _, state, control = arguments
        if self.run is not None:
            self.run.end_step(state.global_step, float(state.epoch or 0.0))
            if self.run.stopping:
                control.should_training_stop = True

    def on_log(self, *_: Any, **objects: Any) -> None:
        """Add what the Trainer logs."""
        if self.run is not None and not self.run.over():
            self.run.logged(objects["logs"])
            self.run.free()

    def on_evaluate(self, *_: Any, **objects: Any) -> None:
        """Record an evaluation."""
        if self.run is not None:
            self.run.evaluated(objects["metrics"])

    def on_save(self, *arguments: Any, **objects: Any) -> None:
        """Record that a checkpoint was written."""
        args, state, _ = arguments
        _restart_dropout(objects["model"], args, state)
        if self.run is not None:
            self.run.tell("checkpoint", f"checkpoint-{state.global_step} was written")
            self.run.free()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """End the run; ``train`` is about to return."""
        self.ended(None)

    def ended(self, error: BaseException | None) -> None:
        """End the active run, if there is one.

        Args:
            error: What ``train`` raised; None if it did not raise.
        """
        if self.run is not None:
            self.run.end(error)


def _is_idle_fp16(args: TrainingArguments) -> bool:
    return bool(args.fp16) and args.device.type == "cpu"


def _restart_dropout(model: nn.Module, args: TrainingArguments, state: TrainerState) -> None:
    if (wrapped := wrapped_model(model)) is not None:
        wrapped.reseed(args.seed + state.global_step)


def _settings(model: nn.Module, args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
    """Return the settings that correspond to the Trainer's arguments, as far as there are any."""
    known = settings_of(model)
    precision = known["precision"]
    if args.bf16 or (args.fp16 and not _is_idle_fp16(args)):
        precision = "bf16" if args.bf16 else "fp16"
    optimizer = str(getattr(args.optim, "value", args.optim)).partition("_")[0]
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    chosen = {
        "precision": precision,
        "max_steps": state.max_steps,
        "num_train_epochs": max(int(args.num_train_epochs), 1),
        "batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "learning_rate": float(args.learning_rate),
        "weight_decay": float(args.weight_decay),
        "warmup_steps": args.get_warmup_steps(state.max_steps),
        "max_grad_norm": float(args.max_grad_norm) or None,
        "seed": args.seed,
        "workers": args.world_size,
    }
    if (zero := getattr(args, "hf_deepspeed_config", None)) is not None:
        chosen["zero_stage"] = zero.get_value("zero_optimization.stage", 0)
    if optimizer in _OPTIMIZERS:
        chosen["optimizer"] = _OPTIMIZERS[optimizer]
    if schedule in _SCHEDULES:
        chosen["lr_scheduler_type"] = schedule
    return known | chosen


def _arguments(args: TrainingArguments) -> dict[str, Any]:
    """Return the Trainer's own arguments without folders and tokens."""
    found: dict[str, Any] = args.to_sanitized_dict()
    return {name: value for name, value in found.items() if not name.endswith(("_dir", "_token"))}
