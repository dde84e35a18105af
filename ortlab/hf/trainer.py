"""Trainer of transformers with ortlab's engines as arguments."""

from __future__ import annotations

import contextvars
import threading
from typing import TYPE_CHECKING, Any, Final

import torch
import transformers
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback

from ortlab.engines import compatibility
from ortlab.engines.registry import resolved
from ortlab.hf import zero
from ortlab.hf.callback import FP16_ON_CPU, OrtLabCallback
from ortlab.session import session
from ortlab.settings import IN_ORT, EngineSettings
from ortlab.utils.interrupts import until

if TYPE_CHECKING:
    from torch import nn
    from transformers.trainer_utils import TrainOutput

    from ortlab.training.trainer_run import TrainerRun

_COMPILED: Final = (
    "torch_compile=True and an engine of ORT both replace forward; remove one of them"
)


class Trainer(transformers.Trainer):
    """A `transformers.Trainer` that wraps its model and shows its runs.

    In a notebook with the extension loaded, charts replace the progress bar. With several
    processes, the loss of a model that ignores ``num_items_in_batch`` stays the mean, which
    transformers would multiply by the number of processes.

    Args:
        model: The model; wrapped unless it is wrapped already.
        args: Arguments of the training.
        *more: Further arguments of `transformers.Trainer`.
        **keywords: Further arguments of `transformers.Trainer`; settings of
            `ortlab.settings.EngineSettings`, such as ``engine`` (default ``"auto"``,
            ORT where it runs), ``recompute``, ``precision`` and ``fallback``; and
            ``zero_stage``, 1 to 3, which partitions optimizer state (1), gradients too (2) and
            weights too (3) across the processes of ``torchrun`` by DeepSpeed (see
            `ortlab.hf.zero`). Stages 1 and 2 work with engines ``"ort"``, ``"ortmodule"`` and
            ``"eager"``, stage 3 with ``"eager"``.

    Raises:
        ValueError: If arguments exclude each other: engine settings with a model that is already
            wrapped; ``precision`` with an engine of torch, which takes ``bf16=True`` of
            TrainingArguments; ``torch_compile=True`` with an engine of ORT; ``fp16=True`` on
            a CPU; ``zero_stage`` in a single process, with an optimizer that does not update
            element by element, or when resuming from a checkpoint.

    Example:
        >>> trainer = ortlab.hf.Trainer(model, args, train_dataset=data, engine="ortmodule")
        >>> await trainer.train_async()
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: transformers.TrainingArguments | None = None,
        *more: Any,
        **keywords: Any,
    ) -> None:
        declared = EngineSettings.declarations()
        given = {name: keywords.pop(name) for name in list(keywords) if name in declared}
        self._stage = zero.check_stage(keywords.pop("zero_stage", 0))
        self._is_count_checked = False
        self._asked = EngineSettings.of(given)
        compiled = _COMPILED if args is not None and args.torch_compile else None
        in_ort = self._asked.replace(engine="ortmodule")
        conflict = compatibility.trainer_conflict(self._stage, in_ort) if self._stage else None
        self._in_torch = compiled or conflict
        self._settings, _ = resolved(self._asked, in_torch=self._in_torch)
        entry = None if model is None else session.wrapped.entry(model)
        own = self._settings if entry is None else entry.settings
        if own.engine in IN_ORT and compiled is not None:
            raise ValueError(compiled)
        if args is not None and args.fp16 and args.device.type == "cpu":
            raise ValueError(
                f"fp16=True: {FP16_ON_CPU}; choose bf16=True, or remove it for float32"
            )
        if self._settings.engine != "ortmodule" and self._settings.precision != "fp32":
            raise ValueError(
                f"precision={self._settings.precision!r} with engine={self._settings.engine!r}: "
                "give TrainingArguments bf16=True or fp16=True"
            )
        if self._stage:
            args = zero.arguments(self._stage, args, own)
        if model is not None:
            model = self._wrapped(model, given)
        super().__init__(model, args, *more, **keywords)
        self._watch = (
            next(
                (one for one in self.callback_handler.callbacks if isinstance(one, OrtLabCallback)),
                None,
            )
            or OrtLabCallback()
        )
        if self._watch not in self.callback_handler.callbacks:
            self.add_callback(self._watch)
        if session.viewers:
            # The first is a table in a notebook and a bar elsewhere.
            for kind in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
                self.remove_callback(kind)

    def __repr__(self) -> str:
        kind = type(self.accelerator.unwrap_model(self.model)).__name__
        return f"<Trainer of a {kind}: engine {self._settings.engine!r}, run {self.run!r}>"

    @property
    def run(self) -> TrainerRun | None:
        """Run of the last ``train``: its state, metrics and folder; None before the first one."""
        return self._watch.run

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """See `transformers.Trainer.call_model_init`; the model is wrapped."""
        return self._wrapped(super().call_model_init(trial), {})

    def create_optimizer(self, *args: Any, **keywords: Any) -> torch.optim.Optimizer:
        """See `transformers.Trainer.create_optimizer`; checked if ZeRO partitions tensors."""
        found = super().create_optimizer(*args, **keywords)
        if self._stage:
            zero.check_optimizer(self._stage, found)
        return found

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """See `transformers.Trainer.compute_loss`; with several processes it is the mean, too."""
        if (
            not self._is_count_checked
            and num_items_in_batch is not None
            and self.accelerator.num_processes > 1
        ):
            self._is_count_checked = True
            if self._ignores_count(model, inputs, num_items_in_batch):
                # The Trainer then divides by the number of micro-batches and does not multiply.
                self.model_accepts_loss_kwargs = False
                num_items_in_batch = None
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def train(self, *args: Any, **keywords: Any) -> TrainOutput:
        """See `transformers.Trainer.train`; the state of the run records how it ended."""
        if self._stage and (args[:1] or keywords.get("resume_from_checkpoint")):
            zero.refuse_checkpoint(self._stage, "resume_from_checkpoint")
        try:
            return super().train(*args, **keywords)
        except BaseException as error:
            self._watch.ended(error)
            raise

    async def train_async(self, *args: Any, **keywords: Any) -> TrainOutput:
        """Run `train` in a thread of its own, so that the buttons of the charts work: ``await`` it.

        An interrupt of the wait stops the run after the step in flight.

        Args:
            *args: Arguments of `train`.
            **keywords: Arguments of `train`.

        Returns:
            The result of `train`.

        Raises:
            BaseException: What `train` raised.
        """
        over = threading.Event()
        found: list[TrainOutput] = []
        raised: list[BaseException] = []

        def drive() -> None:
            try:
                found.append(self.train(*args, **keywords))
            # Raised where it is awaited.
            except BaseException as error:  # noqa: BLE001
                raised.append(error)
            over.set()

        def stop() -> None:
            if self.run is not None:
                self.run.stop()

        context = contextvars.copy_context()  # output of the thread appears below its own cell
        thread = threading.Thread(target=context.run, args=(drive,), name="ortlab-trainer")
        thread.start()
        await until(over, stop)
        thread.join()
        if raised:
            raise raised[0]
        return found[0]

    def _ignores_count(self, model: nn.Module, inputs: dict[str, Any], count: Any) -> bool:
        """Return whether the loss ignores ``num_items_in_batch``; evaluates the model twice."""
        if not self.model_accepts_loss_kwargs or self.compute_loss_func is not None:
            return False
        module = self.accelerator.unwrap_model(model)
        entry = session.wrapped.entry(module)
        module = module if entry is None else entry.engine.unwrap(module)
        modes = [(each, each.training) for each in module.modules()]
        module.eval()  # no dropout, no statistics
        try:
            with torch.no_grad(), self.compute_loss_context_manager():
                once, twice = (
                    module(**inputs, num_items_in_batch=items) for items in (count, 2 * count)
                )
        finally:
            for each, mode in modes:
                each.training = mode
        losses = (each["loss"] if isinstance(each, dict) else each[0] for each in (once, twice))
        return zero.ignores_count(*(float(loss) for loss in losses))

    def _wrapped(self, model: nn.Module, given: dict[str, Any]) -> nn.Module:
        entry = session.wrapped.entry(model)
        if entry is None:
            return session.wrapped.wrap(model, self._asked, in_torch=self._in_torch)
        if given:
            raise ValueError(
                f"the model is already wrapped (engine {entry.settings.engine!r}); pass "
                f"{', '.join(given)} to ortlab.wrap"
            )
        return model
