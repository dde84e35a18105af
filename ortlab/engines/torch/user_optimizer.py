"""Optimizers and learning rate schedulers that a user gives: what they may be, and their checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ortlab.checkpoint.nested_values import Packed
from ortlab.engines.own_optimizer import OwnOptim, required
from ortlab.engines.single_process import OneProcess
from ortlab.engines.torch.stepper import optimizer_for
from ortlab.settings import OPTIMIZERS, OWN, FinetuneSettings

OptimizerLike = str | torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Name of an optimizer, an optimizer, or its class or factory."""
SchedulerLike = LRScheduler | Callable[[torch.optim.Optimizer], Any]
"""A scheduler of torch, or its class or factory."""
_FEW: Final = 3
"""Parameters that a message names."""
_CLASS_OPTIONS: Final = {"learning_rate": "lr", "weight_decay": "weight_decay"}
"""Setting -> the argument of an optimizer's class."""
_FACTORY: Final = (
    "give a class or a function of the parameters, as in "
    "optimizer=functools.partial(torch.optim.SGD, lr=0.1)"
)


@dataclass(frozen=True)
class OptimRequest:
    """Optimizer and scheduler as the user gave them: objects, classes or factories.

    Attributes:
        optimizer: A torch optimizer, its class, or a function of the trainable parameters; None for
            the optimizer that the settings name.
        scheduler: A scheduler of that optimizer, or a class or function of the optimizer; None for
            the schedule of the settings.
        options: Arguments for an optimizer's class.
    """

    optimizer: Any = None
    scheduler: Any = None
    options: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, optimizer: Any, scheduler: Any, given: Mapping[str, Any], *, resumed: bool
    ) -> OptimRequest | None:
        """Return the request of a call, or None if everything is left to the settings.

        Args:
            optimizer: The argument ``optimizer``, unless it is a name.
            scheduler: The argument ``lr_scheduler``.
            given: Settings that the call gives, by name.
            resumed: True if the run continues from a checkpoint, whose rates count.

        Raises:
            ValueError: If an argument is of no use, or settings are given that it determines.
        """
        if optimizer is None and scheduler is None:
            return None
        if optimizer is not None and not _is_optimizer(optimizer) and not callable(optimizer):
            raise ValueError(
                f"optimizer={_told(optimizer)} is not an optimizer; give a torch.optim.Optimizer, "
                f"its class, a function of the parameters, or one of {', '.join(OPTIMIZERS)}"
            )
        if scheduler is not None:
            _check_scheduler_argument(optimizer, scheduler)
        owners: dict[str, str] = {}  # setting -> the argument that determines it
        if scheduler is not None:
            owners |= dict.fromkeys(("lr_scheduler_type", "warmup_steps"), "lr_scheduler")
        if resumed and scheduler is not None:
            owners["learning_rate"] = "lr_scheduler"
        elif not resumed and optimizer is not None:  # resumed, all groups are scaled to it
            owners["learning_rate"] = "optimizer"
        if optimizer is not None:
            owners["weight_decay"] = "optimizer"
        takes = _CLASS_OPTIONS if isinstance(optimizer, type) and not resumed else {}
        for name, owner in owners.items():
            if name in given and name not in takes:
                raise ValueError(
                    f"{name}={given[name]!r} is given besides {owner}=..., which has its own and "
                    f"counts; set it there, or leave {name} out"
                )
        return cls(optimizer, scheduler, {takes[n]: given[n] for n in takes if n in given})

    @property
    def names(self) -> dict[str, str]:
        """Names by which the settings record them until they are built, by setting."""
        values = {"optimizer": self.optimizer, "lr_scheduler_type": self.scheduler}
        return {n: f"{OWN}{_name(each)}" for n, each in values.items() if each is not None}

    @property
    def fixed(self) -> dict[str, str]:
        """Reasons why settings cannot change in mid-run, by setting."""
        found = {}
        if self.optimizer is not None:
            found["weight_decay"] = "the groups of your optimizer have their own, which counts"
        if self.scheduler is not None:
            of_rate = "your lr_scheduler sets the learning rate; change it there"
            found |= dict.fromkeys(("learning_rate", "lr_scheduler_type", "warmup_steps"), of_rate)
        if self._here:
            other = f"the run has an object of this process, {self._here}; {_FACTORY}"
            found |= dict.fromkeys(("workers", "isolated"), other)
        return found

    @property
    def _here(self) -> str:
        """The object that no other process can have; "" for none."""
        if _is_optimizer(self.optimizer):
            return f"optimizer={type(self.optimizer).__name__}"
        if self.scheduler is not None and not _is_factory(self.scheduler):
            return f"lr_scheduler={type(self.scheduler).__name__}"
        return ""

    def check_elsewhere(self) -> None:
        """Check that other processes can build optimizer and scheduler for their parameters.

        Raises:
            ValueError: If one of them is an object.
        """
        if self._here:
            raise ValueError(
                f"{self._here} is an object of this process, which workers and isolated runs "
                f"cannot have; {_FACTORY}"
            )

    def build(self, model: nn.Module, settings: FinetuneSettings) -> OwnOptim:
        """Return optimizer and scheduler for a model.

        Args:
            model: The user's model.
            settings: Settings of the run, which may name the optimizer.

        Raises:
            ValueError: If a factory raises, or the optimizer or the scheduler cannot train this
                model; the message says why.
        """
        warnings: list[str] = []
        optimizer = self.optimizer
        if optimizer is None:
            alone = OneProcess(model, None, model, torch.device("cpu"))
            optimizer = optimizer_for(model, settings, alone)
        else:
            if not _is_optimizer(optimizer):
                trained = [p for p in model.parameters() if p.requires_grad]
                factory = functools.partial(optimizer, **self.options)
                optimizer = _made("optimizer", self.optimizer, factory, trained)
            warnings = _check_optimizer(optimizer, model)
        scheduler = self.scheduler
        if scheduler is not None:
            if _is_factory(scheduler):
                scheduler = _made("lr_scheduler", scheduler, scheduler, optimizer)
            _check_scheduler(scheduler, optimizer)
        return OwnOptim(optimizer, scheduler, named=self.optimizer is None, warnings=warnings)


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer)


def _is_factory(scheduler: Any) -> bool:
    return isinstance(scheduler, type) or not hasattr(scheduler, "step")


def _name(value: Any) -> str:
    if isinstance(value, functools.partial):
        return _name(value.func)
    return str(getattr(value, "__name__", type(value).__name__))


def _told(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"<{type(value).__name__}>"


def _made(what: str, given: Any, factory: Callable[[Any], Any], argument: Any) -> Any:
    """Return what a factory makes; ValueError if it raises."""
    try:
        return factory(argument)
    except Exception as error:
        of = "the list of trainable parameters" if what == "optimizer" else "the optimizer"
        raise ValueError(
            f"{what}={_name(given)} raised {type(error).__name__}: {error}; it is called with {of}"
        ) from error


def _check_optimizer(optimizer: Any, model: nn.Module) -> list[str]:
    """Check that an optimizer can train a model; return warnings."""
    name = type(optimizer).__name__
    if not _is_optimizer(optimizer):
        raise ValueError(
            f"the optimizer's factory returned {_told(optimizer)}; it has to return a "
            "torch.optim.Optimizer"
        )
    if missing := required(optimizer):
        raise ValueError(
            f"{name}.step needs {missing[0]!r}, which evaluates the loss several times a step; "
            "ortlab's steps have one forward and backward: use another optimizer"
        )
    state = optimizer.state_dict()
    if state.keys() != {"state", "param_groups"}:
        raise ValueError(
            f"the state_dict of {name} has {sorted(map(str, state))} instead of state and "
            "param_groups, so that no checkpoint can be checked; use the optimizer inside it"
        )
    _check_plain(f"the groups of {name}", {"": state["param_groups"]})
    groups = optimizer.param_groups
    if not all(isinstance(group.get("lr"), int | float | torch.Tensor) for group in groups):
        raise ValueError(f"the groups of {name} have no lr; use an optimizer with a learning rate")
    return _check_parameters(name, groups, model)


def _check_parameters(
    name: str, groups: Sequence[Mapping[str, Any]], model: nn.Module
) -> list[str]:
    """Check whose parameters the groups have; return a warning if some are missing."""
    known = dict(model.named_parameters())
    own, has = {id(p) for p in known.values()}, {id(p) for g in groups for p in g["params"]}
    foreign = [
        f"number {place} of group {number} ({list(p.shape)})"
        for number, group in enumerate(groups)
        for place, p in enumerate(group["params"])
        if id(p) not in own
    ]
    kind = type(model).__name__
    if foreign:
        raise ValueError(
            f"{name} has {len(foreign)} parameters that are not this {kind}'s: {_some(foreign)}; "
            f"create it for this model: {name}(model.parameters(), ...)"
        )
    if not any(p.requires_grad and id(p) in has for p in known.values()):
        raise ValueError(f"no parameter of {name} requires a gradient: nothing to train")
    missing = [n for n, p in known.items() if p.requires_grad and id(p) not in has]
    if not missing:
        return []
    return [f"{name} does not have {_some(missing)} of the {kind}, so that these are not trained"]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return ", ".join(names[:_FEW]) + more


def _check_scheduler_argument(optimizer: Any, scheduler: Any) -> None:
    if not _is_factory(scheduler):
        if not _is_optimizer(optimizer):
            raise ValueError(
                "this lr_scheduler is bound to an optimizer; give that, too, with optimizer=..., "
                "or give a function of the optimizer: lr_scheduler=lambda optimizer: ..."
            )
    elif not callable(scheduler):
        raise ValueError(
            f"lr_scheduler={_told(scheduler)} has no step(); give a scheduler of "
            "torch.optim.lr_scheduler, or a function of the optimizer that returns one"
        )


def _check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    name = type(scheduler).__name__
    for method in ("step", "state_dict", "load_state_dict"):
        if not callable(getattr(scheduler, method, None)):
            raise ValueError(
                f"the lr_scheduler {_told(scheduler)} has no {method}(); give a scheduler of "
                "torch.optim.lr_scheduler, or an object with the same methods"
            )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            f"{name} is bound to another optimizer than the run's {type(optimizer).__name__}; "
            "create it with that one"
        )
    missing = required(scheduler)
    if len(missing) > 1 or any("metric" not in each for each in missing):
        raise ValueError(
            f"{name}.step needs {', '.join(map(repr, missing))}; it is called without arguments "
            "after each step or, if it needs metrics, with the metric after each evaluation"
        )
    _check_plain(f"the state_dict of {name}", scheduler.state_dict())


def _check_plain(what: str, state: Mapping[str, Any]) -> None:
    """Check that a checkpoint can store a state; no file stores functions or objects."""
    try:
        for name, value in state.items():
            Packed().pack(value, f"{what}: {name or 'a value'}")
    except ValueError as error:
        raise ValueError(str(error)) from None
