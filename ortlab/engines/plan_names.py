"""Names of recompute plans: modules whose activations the backward pass computes again.

"encoder.layer.*" stands for all items of the list of layers ``encoder.layer``, and
"encoder.layer.*.attention" for the attention in each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from ortlab.settings import unknown_name
from ortlab.utils.errors import Concise

OFF: Final = "off"
LAYERS: Final = "layers"
"""Plan that stands for all layers of all lists of layers."""
DEEPEST: Final = 2
"""Number of levels below a layer on which plans may name modules."""


class UnknownPlan(Concise, ValueError):
    """Raised for a plan that does not exist in a model. The message suggests the nearest."""


def split(plan: str) -> tuple[str, ...]:
    """Return the plans in a text, without "off".

    Args:
        plan: Plan, or several separated by commas.
    """
    names = (name.strip() for name in plan.split(","))
    return tuple(name for name in names if name and name != OFF)


def whole_layers(known: Iterable[str]) -> tuple[str, ...]:
    """Return the plans that name whole layers.

    Args:
        known: Plans of a model.
    """
    return tuple(plan for plan in known if plan.endswith("*"))


def checked(plans: Iterable[str], known: Collection[str]) -> tuple[str, ...]:
    """Return the plans that `plans` stand for.

    Args:
        plans: Names of plans. "layers" stands for all whole layers.
        known: Plans of the model.

    Raises:
        UnknownPlan: If a plan does not exist.
    """
    layers = whole_layers(known)
    found: list[str] = []
    for plan in plans:
        if plan == LAYERS:
            if not layers:
                raise UnknownPlan(
                    f"recompute={LAYERS!r}: the model has no list of layers whose activations "
                    f"could be recomputed; {unknown_name('', known)}"
                )
            found += layers
        elif plan in known:
            found.append(plan)
        else:
            names = [LAYERS, *known] if layers else list(known)
            raise UnknownPlan(f"recompute={plan!r}: {unknown_name(plan, names)}")
    return tuple(dict.fromkeys(found))


def plan_of(path: str) -> str:
    """Return the plan that names a module; "" if none does.

    Args:
        path: Path of the module, such as "encoder.layer.0.attention".
    """
    names: Sequence[str] = path.split(".")
    at = next((i for i, name in enumerate(names) if name.isdecimal()), None)
    if at is None or len(names) > at + 1 + DEEPEST:
        return ""
    return ".".join([*names[:at], "*", *names[at + 1 :]])
