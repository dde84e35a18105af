"""`ORTTrainer`: a whole training step in one call, as in ORT's first training API."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

from ortlab.checkpoint.checkpoint import Checkpoint, Position
from ortlab.checkpoint.checks import check_kept, check_model, check_optimizer
from ortlab.deploy.call import ModelCall
from ortlab.engines import compatibility
from ortlab.engines.base import EngineUnavailable, NotFinite, unfit
from ortlab.engines.loss_scale import ScaleRule, check_loss_scale
from ortlab.engines.registry import refusal
from ortlab.engines.torch.stepper import groups_with, modes_of, set_modes
from ortlab.optim.config import OptimizerConfig
from ortlab.orttrainer.description import Description
from ortlab.orttrainer.objective import Inference, Loss, Objective, axes_of
from ortlab.orttrainer.options import GRAPHS, ORTTrainerOptions
from ortlab.orttrainer.steps import FusedSteps, Steps, TorchSteps, check_world, in_first_process
from ortlab.settings import FinetuneSettings, unknown_name
from ortlab.utils.errors import brief
from ortlab.utils.rng import RandomStates

_STATE = {"exp_avg": "Moment_1", "exp_avg_sq": "Moment_2", "step": "Update_Count"}
"""Names of an optimizer's state in torch, with ORT's names for them."""
_OPTIMIZERS = {"SGDOptimizer": "sgd", "AdamOptimizer": "adamw", "LambOptimizer": "lamb"}
"""Names of ORT's optimizers, with those of the setting ``optimizer``."""


def _settings_of(path: str | Path, found: Checkpoint) -> tuple[dict[str, Any], float]:
    """Return the user's values and the learning rate of an ORTTrainer's checkpoint."""
    user_dict, lr = found.settings["orttrainer"], found.settings.get("learning_rate")
    if isinstance(user_dict, dict) and isinstance(lr, int | float) and math.isfinite(lr):
        return user_dict, lr
    raise ValueError(f"{path} is not a checkpoint of an ORTTrainer; use another checkpoint")


@dataclass
class TrainStepInfo:
    """Information that a scheduler gets; see `ortlab.optim.lr_scheduler.StepInfo`.

    ``step`` counts calls of `ORTTrainer.train_step`. With gradient accumulation several of them
    make one optimizer step. ``all_finite`` is False after a step that a loss scaler skipped, which
    does not count as an optimization step.
    """

    optimizer_config: OptimizerConfig
    optimization_step: int = 0
    step: int = 0
    all_finite: bool = True


class ORTTrainer:
    """Trainer that runs forward, backward and optimizer step of a model in one call into ORT.

    The model is trained in place: its weights stay its own tensors. Evaluation runs in ORT as well.
    The interface is that of onnxruntime.training.ORTTrainer of ORT 1.5 to 1.13. The argument order
    of ORT's slides is also accepted: model, optimizer, model_desc, criterion.

    Args:
        model: The model.
        model_desc: A dictionary of the model's "inputs" and "outputs" in order, each (name, sizes).
            A size that may change between calls is a name. The output that is the loss has True as
            a third value. If the label or the loss are missing they are added, with a note in
            `notes`.
        optim_config: One of `ortlab.optim`.
        loss_fn: Called with the model's result and the label, which is the input that forward has
            no parameter for. None if the model returns its loss.
        options: A dictionary; see `ORTTrainerOptions`.

    Raises:
        ValueError: If an argument is invalid.
        EngineUnavailable: If ORT cannot run here.
    """

    @brief
    def __init__(
        self,
        model: nn.Module,
        model_desc: Any,
        optim_config: Any,
        loss_fn: Loss | None = None,
        options: ORTTrainerOptions | Mapping[str, Any] | None = None,
    ) -> None:
        if _is_config(model_desc):
            model_desc, optim_config = optim_config, model_desc
        if not _is_config(optim_config):
            raise ValueError(
                f"optim_config={optim_config!r} is no optimizer configuration; use one of "
                "ortlab.optim, such as SGDConfig(lr=0.1)"
            )
        if not isinstance(model, nn.Module):
            raise ValueError(f"the model must be a torch.nn.Module, not {model!r}")
        if (reason := unfit(model)) is not None:
            raise ValueError(f"cannot train this {type(model).__name__}: it {reason}")
        self.options = (
            options if isinstance(options, ORTTrainerOptions) else ORTTrainerOptions(options)
        )
        self.model = model
        self.optim_config = optim_config
        self._notes: list[str] = []
        mixed = self.options.mixed_precision
        if mixed.enabled and mixed.loss_scaler is None:
            self._note(
                "mixed precision is bfloat16 in matrix products, without a loss scale; for float16 "
                "add 'loss_scaler': ortlab.optim.DynamicLossScaler()"
            )
        settings = self._settings()
        if (reason := refusal(settings)) is not None:
            raise EngineUnavailable(reason)
        objective = Objective(model, Description.of(model_desc), loss_fn, self._note)
        self.model_desc = objective.description
        """Inputs and outputs, including a label or a loss that was added."""
        self._freeze()
        model.to("cpu")
        self._objective = objective
        parameters = dict(model.named_parameters())
        self._steps: Steps
        if settings.model.engine == "ort":
            rule = None if mixed.loss_scaler is None else _rule(mixed.loss_scaler)
            self._steps = TorchSteps(objective, optim_config, parameters, settings, rule)
        else:
            self._steps = FusedSteps(objective, optim_config, parameters, settings)
        self._optimizer = self._steps.optimizer
        self._info = TrainStepInfo(optim_config)
        self._last: list[torch.Tensor] | None = None  # the last valid batch, for `save_as_onnx`
        self._taken = 0  # micro-batches of the current step
        self._saved = not self.options.debug.graph_save_paths

    # ---- steps

    @property
    def notes(self) -> list[str]:
        """Notes for the user: additions to ``model_desc``, and differences from ORT's trainer.

        Steps in the engine ``ort`` add what runs in torch, and why.
        """
        return [*self._notes, *self._steps.remarks()]

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on one batch.

        The last of ``gradient_accumulation_steps`` calls takes the optimizer step, with the mean of
        their gradients. With a loss scaler, a step whose gradients overflow float16 is skipped.

        Args:
            *args: The batch, in the order of `model_desc`.
            **kwargs: The batch, by the names of `model_desc`.

        Returns:
            The outputs of `model_desc`; a loss that was added is the first.

        Raises:
            NotFinite: If the loss or a gradient is not finite; weights and moments are unchanged.
            ValueError: If the batch does not match `model_desc`.
        """
        inputs, sizes = self._batch(args, kwargs)
        of = self.options.batch.gradient_accumulation_steps
        last = self._taken + 1 == of
        if last:
            self._set_rate()
        with self._deterministic():
            if not self.model.training:
                self.model.train()
            self._objective.training = True
            number, self._taken = self._taken + 1, 0  # after an error a step begins anew
            taken = self._steps.take(
                inputs, number=number, of=of, max_grad_norm=self._max_grad_norm()
            )
        if not self._saved:
            self._save_graphs()
        self._info.step += 1
        self._info.all_finite = taken.finite and not taken.skipped
        self._taken = 0 if last or not taken.finite else number
        if last:
            self._show_scale()
        if not taken.finite:
            raise NotFinite(
                f"the loss is {float(taken.outputs[0]):g} and the gradient's norm "
                f"{taken.norm:g} in step {self._info.optimization_step + 1}: the weights "
                "are unchanged; lower the learning rate, or check this batch"
            )
        self._info.optimization_step += last and not taken.skipped
        return self._outputs(taken.outputs, sizes)

    def eval_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch in ORT, without training.

        Args:
            *args: The batch, in the order of `model_desc`.
            **kwargs: The batch, by the names of `model_desc`.

        Returns:
            The outputs of `model_desc`, in evaluation mode.

        Raises:
            ValueError: If the batch does not match `model_desc`.
        """
        inputs, sizes = self._batch(args, kwargs)
        modes = modes_of(self._objective)
        self._objective.eval()
        try:
            with self._deterministic():
                outputs = self._steps.evaluate(inputs)
        finally:
            set_modes(modes)
        return self._outputs(outputs, sizes)

    def _batch(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, int]]:
        """Return the checked inputs of a step in order, and their sizes by name."""
        names = [each.name for each in self.model_desc.inputs]
        if len(args) > len(names):
            raise ValueError(f"{len(args)} inputs were given, but model_desc has {names}")
        given = dict(zip(names, args, strict=False))
        for name, value in kwargs.items():
            if name not in names:
                raise ValueError(f"{name!r} is no input: {unknown_name(name, names)}")
            if name in given:
                raise ValueError(f"{name!r} is given twice")
            given[name] = value
        if missing := [name for name in names if name not in given]:
            raise ValueError(f"{', '.join(missing)} is missing; pass {', '.join(names)}")
        inputs = [
            torch.as_tensor(given[name]) if isinstance(given[name], np.ndarray) else given[name]
            for name in names
        ]
        sizes: dict[str, int] = {}
        self.model_desc.check_inputs(inputs, sizes)
        self._last = inputs
        return inputs, sizes

    def _outputs(self, found: Sequence[torch.Tensor], sizes: dict[str, int]) -> Any:
        loss, *others = found
        others.insert(self.model_desc.loss or 0, loss.reshape(()))
        self.model_desc.check_outputs(others, sizes)
        kept = others[: len(self.model_desc.outputs)]
        return kept[0] if len(kept) == 1 else kept

    def _set_rate(self) -> None:
        scheduler = self.options.lr_scheduler
        lr = self.optim_config.lr
        if scheduler is not None:
            (lr,) = scheduler.get_lr(self._info)
        for group in self._optimizer.param_groups:
            group["lr"] = float(lr)

    def _max_grad_norm(self) -> float | None:
        if not self.options.utils.grad_norm_clip:
            return None
        found: float | None = self.optim_config.defaults.get("max_norm_clip")
        return found

    @contextlib.contextmanager
    def _deterministic(self) -> Iterator[None]:
        if not self.options.debug.deterministic_compute:
            yield
            return
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return copies of weights, optimizer state and counters, named as in ORT's first API.

        Of several processes all call this, and each gets the whole state.
        """
        trained = self._trained()
        optimizer = {
            trained[number][0]: {_STATE.get(k, k): v.clone() for k, v in state.items()}
            for number, state in self._optimizer.state_dict()["state"].items()
        }
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        scale = self._steps.loss_scale()
        return {
            "model": {"full_precision": weights},
            "optimizer": optimizer,
            "train_step_info": self._counters(),
            **({} if scale is None else {"loss_scale": scale}),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state.

        Args:
            state_dict: A state as `state_dict` returns it.
            strict: False to ignore weights that only the model or only the state has.

        Raises:
            ValueError: If the state does not match; nothing has changed then.
        """
        self._between_steps("load")
        weights = self._fitting(state_dict["model"]["full_precision"], strict)
        parameters = dict(self.model.named_parameters())
        named = {ours: name for name, ours in _STATE.items()}
        for name, state in state_dict["optimizer"].items():
            if name not in parameters:
                raise ValueError(
                    f"the optimizer's state has {name!r}, which is no parameter of the model"
                )
            check_kept(state, name, parameters[name])
        check_loss_scale(state_dict.get("loss_scale"))
        self.model.load_state_dict(weights)
        kept = state_dict["optimizer"]
        states = {
            number: {named.get(key, key): value.clone() for key, value in kept[name].items()}
            for number, (name, _) in enumerate(self._trained())
            if name in kept
        }
        groups = self._optimizer.state_dict()["param_groups"]
        self._restore({"state": states, "param_groups": groups}, state_dict.get("loss_scale"))
        self._count(state_dict["train_step_info"])

    def save_checkpoint(
        self,
        path: str | Path,
        user_dict: Mapping[str, Any] | None = None,
        include_optimizer_states: bool = True,
    ) -> Path:
        """Write a checkpoint, from which training can be resumed bit for bit.

        Of several processes all call this, and the first one writes the file.

        Args:
            path: The safetensors file.
            user_dict: Plain values and tensors to store with it.
            include_optimizer_states: False to omit the optimizer's state.

        Returns:
            The file's path.

        Raises:
            ValueError: In the middle of an optimizer step.
        """
        self._between_steps("save")
        seed = int(np.random.SeedSequence([self._info.step, 1]).generate_state(1)[0]) >> 1
        self._steps.reseed(seed)  # for generators whose state cannot be read
        optimizer = self._optimizer.state_dict()
        if not include_optimizer_states:
            optimizer["state"] = {}
        checkpoint = Checkpoint(
            model=self.model.state_dict(),
            optimizer=optimizer,
            position=Position(
                step=self._info.optimization_step,
                epoch=0,
                read=self._info.step,
                length=None,
                unit="micro-batches",
                evaluated=-1,
                random=RandomStates.now(),
                order=None,
                engine_seed=seed,
            ),
            settings={"orttrainer": dict(user_dict or {}), "learning_rate": self.optim_config.lr},
            loss_scale=self._steps.loss_scale(),
        )
        if self.options.distributed.world_size > 1:
            in_first_process(functools.partial(checkpoint.save, path))
            return Path(path)
        return checkpoint.save(path)

    def load_checkpoint(self, path: str | Path, strict: bool = True) -> dict[str, Any]:
        """Resume from a checkpoint, including the state of the random number generators.

        Args:
            path: A file that `save_checkpoint` wrote.
            strict: False to ignore weights that only the model or only the file has.

        Returns:
            The file's ``user_dict``.

        Raises:
            ValueError: If the file does not match; nothing has changed then.
        """
        self._between_steps("load")
        found = Checkpoint.load(path)
        if "orttrainer" not in found.settings:
            raise ValueError(f"{path} is a run's checkpoint; pass it to finetune as resume_from")
        user_dict, lr = _settings_of(path, found)
        weights = self._fitting(found.model, strict)
        own, kind = self._optimizer.state_dict(), _OPTIMIZERS[self.optim_config.name]
        check_optimizer(found.optimizer, own, self._trained(), kind)
        check_loss_scale(found.loss_scale)
        groups = groups_with(found.optimizer["param_groups"], own["param_groups"])
        self.model.load_state_dict(weights)
        self._restore({**found.optimizer, "param_groups": groups}, found.loss_scale)
        self.optim_config.lr = lr
        self._count({"optimization_step": found.position.step, "step": found.position.read})
        found.position.random.give_back()
        self._steps.reseed(found.position.engine_seed)
        return user_dict

    def save_as_onnx(self, path: str | Path) -> None:
        """Write the trained model for inference, without loss and dropout, as one ONNX file.

        Inputs and outputs have the names and sizes of `model_desc`. The file is compared with torch
        in onnxruntime before it appears; see `ortlab.export`.

        Args:
            path: The file.

        Raises:
            ValueError: Before the first step.
        """
        from ortlab.deploy import inference  # heavy: ortlab.deploy

        if self._last is None:
            raise ValueError("no batch was seen yet; train or evaluate once, then save")
        given = {
            each.name: tensor
            for each, tensor in zip(self.model_desc.inputs, self._last, strict=True)
            if not self._objective.is_answer(each.name)
        }
        call = ModelCall(Inference(self._objective), (), given)
        inference.one_file(self.model, call, axes_of(self.model_desc, given), path)

    def _fitting(self, weights: Mapping[str, Any], strict: bool) -> Mapping[str, Any]:
        """Return the weights to load, checked; not `strict`, only those that both have."""
        own = self.model.state_dict()
        if not strict:
            weights = {name: weights.get(name, value) for name, value in own.items()}
        check_model(weights, own)
        return weights

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        """Return the optimizer's parameters with their names, in its order."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        groups = self._optimizer.param_groups
        return [(names[id(p)], p) for group in groups for p in group["params"]]

    def _restore(self, optimizer: Mapping[str, Any], scale: Mapping[str, Any] | None) -> None:
        self._steps.load(optimizer, scale)
        self._show_scale()

    def _show_scale(self) -> None:
        """Set the scaler's attribute, which programs of that time read."""
        if (scale := self._steps.loss_scale()) is not None:
            self.options.mixed_precision.loss_scaler.loss_scale = scale["scale"]

    def _between_steps(self, verb: str) -> None:
        if self._taken:
            number = self.options.batch.gradient_accumulation_steps
            raise ValueError(
                f"only {self._taken} of {number} batches of a step were seen; {verb} after the last"
            )

    def _counters(self) -> dict[str, int]:
        return {"optimization_step": self._info.optimization_step, "step": self._info.step}

    def _count(self, counters: Mapping[str, int]) -> None:
        self._info.optimization_step = counters["optimization_step"]
        self._info.step = counters["step"]

    # ---- preparation

    def _settings(self) -> FinetuneSettings:
        """Return the settings of the steps; ValueError if the processes cannot train together."""
        mixed, several = self.options.mixed_precision, self.options.distributed
        size = several.world_size
        lowered = "bf16" if mixed.loss_scaler is None else "fp16"
        among: dict[str, Any] = {}
        if size > 1:
            among = {
                "workers": size,
                "zero_stage": self.options.zero_stage,
                "reduction": "adasum" if several.enable_adasum else "mean",
                "max_grad_norm": self._max_grad_norm(),
                "batch_size": size,  # a process may have batches of any size
            }
        settings = FinetuneSettings.of(
            engine="ort" if self.options.in_torch else "ort_fused",
            device="cpu",
            precision=lowered if mixed.enabled else "fp32",
            self_check=self.options.debug.check_model_export,
            optimizer=_OPTIMIZERS[self.optim_config.name],
            **among,
        )
        if size > 1:
            check_world(size, several.world_rank)
            if (reason := compatibility.group_conflict(settings, size, is_world=True)) is not None:
                # The option's name in ORT's API.
                told = reason.replace("max_grad_norm=None", "utils.grad_norm_clip=False")
                raise ValueError(f"distributed: {told}")
        return settings

    def _freeze(self) -> None:
        parameters = dict(self.model.named_parameters())
        for name in self.options.utils.frozen_weights:
            if name not in parameters:
                raise ValueError(f"frozen_weights has {name!r}: {unknown_name(name, parameters)}")
            parameters[name].requires_grad_(False)
        if not any(p.requires_grad for p in parameters.values()):
            raise ValueError("frozen_weights leaves no parameter to train; remove one of them")

    def _save_graphs(self) -> None:
        found = dict(zip(GRAPHS, self._steps.graphs(), strict=True))
        for name, path in self.options.debug.graph_save_paths.items():
            onnx.save(found[name], str(path))
        self._saved = True

    def _note(self, text: str) -> None:
        self._notes.append(text)
        warnings.warn(text, stacklevel=5)

    def __repr__(self) -> str:
        step = self._info.optimization_step
        return f"<ORTTrainer of {type(self.model).__name__} after {step} steps>"


def _rule(scaler: Any) -> ScaleRule:
    """Return the rule of a loss scaler of `ortlab.optim`, or of ORT's package amp."""
    scale = float(scaler.loss_scale)
    if not scaler.automatic_update:
        return ScaleRule(scale, least=scale, most=scale)
    return ScaleRule(
        scale,
        scaler.up_scale_window,
        scaler.min_loss_scale,
        scaler.max_loss_scale,
    )


def _is_config(value: Any) -> bool:
    """Return whether `value` is a configuration of `ortlab.optim`, or of ORT's same package."""
    return all(hasattr(value, name) for name in ("name", "defaults", "params", "lr"))
