"""Pipeline parallelism: each rank has one stage of a sequential model.

The schedule is DeepSpeed's (https://www.deepspeed.ai/tutorials/pipeline/): one forward, one
backward (Harlap et al. 2018, arXiv:1806.03377), with one update after all micro-batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from ortlab.engines import batch as batches
from ortlab.engines.base import Batch, Engine, LossFunction, Report
from ortlab.engines.distributed import deepspeed_library
from ortlab.engines.distributed.data_parallel import Ranks, leave
from ortlab.engines.distributed.pipeline_stages import Stages
from ortlab.engines.single_process import Share
from ortlab.engines.torch.stepper import Sums, TorchStepper
from ortlab.settings import FinetuneSettings


def prepare(
    engine: Engine,
    model: nn.Module,
    loss: LossFunction | None,
    settings: FinetuneSettings,
    group: dist.ProcessGroup,
) -> TorchStepper:
    """Return a stepper of one pipeline stage; `steppers.prepare` calls it.

    Each stage is a part of the model that the engine executes. Different micro-batches of a step
    are in different stages at the same time, so more of them (``accumulation``) keep more ranks
    busy.

    Args:
        engine: The engine that executes each stage.
        model: The model, an nn.Sequential.
        loss: The loss function, or None where the model returns its loss.
        settings: The run's settings; ``pipeline_stages`` is above 1.
        group: The process group of all ranks.

    Returns:
        The stepper.

    Raises:
        ValueError: If the model is no nn.Sequential, or cannot be split into that many stages.
    """
    stages = Stages(model, settings, group)
    try:
        stepper = engine.prepare(
            stages.own,
            loss,
            settings,
            processes=functools.partial(
                PipelineRanks, settings=settings, group=group, stages=stages
            ),
            stepper=PipelineStepper,
        )
    except BaseException:
        stages.restore()
        raise
    assert isinstance(stepper, PipelineStepper)
    stepper.reseed(settings.data.seed)
    return stepper


class _Stage(nn.Module):
    """Stage as DeepSpeed calls it: runs within a context and is timed.

    Its forward raises ValueError for an output that cannot get a gradient from the next stage.
    """

    def __init__(self, module: nn.Module, *, is_last: bool) -> None:
        super().__init__()
        self.module = module
        self._is_last = is_last
        self.context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        self.taken_s = 0.0

    def forward(self, hidden: Any) -> Any:
        """Return the input of the next stage, or the output of the last stage."""
        started = time.perf_counter()
        with self.context():
            found = self.module(hidden)
        self.taken_s += time.perf_counter() - started
        if self._is_last:
            return found
        if not isinstance(found, torch.Tensor) or not found.is_floating_point():
            raise ValueError(
                f"pipeline_stages: a stage passes {batches.describe(found)} to the next stage, and "
                "only a single floating-point tensor can have a gradient; choose another number of "
                "stages, or 1"
            )
        return found.contiguous()  # DeepSpeed sends only contiguous tensors


class _Given(nn.Module):
    """Module that returns an output that was computed before."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return the output."""
        return self._output


class PipelineRanks(Ranks):
    """Ranks that have one stage each of a model; ranks of the same stage are data parallel.

    - Dropout masks differ between ranks.
    - If a stage fails, the others wait for it until it leaves the process group, or until the
      group's timeout: they exchange nothing but activations and their gradients until all backward
      passes have ended.

    Args:
        module: The stage that the engine executes.
        loss: The loss function, or None where the model returns its loss.
        owner: The stage of the user's model inside `module`.
        device: The device that this rank trains on.
        settings: The run's settings.
        group: The process group of all ranks.
        stages: The model's stages.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: LossFunction | None,
        owner: nn.Module,
        device: torch.device,
        *,
        settings: FinetuneSettings,
        group: dist.ProcessGroup,
        stages: Stages,
    ) -> None:
        self._stages = stages
        self._stage_module = _Stage(module, is_last=stages.is_last)
        self._found: list[batches.Forward] = []
        self._micro_batches = 1
        self._engine: Any = None
        self._is_closed = False
        super().__init__(
            module, loss, owner, device, settings=settings, group=stages.data, everyone=group
        )

    def _made_parallel(self) -> Any:
        """Return DeepSpeed's engine, which only runs the forwards and backwards of a schedule."""
        self._end()
        library = deepspeed_library.library(self.device)
        layers: list[nn.Module] = [nn.Identity() for _ in range(self._stages.count)]
        layers[self._stages.place] = self._stage_module
        with contextlib.redirect_stdout(io.StringIO()):  # hides the topology and the seeds
            pipeline = library.pipe.PipelineModule(
                layers,
                num_stages=self._stages.count,
                loss_fn=self._loss_of,
                partition_method="uniform",
                dynamic_shape=True,  # the last batch may be smaller
            )
            engine = deepspeed_library.initialized(
                self.device,
                model=pipeline,
                # DeepSpeed requires an optimizer for a backward pass; nobody steps it.
                optimizer=torch.optim.SGD(self.owner.parameters(), lr=0.0),
                config={
                    "train_micro_batch_size_per_gpu": 1,
                    "gradient_accumulation_steps": 1,  # the schedule has the real number
                    "steps_per_print": 10**9,
                },
            )
        engine._INSTRUCTION_MAP = self._instructions(engine)
        self._engine = engine
        return engine

    def _instructions(self, engine: Any) -> dict[Any, Callable[..., None]]:
        """Return the engine's functions by instruction: exchanges are timed, updates skipped."""

        def timed(call: Callable[..., None]) -> Callable[..., None]:
            def exchange(*args: Any, **kwargs: Any) -> None:
                with self._clock:
                    call(*args, **kwargs)

            return exchange

        def nothing(_engine: Any) -> None:
            """Do nothing: `reduced`, `norm` and the stepper follow all backward passes."""

        changed = {}
        for instruction, call in type(engine)._INSTRUCTION_MAP.items():
            name = instruction.__name__
            if name.startswith(("Send", "Recv")):
                changed[instruction] = timed(call)
            elif name in ("OptimizerStep", "ReduceGrads", "ReduceTiedGrads"):
                changed[instruction] = nothing
            else:
                changed[instruction] = call
        return changed

    def _loss_of(self, output: Any, share: Share) -> torch.Tensor:
        """Return the scaled loss of the last stage's `output`, from which backward begins."""
        with self._stage_module.context():
            found = batches.forward(_Given(output), share.batch, self.loss)
        # Training does not use the scores, which would keep their graph alive.
        learns = torch.is_grad_enabled()
        kept = batches.Forward(found.loss.detach(), None, None) if learns else found
        self._found.append(kept)
        # DeepSpeed divides the gradients' sum over the data-parallel ranks by their number.
        return found.loss * (share.factor * self._size / self._micro_batches)

    def run(
        self,
        shares: Sequence[Share],
        context: Callable[[], AbstractContextManager[Any]],
        *,
        training: bool,
    ) -> tuple[list[batches.Forward], float]:
        """Run the schedule of one step or evaluation.

        Args:
            shares: This rank's rows of each micro-batch.
            context: Makes the context of each forward, such as autocast.
            training: True to run backward too, which adds the gradients of this rank's rows.

        Returns:
            The last stage's results by micro-batch, none on other stages, and the seconds of this
            stage's forwards.
        """
        engine = self._engine
        self._found, self._stage_module.taken_s = [], 0.0
        self._stage_module.context, self._micro_batches = context, len(shares)
        pipe = deepspeed_library.library(self.device).runtime.pipe
        kind = pipe.schedule.TrainSchedule if training else pipe.schedule.InferenceSchedule
        pipe.p2p.init_process_groups(engine.grid)  # global state: it was the newest engine's
        engine.set_dataiterator(iter([(self._input(share), share) for share in shares]))
        engine._compute_loss, engine.total_loss = True, None
        self._agreed = True  # from here on a failure cannot be reported: the others wait elsewhere
        engine._exec_schedule(
            kind(micro_batches=len(shares), stages=self._stages.count, stage_id=self._stages.place)
        )
        self._agreed = False
        return self._found, self._stage_module.taken_s

    def _input(self, share: Share) -> torch.Tensor:
        found = batches.tensors(batches.inputs(share.batch, self.loss))
        if len(found) != 1:
            raise ValueError(
                f"a Sequential takes one tensor, and the batch ({batches.describe(share.batch)}) "
                f"has {len(found)} besides the target; pass (input, target)"
            )
        return found[0]

    def reduced(self) -> None:
        """Average the gradients over the data parallel ranks.

        A parameter without a gradient on any rank still has none afterwards.
        """
        engine = self._engine
        parameters = [p for p in self.owner.parameters() if p.requires_grad]
        used = torch.tensor([p.grad is not None for p in parameters], device=self.device).float()
        with self._clock:
            dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
            engine._exec_reduce_grads()
        for parameter, is_used in zip(parameters, used.tolist(), strict=True):
            if not is_used:
                parameter.grad = None  # DeepSpeed has replaced it by zeros

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `OneProcess.norm`; the norm is that of all stages."""
        own = nn.utils.get_total_norm(gradients)
        squares = own.double().square() * self._stages.count / self._size
        return self._agree([squares])[0].sqrt().to(own.dtype)

    def forward(self, batch: Batch) -> batches.Forward:
        """See `OneProcess.forward`; only the last stage has a result."""
        kind = self.device.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # DeepSpeed turns autocast off inside its own forward.
        context = functools.partial(torch.autocast, kind, dtype, enabled=enabled)
        found, _ = self.run([Share(batch)], context, training=False)
        return found[0] if found else batches.Forward(self._zero(), None, None)

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), device=self.device)

    def _counted(self) -> int:
        """Return the factor of this stage's numbers in a sum that is divided by the stages."""
        return self._stages.count if self._stages.is_last else 0

    def total(self, losses: Sequence[torch.Tensor], samples: int) -> torch.Tensor:
        """See `OneProcess.total`; only the last stage has losses."""
        here = [loss * self._counted() for loss in losses] or [self._zero()]
        return super().total(here, samples)

    def evaluated(
        self, loss: torch.Tensor, part: float, correct: int, predicted: int
    ) -> tuple[torch.Tensor, int, int]:
        """See `OneProcess.evaluated`; only the last stage has results."""
        times = self._counted()
        return super().evaluated(loss * times, part, correct * times, predicted * times)

    def reseeded(self, seed: int) -> int:
        """See `Ranks.reseeded`."""
        return super().reseeded(seed * self._stages.count + self._stages.place)

    def weights(self) -> dict[str, Any]:
        """See `OneProcess.weights`; all ranks call it."""
        return self._stages.together(self.owner.state_dict())

    def take_weights(self, state: Mapping[str, Any]) -> None:
        """See `OneProcess.take_weights`."""
        own = self.owner.state_dict()
        self.owner.load_state_dict({name: state[name] for name in own})

    def whole_parameters(
        self,
        parameters: Sequence[torch.Tensor],  # noqa: ARG002
    ) -> list[tuple[str, torch.Tensor]]:
        """See `OneProcess.whole_parameters`; returns the parameters of all stages."""
        forms = self._stages.forms
        return [(name, forms[name]) for name in (*self._stages.matrices, *self._stages.vectors)]

    def _numbers(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """Return the number in the whole model of each parameter of this stage's `optimizer`."""
        order = [*self._stages.matrices, *self._stages.vectors]
        numbers = {name: number for number, name in enumerate(order)}
        names = {id(p): name for name, p in self.owner.named_parameters()}
        return [numbers[names[id(p)]] for g in optimizer.param_groups for p in g["params"]]

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """See `OneProcess.optimizer_state`; all ranks call it."""
        own, numbers = optimizer.state_dict(), self._numbers(optimizer)
        flat = self._stages.together(
            {
                (numbers[here], name): value
                for here, state in own["state"].items()
                for name, value in state.items()
            }
        )
        states: dict[int, dict[str, Any]] = {}
        for (number, name), value in sorted(flat.items(), key=lambda each: each[0][0]):
            states.setdefault(number, {})[name] = value
        return {"state": states, "param_groups": self._groups(own["param_groups"], numbers)}

    def _groups(self, own: Sequence[dict[str, Any]], numbers: Sequence[int]) -> list[Any]:
        """Return the parameter groups of one process, with the parameters of all stages."""
        split = len(self._stages.matrices)
        kinds = {numbers[group["params"][0]] >= split: group for group in own}
        gathered: list[Any] = [None] * self._stages.count
        dist.all_gather_object(gathered, kinds, group=self._stages.between)
        whole = [range(split), range(split, split + len(self._stages.vectors))]
        return [
            {**next(each[kind] for each in gathered if kind in each), "params": list(members)}
            for kind, members in zip((False, True), whole, strict=True)
            if members
        ]

    def own(
        self, optimizer: torch.optim.Optimizer, states: Mapping[int, Mapping[str, Any]]
    ) -> Mapping[int, Mapping[str, Any]]:
        """See `OneProcess.own`."""
        return {
            here: states[number]
            for here, number in enumerate(self._numbers(optimizer))
            if number in states
        }

    def told(self, report: Report) -> Report:
        """See `Ranks.told`."""
        found = super().told(report)
        return dataclasses.replace(found, notes=(*found.notes, self._stages.note))

    @contextlib.contextmanager
    def together(self, *, training: bool) -> Iterator[None]:
        """See `OneProcess.together`; RuntimeError after `close`."""
        if self._is_closed:
            raise RuntimeError(
                "this stepper is closed and the model has all its weights again; prepare a new one"
            )
        with super().together(training=training):
            yield

    def _end(self) -> None:
        """Release the engine; after a step that failed a new one is made."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        engine.destroy()
        for parameter in self.owner.parameters():
            vars(parameter).pop("ds_pipe_replicated", None)
        grid = engine.grid
        leave(
            *(engine.module.world_group, grid.ds_model_proc_group, grid.dp_proc_group),
            *(grid.pp_proc_group, grid.slice_proc_group),
        )

    def close(self) -> None:
        """Load the weights of all stages into the model and release the engine.

        All ranks call it; a second call does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._stages.restore()
        super().close()
        self._end()
        leave(self._stages.data, self._stages.between)


class PipelineStepper(TorchStepper):
    """Stepper of one stage: DeepSpeed's schedule runs forward and backward, it does the update."""

    _processes: PipelineRanks

    def _accumulate(self, batches_: Sequence[Batch]) -> Sums:
        """See `TorchStepper._accumulate`; all micro-batches are in the pipeline at once."""
        counts = [batches.count(batch) for batch in batches_]
        samples, tokens = (sum(numbers) for numbers in zip(*counts, strict=True))
        shares = [self._share(batch) for batch in batches_]
        started = time.perf_counter()
        found, forward_s = self._processes.run(shares, self._autocast, training=True)
        taken_s = time.perf_counter() - started
        losses = [
            each.loss.detach() * (share.part / len(shares))
            for share, each in zip(shares, found, strict=False)
        ]
        total = self._processes.total(losses, samples)
        started = time.perf_counter()
        self._processes.reduced()
        taken_s += time.perf_counter() - started
        own_loss = torch.stack([each.loss for each in found]).mean() if found else None
        own_samples = sum(batches.count(share.batch)[0] for share in shares if share.part)
        backward_s = taken_s - forward_s
        return Sums(total, samples, tokens, forward_s, backward_s, own_loss, own_samples)

    def _share(self, batch: Batch) -> Share:
        share = self._processes.share(batch)
        return dataclasses.replace(share, batch=batches.to_device(share.batch, self._device))
