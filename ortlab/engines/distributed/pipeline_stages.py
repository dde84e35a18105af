"""Stages of a model: where it is cut, and the stages that this rank has.

An nn.Sequential is cut between its children, a transformer of transformers between its layers.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import distributed as dist
from torch import nn

from ortlab.engines import batch as batches
from ortlab.engines.distributed.layout import Layout
from ortlab.engines.torch.stepper import training_device
from ortlab.settings import ParallelSettings


@dataclass(frozen=True)
class _Family:
    """Names in a base model of transformers.

    Attributes:
        layers: List of the layers.
        first: Modules of the first stage, with what later stages have instead.
        last: Modules of the last stage, which others leave out.
        heads: Ends of the names of models whose head reads activations alone. Others also read
            token ids, such as the place of the last token that is no padding.
    """

    layers: str
    first: Mapping[str, type[nn.Module]]
    last: tuple[str, ...]
    heads: tuple[str, ...] = ("ForCausalLM", "LMHeadModel", "TokenClassification")


class _Passing(nn.Module):
    """Layer, embedding or norm of another stage: returns the activation that it is given."""

    def forward(self, hidden: Any = None, *_: Any, inputs_embeds: Any = None, **__: Any) -> Any:
        """Return the activation."""
        return hidden if inputs_embeds is None else inputs_embeds


class _Zero(nn.Module):
    """Embedding of positions that the first stage has added."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Return zero."""
        return positions.new_zeros((), dtype=torch.float32)


_OF_BERT: Final = (
    *("ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification"),
    *("ForQuestionAnswering", "ForNextSentencePrediction", "LMHeadModel"),
)
_LLAMA: Final = _Family("layers", {"embed_tokens": _Passing}, ("norm",))
_FAMILIES: Final[dict[str, _Family]] = {
    "BertModel": _Family("encoder.layer", {"embeddings": _Passing}, ("pooler",), _OF_BERT),
    "GPT2Model": _Family("h", {"wte": _Passing, "wpe": _Zero, "drop": _Passing}, ("ln_f",)),
    **dict.fromkeys(("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"), _LLAMA),
}
"""Base models whose forward calls one layer after the other, each with the activation alone."""

_OF_TOKENS: Final = ("input_ids", "token_type_ids", "inputs_embeds")
"""Arguments that embeddings alone read."""


class _Part(nn.Module):
    """One stage: the model's own modules, without those of other stages.

    Its module has names of the whole model, and its forward is that of the model.
    """

    def __init__(self, module: nn.Module, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.module = module
        self.is_first, self.is_last = is_first, is_last

    def forward(self, hidden: Any, given: Any) -> Any:
        """Return the activation for the next stage, or the model's output.

        Args:
            hidden: Activation of the stage before; None in the first.
            given: Inputs of the model.
        """
        run: nn.Module = self.module
        if isinstance(run, nn.Sequential):
            return run(given if self.is_first else hidden)
        given = dict(given)
        if not self.is_first:
            given = {name: given[name] for name in given if name not in _OF_TOKENS}
            given["inputs_embeds"] = hidden
        if self.is_last:
            return run(**given)
        base: Any = run.base_model
        return base(**{name: given[name] for name in given if name not in batches.TARGETS})[0]


class _Parts(nn.Module):
    """Stages of one rank, by their numbers; its forward runs one of them."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, stage: str, hidden: Any, given: Any) -> Any:
        """See `_Part.forward`.

        Args:
            stage: Number of the stage; as text, a compiler takes it for a constant.
            hidden: Activation of the stage before; None in the first.
            given: Inputs of the model.
        """
        return self.parts[stage](hidden, given)


def cut(model: nn.Module, stages: int) -> list[_Part]:
    """Split a model into stages with about the same number of parameters in their layers.

    The stages consist of the model's own modules; containers around them are copies.

    Args:
        model: An nn.Sequential, or a model of transformers with one of the known base models.
        stages: Number of stages.

    Returns:
        The stages.

    Raises:
        ValueError: If the model is of another kind, or has fewer layers with parameters to train
            than stages.
    """
    own = f"pipeline of {stages} stages"
    base = getattr(model, "base_model", None)
    family = _FAMILIES.get(type(base).__name__)
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        layers, what = list(model._modules), "layers with parameters to train"
        units = [model.get_submodule(name) for name in layers]
    elif family is None or not type(model).__module__.startswith("transformers."):
        known = ", ".join(_FAMILIES)
        raise ValueError(
            f"{own} needs an nn.Sequential, or a model of transformers with a head on one of "
            f"{known}; the model is a {type(model).__name__}; choose pipeline_stages=1"
        )
    elif base is model or not type(model).__name__.endswith(family.heads):
        raise ValueError(
            f"{own}: {type(model).__name__} is not known to have a head that reads activations "
            f"alone, as *{', *'.join(family.heads)} do; choose pipeline_stages=1"
        )
    else:
        assert base is not None
        found = base.get_submodule(family.layers)
        layers, what = list(found._modules), "layers with parameters to train"
        units = [found.get_submodule(name) for name in layers]
    weights = [sum(p.numel() for p in each.parameters() if p.requires_grad) for each in units]
    trained = sum(1 for weight in weights if weight)
    if trained < stages:
        raise ValueError(
            f"{own} needs that many {what}, and the model has {trained}; choose "
            f"pipeline_stages={max(trained, 1)} or fewer"
        )
    bounds = list(itertools.pairwise(_balanced(weights, stages)))
    if family is None or base is None or isinstance(model, nn.Sequential):
        return [
            _Part(
                nn.Sequential(OrderedDict(zip(layers[a:b], units[a:b], strict=True))),
                is_first=a == 0,
                is_last=b == len(units),
            )
            for a, b in bounds
        ]
    return [_of_transformer(model, family, layers, a, b) for a, b in bounds]


def _of_transformer(
    model: nn.Module, family: _Family, layers: Sequence[str], begin: int, end: int
) -> _Part:
    """Return the stage with the layers from `begin` to before `end`."""
    prefix = str(model.base_model_prefix)
    inside = f"{prefix}.{family.layers}."
    is_first, is_last = begin == 0, end == len(layers)
    others = [*layers[:begin], *layers[end:]]
    changes: dict[str, nn.Module] = {inside + name: _Passing() for name in others}
    if not is_first:
        changes |= {f"{prefix}.{name}": kind() for name, kind in family.first.items()}
    if not is_last:
        base = model.get_submodule(prefix)
        changes |= {
            f"{prefix}.{name}": _Passing()
            for name in family.last
            if getattr(base, name, None) is not None
        }
        changes |= {name: _Passing() for name in model._modules if name != prefix}
    return _Part(_grafted(model, changes), is_first=is_first, is_last=is_last)


def _grafted(module: nn.Module, changes: Mapping[str, nn.Module]) -> nn.Module:
    """Return a copy of a module with other submodules in some places, and its own elsewhere."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    inside: dict[str, dict[str, nn.Module]] = {}
    for path, change in changes.items():
        name, _, rest = path.partition(".")
        if rest:
            inside.setdefault(name, {})[rest] = change
        else:
            made._modules[name] = change
    for name, more in inside.items():
        made._modules[name] = _grafted(module.get_submodule(name), more)
    return made


def _balanced(weights: Sequence[int], stages: int) -> list[int]:
    """Return the bounds of stages of which the largest is as small as possible.

    Every stage has a weight above zero.
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
    """Model of which this rank has some stages, until `restore` loads the weights of all.

    Attributes:
        count: Number of stages of the model.
        ranks: Number of ranks in the pipeline; stage s is on rank s modulo `ranks`.
        place: This rank's place in the pipeline.
        own: This rank's stages.
        names: Names of the model's parameters to train, by id.
        matrices: Names of those with two or more dimensions.
        vectors: Names of the others.
        forms: Parameters to train without memory, by name.
        shared: Parameters of several ranks, which tied layers in several stages read, with the
            places of these ranks.
        is_sequential: True for an nn.Sequential, which takes one tensor.
        state_names: Names of the model's state, in order.
        note: Line on this rank's stages.
    """

    def __init__(
        self,
        model: nn.Module,
        parallel: ParallelSettings,
        layout: Layout,
        everyone: dist.ProcessGroup,
    ) -> None:
        """Broadcast rank 0's weights and release those of other ranks' stages.

        Args:
            model: The whole model; its parameters and buffers become rank 0's.
            parallel: Settings of the processes.
            layout: Process groups of this rank.
            everyone: The process group of all ranks.

        Raises:
            ValueError: If the model cannot be split; see `cut`.
        """
        self.ranks = parallel.pipeline_stages
        self.count = self.ranks * parallel.pipeline_interleave
        parts = cut(model, self.count)
        self.device = training_device(parallel.device)
        self._between = layout.stages
        self.place = dist.get_rank(self._between)
        model.to(self.device)
        self._tensors = [*model.parameters(), *model.buffers()]
        for tensor in self._tensors:
            dist.broadcast(tensor.detach(), group_src=0, group=everyone)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = {id(p): name for name, p in trained}
        self.is_sequential = isinstance(model, nn.Sequential)
        self.state_names = list(model.state_dict())
        self.matrices = [name for name, p in trained if p.dim() >= 2]
        self.vectors = [name for name, p in trained if p.dim() < 2]
        self.forms = {name: torch.empty_like(p, device="meta") for name, p in trained}
        numbers = range(self.place, self.count, self.ranks)
        self._is_plain = self.is_sequential and len(numbers) == 1
        self.own: nn.Module = (
            parts[self.place].module
            if self._is_plain
            else _Parts({str(number): parts[number] for number in numbers})
        )
        read = [{id(t) for t in (*part.parameters(), *part.buffers())} for part in parts]
        self._holders = {
            id(tensor): sorted(
                {number % self.ranks for number, ids in enumerate(read) if id(tensor) in ids}
            )
            for tensor in self._tensors
        }
        self.shared = [(p, self._holders[id(p)]) for _, p in trained if self._is_shared(p)]
        which = " and ".join(str(number + 1) for number in numbers)
        self.note = (
            f"stage {which} of {self.count}: "
            f"{sum(p.numel() for p in self.own.parameters()):,} of "
            f"{sum(p.numel() for p in model.parameters()):,} parameters"
        )
        self._shapes = [tensor.shape for tensor in self._tensors]
        for tensor in self._tensors:
            if self.place not in self._holders[id(tensor)]:
                tensor.data, tensor.grad = tensor.data.new_empty(0), None
        self.is_restored = False

    def _is_shared(self, tensor: torch.Tensor) -> bool:
        return len(self._holders[id(tensor)]) > 1

    def name(self, own: str) -> str:
        """Return the name in the user's model of a parameter, buffer or module of `own`.

        Args:
            own: Name in this rank's stages.
        """
        if self._is_plain:
            return own
        return own.split(".", 3)[3] if own.count(".") > 2 else ""  # after "parts.<stage>.module."

    def call(self, module: nn.Module, stage: int, hidden: Any, given: Any) -> Any:
        """Run a stage.

        Args:
            module: This rank's stages, as an engine executes them.
            stage: Number of the stage.
            hidden: Activation of the stage before; None in the first.
            given: Inputs of the model.

        Returns:
            The activation for the next stage, or the model's output.
        """
        if self._is_plain:
            return module(hidden if stage else given)
        return module(str(stage), hidden, given)

    @property
    def is_last(self) -> bool:
        """True for the rank with the last stage, which computes the loss."""
        return self.place == self.ranks - 1

    def counts(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank is the first that has a parameter.

        Args:
            parameter: Parameter of this rank's stages.
        """
        # Shards are of layers in one stage.
        return self._holders.get(id(parameter), [self.place])[0] == self.place

    def together(self, own: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the union of the ranks' dictionaries on every rank, in the ranks' order.

        Args:
            own: This rank's dictionary.

        Returns:
            The dictionary; its tensors are copies on this rank's device.
        """
        described = {
            name: (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in own.items()
        }
        all_described: list[Any] = [None] * self.ranks
        dist.all_gather_object(all_described, described, group=self._between)
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
                dist.broadcast(value, group_src=place, group=self._between)
                found[name] = value
        return found

    def gathered(self, own: Any) -> list[Any]:
        """Return every rank's value, in the order of the pipeline.

        Args:
            own: This rank's value, which is pickled.
        """
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, own, group=self._between)
        return found

    def restore(self) -> None:
        """Load the weights of the other stages into the model.

        All ranks call it; a second call does nothing.
        """
        if self.is_restored:
            return
        self.is_restored = True
        for tensor, shape in zip(self._tensors, self._shapes, strict=True):
            holders = self._holders[id(tensor)]
            if self.place not in holders:
                tensor.data = tensor.data.new_empty(shape)
            if holders:
                # The receiving tensor has to be contiguous as well.
                value = tensor.detach().contiguous()
                dist.broadcast(value, group_src=holders[0], group=self._between)
                if value.data_ptr() != tensor.data_ptr():
                    tensor.data.copy_(value)


def _is_form(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], torch.Size)
