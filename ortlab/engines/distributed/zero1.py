"""ZeRO stage 1 by torch: each rank has a shard of the optimizer's state.

torch's ZeroRedundancyOptimizer assigns whole parameters to ranks, each of which updates its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from ortlab.engines.distributed.comm_timer import Clock


@dataclass(frozen=True)
class _Form:
    """Shape and type of a tensor, without its values."""

    shape: torch.Size
    dtype: torch.dtype


def _form(value: Any) -> Any:
    """Return the form of a tensor; other values unchanged."""
    return _Form(value.shape, value.dtype) if isinstance(value, torch.Tensor) else value


class _OfInner:
    """Attribute that is read, set and deleted on the wrapped optimizer."""

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, outer: Any, _: type | None = None) -> torch.Tensor | None:
        found: torch.Tensor | None = getattr(outer.optim, self._name, None)
        return found

    def __set__(self, outer: Any, value: torch.Tensor | None) -> None:
        setattr(outer.optim, self._name, value)

    def __delete__(self, outer: Any) -> None:
        delattr(outer.optim, self._name)


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """Optimizer whose state is sharded across the ranks.

    State dictionaries have the form of one process, and are whole on every rank.

    Args:
        groups: Parameter groups as torch's optimizers take them.
        kind: Class of the wrapped optimizer.
        group: The process group.
        clock: Measures the time of the collectives.
        **defaults: Further arguments of `kind`.

    Raises:
        ValueError: If the parameters have several types.
    """

    _step_supports_amp_scaling = True  # read by GradScaler: the wrapped fused optimizer does

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        kind: type[torch.optim.Optimizer],
        *,
        group: dist.ProcessGroup,
        clock: Clock,
        **defaults: Any,
    ) -> None:
        groups = list(groups)
        types = {str(p.dtype).removeprefix("torch.") for part in groups for p in part["params"]}
        if len(types) > 1:
            raise ValueError(
                f"zero_stage=1 needs parameters of one type, and the model has "
                f"{' and '.join(sorted(types))}; choose zero_stage=0"
            )
        super().__init__(groups, kind, process_group=group, **defaults)
        self._clock = clock
        numbers = {id(p): number for number, p in enumerate(self._parameters())}
        self._own = [numbers[id(p)] for part in self.optim.param_groups for p in part["params"]]
        shards: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(shards, self._own, group=group)
        self._owner_of = {number: rank for rank, own in enumerate(shards) for number in own}

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    # GradScaler, and the stepper after a loss that is not finite, set `found_inf` to make a fused
    # optimizer skip its step; `grad_scale` is the factor that the gradients still have.
    found_inf = _OfInner()
    grad_scale = _OfInner()

    def _sync_params(self) -> None:
        """Broadcast each rank's updated parameters to the others, with the clock running."""
        with self._clock:
            super()._sync_params()  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, on every rank; all of them call it."""
        whole: dict[str, Any] = torch.optim.Optimizer.state_dict(self)
        parameters, here = self._parameters(), self.optim.state
        forms: list[Any] = [None] * self.world_size
        own = {
            number: {name: _form(value) for name, value in here[parameters[number]].items()}
            for number in self._own
            if parameters[number] in here
        }
        dist.all_gather_object(forms, own, group=self.process_group)
        found = {number: form for each in forms for number, form in each.items()}
        for number in sorted(found):
            state = whole["state"][number] = {}
            for name, form in found[number].items():
                if not isinstance(form, _Form):
                    state[name] = form
                    continue
                parameter, owner = parameters[number], self._owner_of[number]
                if owner == self.rank:
                    value = here[parameter][name].contiguous()
                else:
                    value = torch.empty(form.shape, dtype=form.dtype, device=parameter.device)
                dist.broadcast(value, group_src=owner, group=self.process_group)
                state[name] = value
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's shard of a whole state, without its learning rates and weight decays.

        Args:
            state_dict: A state as `state_dict` returns it.
        """
        states = state_dict["state"]
        shard = {here: states[number] for here, number in enumerate(self._own) if number in states}
        groups = self.optim.state_dict()["param_groups"]
        self.optim.load_state_dict({"state": shard, "param_groups": groups})
