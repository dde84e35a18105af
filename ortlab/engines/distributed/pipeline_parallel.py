"""Pipeline parallelism: each rank has stages of a model, whose layers run one after the other.

Only activations and their gradients travel. Every rank has the whole batch, of which each stage
computes masks and position embeddings itself. The schedule is `pipeline_schedule`'s, with one
update after all micro-batches.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import distributed as dist
from torch import nn

from ortlab.engines import batch as batches
from ortlab.engines.base import Batch, Engine, LossFunction, Report
from ortlab.engines.distributed import pipeline_schedule, pipeline_stages, tensor_parallel_plan
from ortlab.engines.distributed.comm_timer import Clock
from ortlab.engines.distributed.layout import Layout, layout_of
from ortlab.engines.distributed.pipeline_schedule import Span
from ortlab.engines.distributed.pipeline_stages import Stages
from ortlab.engines.distributed.tensor_parallel import TensorRanks
from ortlab.engines.distributed.tensor_parallel_plan import Part
from ortlab.engines.single_process import Share
from ortlab.engines.torch.phases import phase
from ortlab.engines.torch.stepper import Sums, TorchStepper, training_device
from ortlab.settings import FinetuneSettings

_TYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMS: Final = 8


def check(model: nn.Module, settings: FinetuneSettings) -> Mapping[str, Part]:
    """Check that a model can be split, before any process is started.

    Args:
        model: The model.
        settings: The run's settings; ``pipeline_stages`` is above 1.

    Returns:
        How its layers are sharded, by name; empty without tensor parallelism.

    Raises:
        ValueError: If the model cannot be split into that many stages, or its layers not across
            the ranks that share them, or the engine cannot execute its stages.
    """
    parallel, engine = settings.parallel, settings.model.engine
    if parallel.pipeline_interleave > 1 and training_device(parallel.device).type != "cpu":
        raise ValueError(
            f"pipeline_interleave={parallel.pipeline_interleave} needs messages that arrive in any "
            "order, which NCCL does not have; choose pipeline_interleave=1, or device='cpu'"
        )
    pipeline_stages.cut(model, parallel.pipeline_stages * parallel.pipeline_interleave)
    plain = isinstance(model, nn.Sequential) and parallel.pipeline_interleave == 1
    if engine in ("ortmodule", "ort_fused") and not plain:
        raise ValueError(
            f"engine {engine!r} trains a pipeline of an nn.Sequential with one stage on each rank "
            "only; choose engine='ort', or 'eager'"
        )
    if parallel.tensor_parallel == 1:
        return {}
    layers = tensor_parallel_plan.plan_for(model, parallel.tensor_parallel)
    if any(part.region is not None and "." not in name for name, part in layers.items()):
        raise ValueError(
            f"tensor_parallel={parallel.tensor_parallel} with pipeline_stages="
            f"{parallel.pipeline_stages}: layers that are split together may be in different "
            "stages; put each pair into an nn.Sequential of its own, or choose tensor_parallel=1"
        )
    return layers


def prepare(
    engine: Engine,
    model: nn.Module,
    loss: LossFunction | None,
    settings: FinetuneSettings,
    group: dist.ProcessGroup,
) -> TorchStepper:
    """Return a stepper of one rank's stages; `steppers.prepare` calls it.

    Each stage is a part of the model that the engine executes. Different micro-batches of a step
    are in different stages at the same time, so more of them (``accumulation``) keep more ranks
    busy.

    Args:
        engine: The engine that executes each stage.
        model: The model: an nn.Sequential, or one of transformers (see `pipeline_stages.cut`).
        loss: The loss function, or None where the model returns its loss.
        settings: The run's settings; ``pipeline_stages`` is above 1.
        group: The process group of all ranks.

    Returns:
        The stepper.

    Raises:
        ValueError: See `check`.
    """
    parallel, layers = settings.parallel, check(model, settings)
    layout = layout_of(parallel, group)
    try:
        stages = Stages(model, parallel, layout, group)
    except BaseException:
        layout.leave()
        raise
    names = {stages.name(name): name for name, _ in stages.own.named_modules()}
    plan = {
        names[path]: part
        for path, part in layers.items()
        if path in names and any(True for _ in stages.own.get_submodule(names[path]).parameters())
    }
    try:
        stepper = engine.prepare(
            stages.own,
            loss,
            settings,
            processes=functools.partial(
                PipelineRanks,
                settings=settings,
                group=group,
                layout=layout,
                plan=plan,
                stages=stages,
            ),
            stepper=PipelineStepper,
        )
    except BaseException:
        stages.restore()
        layout.leave()
        raise
    assert isinstance(stepper, PipelineStepper)
    stepper.reseed(settings.data.seed)
    return stepper


class _Last(nn.Module):
    """The last stage as the model: its forward takes the batch, and reads an activation."""

    def __init__(self, run: Callable[[Any], Any]) -> None:
        super().__init__()
        self._run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output.

        Args:
            *args: The model's input, of a Sequential.
            **kwargs: The model's inputs, of a model of transformers.
        """
        return self._run(kwargs or (args[0] if args else None))


class _Wire:
    """Exchange of tensors of any size with other ranks of the pipeline.

    Args:
        group: The pipeline's ranks.
        device: Device of the tensors.
        clock: Runs while this rank waits.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, clock: Clock) -> None:
        self._group, self._device, self._clock = group, device, clock
        self._sent: list[tuple[Any, torch.Tensor]] = []

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        """Send a tensor without waiting for the receiver.

        Args:
            tensor: The tensor.
            to: Place in the pipeline.
            tag: Number by which the receiver asks for it, in any order.
        """
        kind = _TYPES.index(tensor.dtype)
        form = [kind, tensor.dim(), *tensor.shape, *[0] * (_MOST_DIMS - tensor.dim())]
        whole = tensor.detach().contiguous()
        for part, each in enumerate((torch.tensor(form, device=self._device), whole)):
            work = dist.isend(each, group=self._group, group_dst=to, tag=2 * tag + part)
            self._sent.append((work, each))

    def receive(self, source: int, tag: int) -> torch.Tensor:
        """Return a tensor that a rank sends.

        Args:
            source: Place in the pipeline.
            tag: The tensor's number.
        """
        form = torch.empty(2 + _MOST_DIMS, dtype=torch.int64, device=self._device)
        with self._clock:
            dist.recv(form, group=self._group, group_src=source, tag=2 * tag)
            kind, dims, *sizes = form.tolist()
            found = torch.empty(sizes[:dims], dtype=_TYPES[kind], device=self._device)
            dist.recv(found, group=self._group, group_src=source, tag=2 * tag + 1)
        return found

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        with self._clock:
            for work, _ in self._sent:
                work.wait()
        self._sent = []


class PipelineRanks(TensorRanks):
    """Ranks that have stages of a model; ranks of the same stages are data parallel.

    - Dropout masks differ between stages.
    - Parameters of tied layers in several stages get the sum of the stages' gradients.
    - If a stage fails, the others wait for it until it leaves the process group, or until the
      group's timeout: they exchange nothing but activations and their gradients until all backward
      passes have ended.

    Args:
        module: The stages that the engine executes.
        loss: The loss function, or None where the model returns its loss.
        owner: The stages of the user's model inside `module`.
        device: The device that this rank trains on.
        settings: The run's settings.
        group: The process group of all ranks.
        layout: Process groups of this rank.
        plan: How layers of the stages are sharded; empty without tensor parallelism.
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
        layout: Layout,
        plan: Mapping[str, Part],
        stages: Stages,
    ) -> None:
        self._stages = stages
        self._spans: list[Span] = []
        self._micro_batches = 1
        super().__init__(
            module, loss, owner, device, settings=settings, group=group, layout=layout, plan=plan
        )
        self._notes = (*(self._notes if plan else ()), stages.note)

    def _made_parallel(self) -> Any:
        return _Wire(self._layout.stages, self.device, self._clock)

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
            The last stage's results by micro-batch, none on other ranks, and the seconds of this
            rank's forwards.
        """
        stages = self._stages
        given = [self._input(share) for share in shares]
        wire = self._parallel or self._made_parallel()
        kind = pipeline_schedule.training_order if training else pipeline_schedule.evaluation_order
        order = kind(stages.ranks, stages.count // stages.ranks, len(shares))
        inputs: dict[tuple[int, int], torch.Tensor] = {}
        outputs: dict[tuple[int, int], torch.Tensor] = {}
        found: dict[int, batches.Forward] = {}

        def tag(stage: int, number: int, *, backward: bool = False) -> int:
            """Return the number of a stage's output, or of its gradient."""
            return 2 * (stage * len(shares) + number) + backward

        spans: list[Span] = []
        began = time.perf_counter()
        self._micro_batches = len(shares)
        self._agreed = True  # from here on a failure cannot be reported: the others wait elsewhere
        for action in order[stages.place]:
            stage, number = action.stage, action.micro_batch
            key, is_last = (stage, number), stage == stages.count - 1
            if action.backward:
                gradient = None
                if not is_last:
                    source = (stage + 1) % stages.ranks
                    gradient = wire.receive(source, tag(stage, number, backward=True))
                started = time.perf_counter()
                output, hidden = outputs.pop(key), inputs.pop(key, None)
                if output.requires_grad:
                    with phase("backward"):
                        torch.autograd.backward(output, gradient)
                if hidden is not None:
                    own = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
                    wire.send(
                        own, (stage - 1) % stages.ranks, tag(stage - 1, number, backward=True)
                    )
            else:
                hidden = None
                if stage:
                    hidden = wire.receive((stage - 1) % stages.ranks, tag(stage - 1, number))
                started = time.perf_counter()
                if hidden is not None and training:
                    inputs[key] = hidden.requires_grad_()
                self._neighbors.begin()
                if is_last:
                    with phase("forward"):
                        found[number], output = self._last(hidden, shares[number], context)
                else:
                    with phase("forward"), context():
                        output = _sendable(stages.call(self.module, stage, hidden, given[number]))
                    wire.send(output, (stage + 1) % stages.ranks, tag(stage, number))
                if training:
                    outputs[key] = output
            ended = time.perf_counter()
            spans.append(Span(stages.place, action, started - began, ended - began))
        wire.finish()
        self._agreed = False
        if training:
            self._spans = spans
        forward_s = sum(each.end - each.begin for each in spans if not each.action.backward)
        return [found[number] for number in sorted(found)], forward_s

    def _last(
        self,
        hidden: torch.Tensor | None,
        share: Share,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> tuple[batches.Forward, torch.Tensor]:
        """Return the results of the last stage, and the loss from which backward begins."""
        run = functools.partial(self._stages.call, self.module, self._stages.count - 1, hidden)
        with context():
            found = batches.forward(_Last(run), share.batch, self.loss)
        scaled = found.loss * (share.factor / self._micro_batches)
        # Training does not use the scores, which would keep their graph alive.
        learns = torch.is_grad_enabled()
        return batches.Forward(found.loss.detach(), None, None) if learns else found, scaled

    def _input(self, share: Share) -> Any:
        found = batches.inputs(share.batch, self.loss)
        if self._stages.is_sequential:
            tensors = batches.tensors(found)
            if len(tensors) != 1:
                raise ValueError(
                    "a Sequential takes one tensor, and the batch "
                    f"({batches.describe(share.batch)}) has {len(tensors)} besides the target; "
                    "pass (input, target)"
                )
            return tensors[0]
        if not isinstance(found, Mapping):
            raise ValueError(
                f"pipeline_stages needs batches with names, such as input_ids, and this one is "
                f"{batches.describe(share.batch)}"
            )
        return dict(found)

    def timeline(self) -> list[Span]:
        """Return when each rank of this pipeline computed in the last step, in seconds.

        All ranks call it. The times are from each rank's own beginning of the step.
        """
        return [span for spans in self._stages.gathered(self._spans) for span in spans]

    def reduced(self) -> None:
        """Add up the gradients over the data parallel ranks, and those of tied layers over stages.

        A parameter without a gradient on any rank still has none afterwards.
        """
        parameters = [p for p in self.owner.parameters() if p.requires_grad]
        if self._size > 1:
            used = torch.tensor([p.grad is not None for p in parameters], device=self.device)
            used = used.float()
            with self._clock:
                dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
            for parameter, is_used in zip(parameters, used.tolist(), strict=True):
                if is_used:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    with self._clock:
                        dist.all_reduce(parameter.grad, group=self._group)
        self._sum_of_tied()

    def _sum_of_tied(self) -> None:
        """Give each parameter of several stages the sum of their gradients, the same on each."""
        wire, place = self._parallel, self._stages.place
        for tag, (parameter, holders) in enumerate(self._stages.shared):
            if place not in holders:
                continue
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            first, *others = holders
            if place == first:
                for other in others:
                    own = own + wire.receive(other, tag)
                for other in others:
                    wire.send(own, other, tag)
            else:
                wire.send(own, first, tag)
                own = wire.receive(first, tag)
            parameter.grad = own
        wire.finish()

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `OneProcess.norm`; the norm is that of all stages."""
        owned = {id(p.grad) for p in self.owner.parameters() if self._stages.counts(p)}
        counted = torch.tensor([id(each) in owned for each in gradients], device=self.device)
        squares = (self._squares(gradients) * counted).sum() * self._stages.ranks / self._size
        return self._agree([squares])[0].sqrt().to(gradients[0].dtype)

    def forward(self, batch: Batch) -> batches.Forward:
        """See `OneProcess.forward`; only the last stage has a result."""
        kind = self.device.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        context = functools.partial(torch.autocast, kind, dtype, enabled=enabled)
        found, _ = self.run([Share(batch)], context, training=False)
        return found[0] if found else batches.Forward(self._zero(), None, None)

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), device=self.device)

    def _counted(self) -> int:
        """Return the factor of this rank's numbers in a sum that is divided by the ranks."""
        return self._stages.ranks if self._stages.is_last else 0

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
        return super().reseeded(seed * self._stages.ranks + self._stages.place)

    def weights(self) -> dict[str, Any]:
        """See `OneProcess.weights`; all ranks call it."""
        own = {self._stages.name(name): value for name, value in self.owner.state_dict().items()}
        found = self._stages.together(own)
        return {name: found[name] for name in self._stages.state_names}

    def take_weights(self, state: Mapping[str, Any]) -> None:
        """See `OneProcess.take_weights`."""
        own = self.owner.state_dict(keep_vars=True)
        self.owner.load_state_dict({name: state[self._stages.name(name)] for name in own})

    def whole_parameters(
        self,
        parameters: Sequence[torch.Tensor],  # noqa: ARG002
    ) -> list[tuple[str, torch.Tensor]]:
        """See `OneProcess.whole_parameters`; returns the parameters of all stages."""
        forms = self._stages.forms
        return [(name, forms[name]) for name in (*self._stages.matrices, *self._stages.vectors)]

    def _numbers(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """Return the number in the whole model of each parameter of this rank's `optimizer`."""
        order = [*self._stages.matrices, *self._stages.vectors]
        numbers = {name: number for number, name in enumerate(order)}
        names = {id(p): self._name(name, p) for name, p in self.owner.named_parameters()}
        return [numbers[names[id(p)]] for g in optimizer.param_groups for p in g["params"]]

    def _name(self, name: str, parameter: torch.Tensor) -> str:
        """Return a parameter's name in the user's model; that of a tied one is its first."""
        return self._stages.names.get(id(parameter), self._stages.name(name))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """See `OneProcess.optimizer_state`; all ranks call it."""
        own, numbers = super().optimizer_state(optimizer), self._numbers(optimizer)
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
        gathered = self._stages.gathered(kinds)
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
        picked = {
            here: states[number]
            for here, number in enumerate(self._numbers(optimizer))
            if number in states
        }
        return super().own(optimizer, picked)

    def told(self, report: Report) -> Report:
        """See `Ranks.told`."""
        found, ranks = super().told(report), self._stages.ranks
        if not self._spans:
            return found
        chunks = self._stages.count // ranks
        micro_batches = 1 + max(each.action.micro_batch for each in self._spans)
        order = pipeline_schedule.training_order(ranks, chunks, micro_batches)
        expected = pipeline_schedule.spans(order)
        assert expected is not None
        mine = pipeline_schedule.idle(self._spans, 1)
        note = (
            f"pipeline: this rank waited for {mine:.0%} of the last step; the schedule of "
            f"{micro_batches} micro-batches alone leaves "
            f"{pipeline_schedule.idle(expected, ranks):.0%} of all ranks' time idle"
        )
        return dataclasses.replace(found, notes=(*found.notes, note))

    def _restore(self) -> None:
        super()._restore()
        self._stages.restore()


def _sendable(found: Any) -> torch.Tensor:
    """Return the output of a stage; ValueError if it cannot get a gradient from the next one."""
    if not isinstance(found, torch.Tensor) or not found.is_floating_point():
        raise ValueError(
            f"pipeline_stages: a stage passes {batches.describe(found)} to the next stage, and "
            "only a single floating-point tensor can have a gradient; choose another number of "
            "stages, or 1"
        )
    return found


class PipelineStepper(TorchStepper):
    """Stepper of one rank's stages: their schedule runs the passes, it does the update."""

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
