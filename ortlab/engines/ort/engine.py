"""The engine ``ort``: training in today's onnxruntime, on any Python."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, cast

from torch import nn

from ortlab.engines.base import Capabilities, LossFunction, Report, unfit, wrapped_model
from ortlab.engines.single_process import OneProcess, Processes
from ortlab.engines.torch.stepper import Compile, TorchStepper, refuse_precision, stepper_for
from ortlab.settings import EngineSettings, FinetuneSettings
from ortlab.utils.files import file_prefix

if TYPE_CHECKING:
    from ortlab.engines.ort.model import OrtModel


class OrtEngine(Compile):
    """Engine that captures a model with torch.compile and runs its graphs in ORT."""

    name = "ort"
    capabilities = Capabilities(
        workers=True,
        zero_stages=(0, 1, 2, 3),
        recompute=True,
        activation_budget=True,
        options=("self_check", "fallback", "arena", "log_level", "save_onnx"),
        size_cost="recompile",
    )

    def unavailable(self) -> str | None:
        """See `Engine.unavailable`."""
        from ortlab.engines.ort import session  # heavy: torch and onnx

        return session.unavailable()

    def refuses(self, settings: EngineSettings, device: str) -> str | None:
        """See `Engine.refuses`."""
        if (reason := super().refuses(settings, device)) is not None:
            return reason
        try:
            _check(settings)
        except ValueError as error:
            return str(error)
        return None

    def wrap(self, model: nn.Module, settings: EngineSettings) -> nn.Module:
        """Return a module that runs `model` in ORT. Nothing is captured before its first call.

        Args:
            model: The user's module.
            settings: Settings that name this engine.

        Raises:
            ValueError: If no engine can train the model (see `base.unfit`), or the precision is
                not fp32; the user's loop sets that by autocast. Also if ``save_onnx`` names no
                file in a writable folder, or ``recompute`` names no modules of the model.
        """
        from ortlab.engines.ort import wrapper  # heavy: torch's compiler

        reason = unfit(model)
        if reason is not None:
            raise ValueError(f"cannot wrap this {type(model).__name__}: it {reason}")
        refuse_precision(settings)
        _check(settings)
        return wrapper.wrapped(model, settings)

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """See `Engine.unwrap`."""
        record = wrapped_model(wrapped)
        assert record is not None
        return record.module

    def report(self, wrapped: nn.Module) -> Report:
        """See `Engine.report`."""
        record = wrapped_model(wrapped)
        assert record is not None
        return record.report()

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
        own = settings.model.replace(precision="fp32")  # the stepper sets the precision
        record = wrapped_model(model)
        if record is None or record.engine != self.name:
            model = self.wrap(model, own)
            record = wrapped_model(model)
            assert record is not None
        ours, before = cast("OrtModel", record), record.settings
        made = stepper_for(
            self,
            model,
            loss,
            settings,
            processes,
            stepper,
            report=ours.begin_run(own),
            close=functools.partial(ours.end_run, before),
        )
        ours.anywhere = made.anywhere
        return made


def _check(settings: EngineSettings) -> None:
    """Raise ValueError for plans of ORTModule, and if graphs cannot be saved in the place given."""
    if ":" in settings.recompute:
        raise ValueError(
            f"recompute={settings.recompute!r} is a plan of engine 'ortmodule'; name modules, such "
            "as recompute='layers'"
        )
    if settings.ortmodule.save_onnx is not None:
        file_prefix(settings.ortmodule.save_onnx, "save_onnx")
