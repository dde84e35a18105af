"""Objective of an `ORTTrainer`: the described model with its loss, as one module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ortlab.deploy.axes import Axes, Axis
from ortlab.engines.batch import TARGETS, signature_names
from ortlab.orttrainer.description import Described, Description

Loss = Callable[..., torch.Tensor]


class Objective(nn.Module):
    """Module that returns the loss first, then the model's other outputs without a gradient.

    Args:
        model: The user's model.
        description: The model's inputs and outputs.
        loss_fn: The loss function, or None where the model returns its loss.
        note: Called with a note for each addition to the description.

    Raises:
        ValueError: If loss or label are missing or ambiguous.
    """

    def __init__(
        self,
        model: nn.Module,
        description: Description,
        loss_fn: Loss | None,
        note: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._original_module = model
        self.loss_fn = loss_fn
        self.training = model.training
        names = signature_names(model)
        self.taken = [each.name for each in description.inputs if each.name in names]
        """Inputs that are passed to forward by name; empty if they are passed in order."""
        number = len(self.taken) or min(len(names), len(description.inputs))
        rest = len(description.inputs) - number
        if loss_fn is None:
            _refuse_without_loss(description, rest, names)
        elif rest == 0:
            label = Described(_new("label", description), None)
            description = Description((*description.inputs, label), description.outputs)
            note(f"model_desc names no label: the last input of a step is {label.name!r}")
        elif rest > 1:
            extra = ", ".join(map(str, description.inputs[number:]))
            raise ValueError(
                f"model_desc has {extra} besides forward's inputs; only one can be the label"
            )
        if loss_fn is not None and description.loss is None:
            loss = Described(_new("loss", description), (), is_loss=True)
            description = Description(description.inputs, (loss, *description.outputs))
            note(f"model_desc names no loss: the first output of a step is {loss.name!r}")
        self.description = description
        self.number = number

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return the loss, and the other outputs in order.

        Args:
            *inputs: The inputs of the description, in order.

        Raises:
            ValueError: If the loss is not a scalar.
        """
        given = dict(zip((each.name for each in self.description.inputs), inputs, strict=True))
        if self.taken:
            result = self._original_module(**{name: given[name] for name in self.taken})
        else:
            result = self._original_module(*inputs[: self.number])
        outputs = self._named(result)
        if self.loss_fn is None:
            assert self.description.loss is not None
            loss = outputs.pop(self.description.loss)
        else:
            label = next(v for n, v in given.items() if self.is_label(n))
            loss = self.loss_fn(result, label)
        if not isinstance(loss, torch.Tensor) or (loss.dim() and loss.numel() != 1):
            raise ValueError("the loss is not a scalar; reduce it, for example with .mean()")
        return (loss, *(each.detach() for each in outputs))

    def evaluated(self, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the outputs by name, without the loss.

        Args:
            named: The inputs by name, without label.
        """
        if self.taken:
            result = self._original_module(**named)
        else:
            result = self._original_module(*named.values())
        names = [each.name for each in self.description.outputs if not each.is_loss]
        return dict(zip(names, self._named(result), strict=False))

    def is_answer(self, name: str) -> bool:
        """Return whether an input is only used by the loss.

        Args:
            name: The input's name.
        """
        if self.loss_fn is not None:
            return self.is_label(name)
        parameter = inspect.signature(self._original_module.forward).parameters.get(name)
        optional = parameter is not None and parameter.default is None
        return optional and name in TARGETS

    def is_label(self, name: str) -> bool:
        """Return whether forward does not take an input, which is then the label.

        Args:
            name: The input's name.
        """
        names = [each.name for each in self.description.inputs]
        return name not in self.taken if self.taken else names.index(name) >= self.number

    def _named(self, result: Any) -> list[torch.Tensor]:
        """Return the tensors of a result: by name if it is a mapping, otherwise in order."""
        wanted = [each.name for each in self.description.outputs]
        if isinstance(result, Mapping):
            known = [name for name in wanted if name in result]
            values = [result[name] for name in known] if known else list(result.values())
        elif isinstance(result, torch.Tensor):
            values = [result]
        else:
            values = list(result)
        return [each for each in values if isinstance(each, torch.Tensor)]


class Inference(nn.Module):
    """Module for inference: the objective's outputs without the loss.

    Args:
        objective: The objective.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, **named: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the outputs by their names in ``model_desc``.

        Args:
            **named: The inputs by name, without label.
        """
        return self.objective.evaluated(named)


def axes_of(description: Description, given: Mapping[str, torch.Tensor]) -> Axes:
    """Return the axes of an inference graph whose sizes have a name in ``model_desc``.

    Args:
        description: The model's inputs and outputs.
        given: The inputs of one call, by name.

    Returns:
        Name, size and positions of each axis, with two other sizes for the export to check.
    """
    places: dict[str, list[tuple[str, int]]] = {}
    for each in description.inputs:
        for dim, size in enumerate(each.sizes or ()):
            if isinstance(size, str) and each.name in given:
                places.setdefault(size, []).append((each.name, dim))
    axes = []
    for name, at in places.items():
        size = given[at[0][0]].shape[at[0][1]]
        axes.append(Axis(name, size, tuple(at), (size + 1, max(size - 1, 1))))
    return Axes(axes)


def _refuse_without_loss(description: Description, rest: int, names: Sequence[str]) -> None:
    outputs = ", ".join(map(str, description.outputs))
    if description.loss is None:
        raise ValueError(
            f"there is no loss: model_desc has the outputs {outputs}, and none of them is marked; "
            "pass a loss_fn (criterion), or mark the output that is the loss: ('loss', [], True)"
        )
    if rest:
        extra = ", ".join(map(str, description.inputs[-rest:]))
        raise ValueError(
            f"model_desc has {extra}, but forward only takes {', '.join(names)}; pass a loss_fn "
            "that takes the label"
        )


def _new(name: str, description: Description) -> str:
    taken = {each.name for each in (*description.inputs, *description.outputs)}
    return name if name not in taken else f"{name}_1"
