"""Pipeline parallelism: ranks that have the parts of a sequential model one after the other.

By DeepSpeed's pipeline (https://www.deepspeed.ai/tutorials/pipeline/), whose schedule it is: one
forward, one backward (Harlap et al. 2018, arXiv:1806.03377), with an update after all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ortlab.engines import batch as batches
from ortlab.engines.base import Batch, Engine, LossFunction, Report
from ortlab.engines.distributed import deepspeed_library
from ortlab.engines.distributed.data_parallel import Ranks, leave
from ortlab.engines.single_process import Share
from ortlab.engines.torch.stepper import Sums, TorchStepper, training_device
from ortlab.settings import FinetuneSettings


def prepare(
    engine: Engine,
    model: nn.Module,
    loss: LossFunction | None,
    settings: FinetuneSettings,
    group: dist.ProcessGroup,
) -> TorchStepper:
    """See `data_parallel.prepare`, which calls it where ``pipeline_stages`` is above 1.

    Each stage is a part of `model`, an nn.Sequential, as `engine` executes it. The micro-batches of
    a step are in the stages at once, so that more of them (``accumulation``) keep more ranks busy.

    ValueError for another model, and where it cannot be cut into as many stages.
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
    stepper.reseed(settings.seed)
    return stepper


def cut(model: nn.Module, stages: int) -> list[list[str]]:
    """The names of the children of `model` in each of `stages`, of about as many parameters.

    ValueError where `model` is no nn.Sequential, where a stage would have nothing to train, and
    where a parameter would be in two of them.
    """
    own = f"pipeline_stages={stages}"
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        raise ValueError(
            f"{own} cuts an nn.Sequential, whose parts are called one after the other, and this is "
            f"a {type(model).__name__}; choose pipeline_stages=1"
        )
    children = list(model._modules.items())
    weights = [sum(p.numel() for p in part.parameters() if p.requires_grad) for _, part in children]
    trained = sum(1 for weight in weights if weight)
    if trained < stages:
        raise ValueError(
            f"{own}: {trained} parts of the model have parameters to train, and every stage needs "
            f"one; choose pipeline_stages={max(trained, 1)} or fewer"
        )
    bounds = _balanced(weights, stages)
    found = [children[begin:end] for begin, end in itertools.pairwise(bounds)]
    places = Counter(
        parameter
        for each in found
        for parameter in {id(p) for _, m in each for p in m.parameters()}
    )
    for name, parameter in model.named_parameters():
        if places[id(parameter)] > 1:
            raise ValueError(
                f"{own}: {name} is shared by layers of two stages; choose pipeline_stages=1"
            )
    return [[name for name, _ in each] for each in found]


def _balanced(weights: Sequence[int], stages: int) -> list[int]:
    """Where stages begin and the last one ends: the largest is as small as can be.

    Every stage has a weight above zero. DeepSpeed's ``partition_balanced`` leaves some empty.
    """
    sums = [0, *itertools.accumulate(weights)]

    @functools.cache
    def best(begin: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 1:
            size = sums[-1] - sums[begin]
            return (size if size else float("inf")), (len(weights),)
        found: tuple[float, tuple[int, ...]] = (float("inf"), (len(weights),) * left)
        for end in range(begin + 1, len(weights)):
            size = sums[end] - sums[begin]
            if not size:
                continue
            largest, bounds = best(end, left - 1)
            found = min(found, (max(size, largest), (end, *bounds)))
        return found

    return [0, *best(0, stages)[1]]


class Stages:
    """A model of which this rank keeps one stage, until `restore` gives it all weights back.

    Ranks of the same stage follow each other: of 4 with 2 stages ranks 0 and 1 have the first.
    """

    def __init__(
        self, model: nn.Module, settings: FinetuneSettings, group: dist.ProcessGroup
    ) -> None:
        names = cut(model, settings.pipeline_stages)
        self.count = settings.pipeline_stages
        self.device = training_device(settings.device)
        mesh = init_device_mesh(
            self.device.type,
            (self.count, dist.get_world_size(group) // self.count),
            mesh_dim_names=("stage", "data"),
        )
        self.data, self.between = mesh["data"].get_group(), mesh["stage"].get_group()
        self.place = mesh.get_local_rank("stage")
        model.to(self.device)
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), group_src=0, group=group)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.matrices = [name for name, p in trained if p.dim() >= 2]
        self.vectors = [name for name, p in trained if p.dim() < 2]
        self.forms = {name: torch.empty_like(p, device="meta") for name, p in trained}
        self._parts = [
            nn.Sequential(OrderedDict((name, model.get_submodule(name)) for name in each))
            for each in names
        ]
        self.own = self._parts[self.place]
        self.note = (
            f"stage {self.place + 1} of {self.count}: layers {names[self.place][0]} to "
            f"{names[self.place][-1]}, "
            f"{sum(p.numel() for p in self.own.parameters()):,} of "
            f"{sum(p.numel() for p in model.parameters()):,} parameters"
        )
        self._others = [
            (place, tensor, tensor.shape)
            for place, part in enumerate(self._parts)
            if place != self.place
            for tensor in (*part.parameters(), *part.buffers())
        ]
        for _, tensor, _ in self._others:
            tensor.data, tensor.grad = tensor.data.new_empty(0), None

    @property
    def is_last(self) -> bool:
        """Whether the loss is here."""
        return self.place == self.count - 1

    def together(self, own: Mapping[Any, Any]) -> dict[Any, Any]:
        """What all stages have, in their order; tensors are this rank's own."""
        described = {
            name: (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in own.items()
        }
        all_described: list[Any] = [None] * self.count
        dist.all_gather_object(all_described, described, group=self.between)
        found = {}
        for place, each in enumerate(all_described):
            for name, form in each.items():
                if not _is_form(form):
                    found[name] = form
                    continue
                if place == self.place:
                    value = own[name].detach().clone(memory_format=torch.contiguous_format)
                else:
                    value = torch.empty(form[0], dtype=form[1], device=self.device)
                dist.broadcast(value, group_src=place, group=self.between)
                found[name] = value
        return found

    def restore(self) -> None:
        """Gives the model the weights that other stages have; all ranks call it. Twice is fine."""
        for place, part in enumerate(self._parts):
            theirs = [each for each in self._others if each[0] == place]
            whole = [*part.parameters(), *part.buffers()]
            for number, tensor in enumerate(whole if self._others else ()):
                if place != self.place:
                    tensor.data = tensor.data.new_empty(theirs[number][2])
                # Contiguous where it is received, too.
                value = tensor.detach().contiguous()
                dist.broadcast(value, group_src=place, group=self.between)
        self._others = []


def _is_form(value: Any) -> bool:
    return isinstance(value, tuple) and isinstance(value[0], torch.Size)


class _Stage(nn.Module):
    """A stage as DeepSpeed calls it: within a context, and timed.

    ValueError for an output that the next stage could not send a gradient for.
    """

    def __init__(self, module: nn.Module, *, is_last: bool) -> None:
        super().__init__()
        self.module = module
        self._is_last = is_last
        self.context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        self.taken_s = 0.0

    def forward(self, hidden: Any) -> Any:
        """What the next stage is given."""
        started = time.perf_counter()
        with self.context():
            found = self.module(hidden)
        self.taken_s += time.perf_counter() - started
        if self._is_last:
            return found
        if not isinstance(found, torch.Tensor) or not found.is_floating_point():
            raise ValueError(
                f"pipeline_stages: a stage gives {batches.describe(found)} to the next one, and "
                "only a tensor of floating point numbers can go back as a gradient; choose another "
                "number of stages, or 1"
            )
        return found.contiguous()  # others are not sent


class _Given(nn.Module):
    """A model whose output is there already."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        """The output."""
        return self._output


class PipelineRanks(Ranks):
    """Ranks that have the stages of a model; those of one stage are data parallel.

    - Dropout draws other masks on each rank.
    - A stage that fails leaves the others waiting for it, until it leaves the process group or the
      group's timeout: they exchange activations, and nothing else, until all backward passes ended.
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
        """DeepSpeed's engine, which steps through a schedule's forwards and backwards alone."""
        self._end()
        library = deepspeed_library.library(self.device)
        layers: list[nn.Module] = [nn.Identity() for _ in range(self._stages.count)]
        layers[self._stages.place] = self._stage_module
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its topology and its seeds
            pipeline = library.pipe.PipelineModule(
                layers,
                num_stages=self._stages.count,
                loss_fn=self._loss_of,
                partition_method="uniform",
                dynamic_shape=True,  # a last batch is smaller
            )
            engine = deepspeed_library.initialised(
                self.device,
                model=pipeline,
                # It asks for one before it goes backward, and never steps it.
                optimizer=torch.optim.SGD(self.owner.parameters(), lr=0.0),
                config={
                    "train_micro_batch_size_per_gpu": 1,
                    "gradient_accumulation_steps": 1,  # how many there are the schedule says
                    "steps_per_print": 10**9,
                },
            )
        engine._INSTRUCTION_MAP = self._instructions(engine)
        self._engine = engine
        return engine

    def _instructions(self, engine: Any) -> dict[Any, Callable[..., None]]:
        """What the engine does for each instruction; exchanges are timed, and it takes no step."""

        def timed(call: Callable[..., None]) -> Callable[..., None]:
            def exchange(*args: Any, **kwargs: Any) -> None:
                with self._clock:
                    call(*args, **kwargs)

            return exchange

        def nothing(_engine: Any) -> None:
            """What comes after all backward passes is `norm`'s and the stepper's."""

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
        """The loss of the last stage's `output`, as backward begins with it."""
        with self._stage_module.context():
            found = batches.forward(_Given(output), share.batch, self.loss)
        # In training nobody needs the scores, which would keep their graph.
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
        """What the last stage found for each of the `shares`, and the seconds of its forwards.

        With `training` it goes backward too; gradients are those of this rank's share.
        """
        engine = self._engine
        self._found, self._stage_module.taken_s = [], 0.0
        self._stage_module.context, self._micro_batches = context, len(shares)
        pipe = deepspeed_library.library(self.device).runtime.pipe
        kind = pipe.schedule.TrainSchedule if training else pipe.schedule.InferenceSchedule
        pipe.p2p.init_process_groups(engine.grid)  # a process has one, the newest engine's
        engine.set_dataiterator(iter([(self._input(share), share) for share in shares]))
        engine._compute_loss, engine.total_loss = True, None
        self._agreed = True  # one that fails from here on cannot tell: the others wait elsewhere
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
                f"has {len(found)} beside the target; give (input, target)"
            )
        return found[0]

    def reduced(self) -> None:
        """Makes the gradients those of the whole batch; what no rank has one of keeps none."""
        engine = self._engine
        parameters = [p for p in self.owner.parameters() if p.requires_grad]
        used = torch.tensor([p.grad is not None for p in parameters], device=self.device).float()
        with self._clock:
            dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
            engine._exec_reduce_grads()
        for parameter, is_used in zip(parameters, used.tolist(), strict=True):
            if not is_used:
                parameter.grad = None  # DeepSpeed has made it zero

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `OneProcess.norm`: of all stages."""
        own = nn.utils.get_total_norm(gradients)
        squares = own.double().square() * self._stages.count / self._size
        return self._agree([squares])[0].sqrt().to(own.dtype)

    def forward(self, batch: Batch) -> batches.Forward:
        """See `OneProcess.forward`; a stage that is not the last finds nothing."""
        kind = self.device.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # Inside its own forward DeepSpeed turns autocast off.
        context = functools.partial(torch.autocast, kind, dtype, enabled=enabled)
        found, _ = self.run([Share(batch)], context, training=False)
        return found[0] if found else batches.Forward(self._zero(), None, None)

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), device=self.device)

    def _counted(self) -> int:
        """How often the last stage's numbers count where each stage has an equal part in a sum."""
        return self._stages.count if self._stages.is_last else 0

    def total(self, losses: Sequence[torch.Tensor], samples: int) -> torch.Tensor:
        """See `OneProcess.total`; the last stage alone has `losses`."""
        here = [loss * self._counted() for loss in losses] or [self._zero()]
        return super().total(here, samples)

    def evaluated(
        self, loss: torch.Tensor, part: float, correct: int, predicted: int
    ) -> tuple[torch.Tensor, int, int]:
        """See `OneProcess.evaluated`; the last stage alone has found anything."""
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
        """See `OneProcess.whole_parameters`: those of all stages."""
        forms = self._stages.forms
        return [(name, forms[name]) for name in (*self._stages.matrices, *self._stages.vectors)]

    def _numbers(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """The number in the whole model of each parameter that `optimizer` has here."""
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
        """The groups of one process: what every stage has of them, and all their parameters."""
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
                "this stepper is closed, and the model has all its weights again; prepare another"
            )
        with super().together(training=training):
            yield

    def _end(self) -> None:
        """Gives the engine back; after a step that failed another one takes its place."""
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
        """Gives the model the weights of all stages back; all ranks call it. Twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stages.restore()
        super().close()
        self._end()
        leave(self._stages.data, self._stages.between)


class PipelineStepper(TorchStepper):
    """Trains a stage: forward and backward are DeepSpeed's schedule, the update is its own."""

    _processes: PipelineRanks

    def _accumulate(self, batches_: Sequence[Batch]) -> Sums:
        """See `TorchStepper._accumulate`: all micro-batches are in the stages at once."""
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
