"""The engine ``ort``: training in today's onnxruntime, on any Python."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING

from torch import nn

from ortlab.engines.base import Capabilities, Cost, LossFunction, Report, unfit
from ortlab.engines.single_process import OneProcess, Processes
from ortlab.engines.torch.stepper import (
    TorchStepper,
    autocast_for,
    no_device,
    refuses_precision,
    training_device,
)
from ortlab.settings import EngineSettings, FinetuneSettings

if TYPE_CHECKING:
    from ortlab.engines.ort.model import OrtModel


class OrtEngine:
    """Engine that captures a model with torch.compile and runs its graphs in ORT."""

    name = "ort"
    capabilities = Capabilities(options=("self_check", "fallback"), size_cost="recompile")

    def unavailable(self) -> str | None:
        """See `Engine.unavailable`."""
        from ortlab.engines.ort import session  # heavy: torch and onnx

        return session.unavailable()

    def refuses(self, settings: EngineSettings, device: str) -> str | None:
        """See `Engine.refuses`."""
        return (
            self.unavailable() or no_device(device) or refuses_precision(settings.precision, device)
        )

    def cost(self, before: FinetuneSettings, after: FinetuneSettings) -> Cost:
        """See `Engine.cost`; torch compiles again for another precision or type of weights."""
        names = ("engine", "precision", "param_dtype")
        same = all(before[name] == after[name] for name in names)
        return "rebuild" if same else "recompile"

    def graph_key(self, settings: EngineSettings) -> Hashable:  # noqa: ARG002
        """See `Engine.graph_key`."""
        return None

    def graph_changes(self, before: EngineSettings, after: EngineSettings) -> str:  # noqa: ARG002
        """See `Engine.graph_changes`."""
        return ""

    def wrap(self, model: nn.Module, settings: EngineSettings) -> nn.Module:
        """Return a module that runs `model` in ORT. Nothing is captured before its first call.

        Args:
            model: The user's module.
            settings: Settings that name this engine.

        Raises:
            ValueError: If no engine can train the model (see `base.unfit`), or the precision is
                not fp32; the user's loop sets that by autocast.
        """
        from ortlab.engines.ort import wrapper  # heavy: torch's compiler

        reason = unfit(model)
        if reason is not None:
            raise ValueError(f"cannot wrap this {type(model).__name__}: it {reason}")
        if settings.precision != "fp32":
            raise ValueError(
                f"precision={settings.precision!r} of engine 'ort' applies only to runs of "
                "finetune; in your own loop use torch.autocast around forward and loss"
            )
        return wrapper.wrapped(model, settings)

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """See `Engine.unwrap`."""
        return _record(wrapped).module

    def report(self, wrapped: nn.Module) -> Report:
        """See `Engine.report`."""
        return _record(wrapped).report()

    def kept(self, wrapped: nn.Module) -> Mapping[str, int]:  # noqa: ARG002
        """See `Engine.kept`."""
        return {}

    def prepare(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        settings: FinetuneSettings,
        *,
        processes: Processes = OneProcess,
        stepper: type[TorchStepper] = TorchStepper,
    ) -> TorchStepper:
        """See `Engine.prepare`; the graphs of a wrapped model are used again."""
        from ortlab.engines.ort import wrapper  # heavy: torch's compiler

        device = training_device(settings.parallel.device)
        plain = settings.model.replace(precision="fp32")
        wrapped = model if wrapper.is_wrapped(model) else self.wrap(model, plain)
        wrapped.to(device)
        record = _record(wrapped)
        return stepper(
            wrapped,
            loss,
            settings,
            owner=record.module,
            device=device,
            report=record.report,
            autocast=functools.partial(autocast_for, settings.model.precision, device),
            processes=processes,
        )


def _record(wrapped: nn.Module) -> OrtModel:
    from ortlab.engines.ort import wrapper  # heavy: torch's compiler

    return wrapper.record_of(wrapped)
