"""Options of `ORTTrainer`: the dictionary of ORT's first training API, validated.

Options of that API that no engine supports anymore raise an error that says how to do it in ortlab.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ortlab.optim.loss_scaler import DynamicLossScaler
from ortlab.settings import unknown_name


@dataclass(frozen=True)
class _Option:
    """One option: type, default, minimum, and the advice if another value is unsupported."""

    type: Any
    default: Any
    refuse: str = ""
    minimum: int | None = None


def _on_workers(more: str) -> str:
    return f"train on workers: ortlab.finetune(model, data, workers=2, {more})"


_SCHEMA: Mapping[str, Mapping[str, _Option]] = {
    "batch": {"gradient_accumulation_steps": _Option(int, 1, minimum=1)},
    "device": {
        "id": _Option(str, "cpu"),
        "mem_limit": _Option(int, 0, "ORT's arena cannot be limited here; see %ort graph --memory"),
    },
    "distributed": {
        "world_rank": _Option(int, 0, minimum=0),
        "world_size": _Option(int, 1, minimum=1),
        "local_rank": _Option(int, 0, minimum=0),
        "data_parallel_size": _Option(int, 1, minimum=1),
        "horizontal_parallel_size": _Option(int, 1, _on_workers("tensor_parallel=2")),
        "allreduce_post_accumulation": _Option(bool, False),
        "enable_adasum": _Option(bool, False),
        "deepspeed_zero_optimization": _Option(Mapping, {}),
        "pipeline_parallel": _Option(Mapping, {}, _on_workers("pipeline_stages=2")),
    },
    "mixed_precision": {
        "enabled": _Option(bool, False),
        "loss_scaler": _Option(object, None),
    },
    "utils": {
        "frozen_weights": _Option((list, tuple), ()),
        "grad_norm_clip": _Option(bool, True),
    },
    "debug": {
        "deterministic_compute": _Option(bool, False),
        "check_model_export": _Option(bool, True),
        "graph_save_paths": _Option(Mapping, {}),
    },
}
GRAPHS = (
    "model_after_graph_transforms_path",
    "model_with_gradient_graph_path",
    "model_with_training_graph_path",
)
"""Keys of ``graph_save_paths``: forward after ORT's rewrites, with gradient, whole step."""


class ORTTrainerOptions:
    """Options by their names in ORT's first training API, such as ``options.utils.frozen_weights``.

    - ``batch``: ``gradient_accumulation_steps``
    - ``device``: ``id``, which has to be "cpu"
    - ``distributed``: ``world_size`` and ``world_rank``, size and rank of the process group that
      the script has initialized; ``deepspeed_zero_optimization``, {"stage": 1} to partition the
      optimizer's state; ``enable_adasum``. Gradients are reduced once per step, with any
      ``allreduce_post_accumulation``
    - ``lr_scheduler``: one of `ortlab.optim.lr_scheduler`
    - ``mixed_precision``: ``enabled``, which means bfloat16 in matrix products, and
      ``loss_scaler``, an `ortlab.optim.DynamicLossScaler`, with which it means float16
    - ``utils``: ``frozen_weights``, a list of names; ``grad_norm_clip``, True if the optimizer's
      ``max_norm_clip`` is applied
    - ``debug``: ``deterministic_compute``; ``check_model_export``, True to compare the graph with
      eager torch; ``graph_save_paths``, see `GRAPHS`

    Args:
        options: The options as a nested dictionary; None uses the defaults.

    Raises:
        ValueError: For an unknown option or an unsupported value.
    """

    batch: SimpleNamespace
    device: SimpleNamespace
    distributed: SimpleNamespace
    mixed_precision: SimpleNamespace
    utils: SimpleNamespace
    debug: SimpleNamespace

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        given = dict(options or {})
        self.lr_scheduler = given.pop("lr_scheduler", None)
        if self.lr_scheduler is not None and not hasattr(self.lr_scheduler, "get_lr"):
            raise ValueError(
                f"lr_scheduler={self.lr_scheduler!r} has no get_lr(info); use one of "
                "ortlab.optim.lr_scheduler"
            )
        for section in given:
            if section not in _SCHEMA:
                known = (*_SCHEMA, "lr_scheduler")
                raise ValueError(f"options has {section!r}: {unknown_name(section, known)}")
        for section, known_options in _SCHEMA.items():
            setattr(self, section, _section(section, known_options, given.get(section, {})))
        if self.device.id != "cpu":
            raise ValueError(
                f"device.id={self.device.id!r}: ORTTrainer trains on a CPU; on a GPU use "
                "ortlab.finetune(model, data, engine='ortmodule', device='cuda')"
            )
        self._check_distributed()
        scaler = self.mixed_precision.loss_scaler
        if scaler is not None and not self.mixed_precision.enabled:
            raise ValueError(
                "mixed_precision.loss_scaler has no effect without float16; add 'enabled': True"
            )
        if scaler is not None and not _is_scaler(scaler):
            raise ValueError(
                f"mixed_precision.loss_scaler={scaler!r} is not supported; use "
                "ortlab.optim.DynamicLossScaler()"
            )
        if self.in_torch and self.debug.graph_save_paths:
            raise ValueError(
                "debug.graph_save_paths with a loss_scaler or several processes: there is no graph "
                "of the whole step, as the optimizer runs in torch; remove graph_save_paths"
            )
        for name in self.debug.graph_save_paths:
            if name not in GRAPHS:
                raise ValueError(f"graph_save_paths has {name!r}: {unknown_name(name, GRAPHS)}")

    @property
    def in_torch(self) -> bool:
        """True if the optimizer runs in torch: with a loss scale, or in several processes."""
        return self.mixed_precision.loss_scaler is not None or self.distributed.world_size > 1

    @property
    def zero_stage(self) -> int:
        """ZeRO stage, 0 or 1."""
        return int(self.distributed.deepspeed_zero_optimization.get("stage", 0))

    def _check_distributed(self) -> None:
        chosen = self.distributed
        for name, value in chosen.deepspeed_zero_optimization.items():
            if name != "stage":
                raise ValueError(
                    f"deepspeed_zero_optimization has {name!r}: {unknown_name(name, ['stage'])}"
                )
            if value not in (0, 1) or isinstance(value, bool):
                raise ValueError(
                    f"deepspeed_zero_optimization.stage={value!r} must be 0 or 1; for stages 2 and "
                    f"3 {_on_workers('zero_stage=2')}"
                )
        size = chosen.world_size
        if chosen.world_rank >= size:
            raise ValueError(
                f"distributed.world_rank={chosen.world_rank} must be below world_size={size}"
            )
        if chosen.data_parallel_size not in (1, size):
            raise ValueError(
                f"distributed.data_parallel_size={chosen.data_parallel_size} must be "
                f"world_size={size}, as all processes are data parallel; for other kinds of "
                f"parallelism {_on_workers('tensor_parallel=2')}"
            )

    def __repr__(self) -> str:
        parts = {name: vars(getattr(self, name)) for name in _SCHEMA}
        return f"ORTTrainerOptions({parts | {'lr_scheduler': self.lr_scheduler}!r})"


def _is_scaler(value: Any) -> bool:
    """Return whether `value` is a `DynamicLossScaler`, or ORT's class of that name itself."""
    kind = type(value)
    ours = kind.__module__.startswith("onnxruntime.training.amp")
    return isinstance(value, DynamicLossScaler) or (ours and kind.__name__ == "DynamicLossScaler")


def _section(section: str, known: Mapping[str, _Option], given: Any) -> SimpleNamespace:
    if not isinstance(given, Mapping):
        raise ValueError(f"options[{section!r}] must be a dictionary, not {given!r}")
    values = {name: option.default for name, option in known.items()}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"options[{section!r}] has {name!r}: {unknown_name(name, known)}")
        option = known[name]
        wrong_bool = isinstance(value, bool) and option.type is int
        if wrong_bool or not isinstance(value, option.type):
            raise ValueError(f"{section}.{name}={value!r} has type {type(value).__name__}")
        if option.minimum is not None and value < option.minimum:
            raise ValueError(f"{section}.{name}={value!r} must be at least {option.minimum}")
        if option.refuse and value != option.default:
            raise ValueError(
                f"{section}.{name}={value!r} is not supported by ORTTrainer; {option.refuse}"
            )
        values[name] = value
    return SimpleNamespace(**values)
