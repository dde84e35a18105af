"""What tensor parallelism shards of a model: which layers by columns, which by rows.

As in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): of two matrix products with
nothing but elementwise functions or whole heads of attention between them, the first is split by
its outputs, the second by its inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

Style = Literal["columns", "gathered", "rows", "summed"]
"""A layer split by its outputs, one whose outputs are put together again, one split by its inputs,
and a module between the two that every rank has whole: its gradients are sums over the ranks."""

_BETWEEN = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU),
    *(nn.Softplus, nn.Hardswish, nn.Identity, nn.Dropout),
)
"""Elementwise, so that each rank can apply them to its own columns."""

_PLAN_OF: dict[str, Style | None] = {
    "colwise": "columns",
    "colwise_gather_output": "gathered",
    "rowwise": "rows",
    "replicated_with_grad_allreduce": "summed",
    "embedding_rowwise": None,  # embeddings stay whole
}
"""The entries of transformers' plans, by their names in transformers.integrations."""

_ENCODER = {
    "attention.self.query": "columns",
    "attention.self.key": "columns",
    "attention.self.value": "columns",
    "attention.output.dense": "rows",
    "intermediate.dense": "columns",
    "output.dense": "rows",
}
_PARTS: dict[str, dict[str, Any]] = {
    "BertLayer": _ENCODER,
    "RobertaLayer": _ENCODER,
    "ElectraLayer": _ENCODER,
    "TransformerBlock": {
        "attention.q_lin": "columns",
        "attention.k_lin": "columns",
        "attention.v_lin": "columns",
        "attention.out_lin": "rows",
        "ffn.lin1": "columns",
        "ffn.lin2": "rows",
    },
}
"""Classes of transformers without a plan of their own. ``TransformerBlock`` is DistilBERT's."""

_LOOKED_FOR = (
    "no plan of transformers (Llama, Qwen and others), no layer of BERT, RoBERTa, ELECTRA or "
    "DistilBERT, no torch.nn.TransformerEncoderLayer, no Linear-activation-Linear in a Sequential"
)


@dataclass(frozen=True)
class Part:
    """How one module is sharded. ``region`` names the layers between which activations are split.

    Columns open a region, rows close it; the others have none.
    """

    style: Style
    region: str | None = None


def plan_for(model: nn.Module, size: int) -> dict[str, Part]:
    """What `size` ranks share of `model`, by the names of its modules.

    Embeddings, norms and what is not known to be safe stay whole on every rank.

    ValueError where nothing is known, where something cannot be divided by `size`, where a plan has
    entries that are not supported, and where a layer that would be sharded is used twice.
    """
    modules = dict(model.named_modules())
    found: dict[str, Part] = {}
    for name, module in modules.items():
        inside = f"{name}." if name else ""
        if any(name == path or name.startswith(f"{path}.") for path in found):
            continue
        for part, style in _known(module, size):
            path = inside + part
            region = path.rpartition(".")[0] if style in ("columns", "rows") else None
            found.setdefault(path, Part(style, region))
    if not found:
        more = (
            "; its Conv1D layers (GPT-2's) hold query, key and value in one matrix, which columns "
            "do not divide by heads"
            if any(type(module).__name__ == "Conv1D" for module in modules.values())
            else ""
        )
        raise ValueError(
            f"tensor_parallel={size}: nothing in {type(model).__name__} is known to be shardable: "
            f"{_LOOKED_FOR}{more}; choose tensor_parallel=1"
        )
    users = _users(model)
    for path in list(found):
        if (reason := _unfit(modules[path], found[path].style, users, size)) is None:
            continue
        if found[path].style == "gathered" and "shared" in reason:
            del found[path]  # it stands alone, and may stay whole
            continue
        raise ValueError(f"tensor_parallel={size}: {path} {reason}; choose tensor_parallel=1")
    return found


def _known(module: nn.Module, size: int) -> Iterator[tuple[str, Style]]:
    """What to shard inside `module`, by its own knowledge alone."""
    if plan := getattr(module, "_tp_plan", None):
        yield from _of_transformers(module, plan, size)
    elif type(module).__module__.startswith("transformers.") and (
        parts := _PARTS.get(type(module).__name__)
    ):
        _check_heads(module, getattr(module, "config", None) or _config_in(module), size)
        yield from parts.items()
    elif isinstance(module, nn.TransformerEncoderLayer):
        # Its attention holds query, key and value in one matrix, and stays whole.
        yield "linear1", "columns"
        yield "linear2", "rows"
    elif type(module) is nn.Sequential:
        yield from _pairs(module)


def _of_transformers(
    module: nn.Module, plan: dict[str, str], size: int
) -> Iterator[tuple[str, Style]]:
    _check_heads(module, getattr(module, "config", None), size)
    names = [name for name, _ in module.named_modules()]
    for pattern, entry in plan.items():
        fits = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        matching = [name for name in names if fits.fullmatch(name)]
        if not matching:
            continue
        if entry not in _PLAN_OF:
            raise ValueError(
                f"tensor_parallel={size}: the plan of {type(module).__name__} has {entry!r} for "
                f"{pattern}, which is not supported; choose tensor_parallel=1"
            )
        style = _PLAN_OF[entry]
        if style is not None:
            yield from ((name, style) for name in matching)


def _config_in(module: nn.Module) -> Any:
    return next((m.config for m in module.modules() if hasattr(m, "config")), None)


def _check_heads(module: nn.Module, config: Any, size: int) -> None:
    """ValueError where the heads of attention cannot be given out whole."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise ValueError(
                f"tensor_parallel={size}: {type(module).__name__} has {name}={heads}, which {size} "
                "ranks cannot share evenly; choose a divisor of it"
            )


def _pairs(module: nn.Sequential) -> Iterator[tuple[str, Style]]:
    """Linear layers with nothing but elementwise functions between them, two by two."""
    first: str | None = None
    for name, part in module.named_children():
        if type(part) is nn.Linear:
            if first is None:
                first = name
            else:
                yield first, "columns"
                yield name, "rows"
                first = None
        elif not isinstance(part, _BETWEEN):
            first = None


def _users(model: nn.Module) -> dict[int, int]:
    """How many places each module and parameter of `model` has, by its id."""
    places: dict[int, int] = {}
    for module in model.modules():
        for each in (*module._modules.values(), *module._parameters.values()):
            if each is not None:
                places[id(each)] = places.get(id(each), 0) + 1
    return places


def _unfit(module: nn.Module, style: Style, users: dict[int, int], size: int) -> str | None:
    """Why `module` cannot be sharded; the reason goes on from its name."""
    if any(users[id(each)] > 1 for each in (module, *module.parameters())):
        return "is shared with another layer, so that its shards would be used in two ways"
    if style == "summed":
        return None
    if type(module) is not nn.Linear:
        return f"is a {type(module).__name__}, and only torch.nn.Linear is sharded"
    if module._forward_hooks or module._forward_pre_hooks:
        return "has hooks of its own, which would meet shards"
    split = module.in_features if style == "rows" else module.out_features
    if split % size:
        what = "inputs" if style == "rows" else "outputs"
        return f"has {split} {what}, which {size} ranks cannot share evenly"
    return None
