"""Plan of tensor parallelism: the layers of a model that are sharded, by columns or by rows.

The scheme is that of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): of two matrix
products with only elementwise functions or whole attention heads between them, the first is split
along its outputs, the second along its inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import nn

Style = Literal["columns", "fused", "gathered", "rows", "summed"]
"""Style in which a module is sharded.

- "columns": split along its outputs
- "fused": likewise, with query, key and value in one matrix, which are split each; the module
  around the layer tells them apart by its ``split_size``
- "gathered": split along its outputs, which are gathered afterwards
- "rows": split along its inputs
- "summed": replicated between two split layers; its gradients are summed over the ranks
"""

FUSED: Final = 3
"""Blocks of a "fused" layer: query, key and value."""

_BETWEEN = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU),
    *(nn.Softplus, nn.Hardswish, nn.Identity, nn.Dropout),
)
"""Elementwise modules, which each rank can apply to its own columns."""

_PLAN_OF: dict[str, Style | None] = {
    "colwise": "columns",
    "colwise_gather_output": "gathered",
    "rowwise": "rows",
    "replicated_with_grad_allreduce": "summed",
    "embedding_rowwise": None,  # embeddings stay whole
}
"""Styles of the entries of transformers' plans, by their names in transformers.integrations."""

_ENCODER: dict[str, Style] = {
    "attention.self.query": "columns",
    "attention.self.key": "columns",
    "attention.self.value": "columns",
    "attention.output.dense": "rows",
    "intermediate.dense": "columns",
    "output.dense": "rows",
}
_PARTS: dict[str, dict[str, Style]] = {
    "BertLayer": _ENCODER,
    "RobertaLayer": _ENCODER,
    "ElectraLayer": _ENCODER,
    "GPT2Block": {
        "attn.c_attn": "fused",
        "attn.c_proj": "rows",
        "mlp.c_fc": "columns",
        "mlp.c_proj": "rows",
    },
    "TransformerBlock": {
        "attention.q_lin": "columns",
        "attention.k_lin": "columns",
        "attention.v_lin": "columns",
        "attention.out_lin": "rows",
        "ffn.lin1": "columns",
        "ffn.lin2": "rows",
    },
}
"""Plans for classes of transformers that have none; ``TransformerBlock`` is DistilBERT's."""

_LOOKED_FOR = (
    "no plan of transformers (Llama, Qwen and others), no layer of BERT, RoBERTa, ELECTRA, "
    "DistilBERT or GPT-2, no torch.nn.TransformerEncoderLayer, no Linear-activation-Linear in a "
    "Sequential"
)


@dataclass(frozen=True)
class Part:
    """Sharding of one module.

    ``region`` names the part of the model in which activations are split: a "columns" or "fused"
    layer opens it, a "rows" layer closes it, other styles have none.
    """

    style: Style
    region: str | None = None


def plan_for(model: nn.Module, size: int) -> dict[str, Part]:
    """Return the modules of a model that are sharded across ranks.

    Embeddings, norms and all modules that are not known to be safe are replicated on every rank.

    Args:
        model: The model.
        size: Number of ranks that share each layer.

    Returns:
        How each module is sharded, by its name.

    Raises:
        ValueError: If no module is known to be shardable, if one cannot be divided by `size`, if
            the model's plan has unsupported entries, or if a layer to shard is used twice.
    """
    modules = dict(model.named_modules())
    found: dict[str, Part] = {}
    for name, module in modules.items():
        inside = f"{name}." if name else ""
        if any(name == path or name.startswith(f"{path}.") for path in found):
            continue
        for part, style, region in _known(module, size):
            alone = style in ("gathered", "summed")
            found.setdefault(inside + part, Part(style, None if alone else inside + region))
    if not found:
        raise ValueError(
            f"tensor_parallel={size}: no layer of {type(model).__name__} is known to be shardable: "
            f"{_LOOKED_FOR}; choose tensor_parallel=1"
        )
    users = _users(model)
    for path in list(found):
        if (reason := _unfit(modules[path], found[path].style, users, size)) is None:
            continue
        if found[path].style == "gathered" and "shared" in reason:
            del found[path]  # no other layer depends on its split: it can be replicated
            continue
        raise ValueError(f"tensor_parallel={size}: {path} {reason}; choose tensor_parallel=1")
    return found


def _known(module: nn.Module, size: int) -> Iterator[tuple[str, Style, str]]:
    """Yield the parts to shard inside `module` by its class, each with the name of its region."""
    if plan := getattr(module, "_tp_plan", None):
        for part, style in _of_transformers(module, plan, size):
            yield part, style, part.rpartition(".")[0]
        return
    region = ""
    for part, style in _of_class(module, size):
        region = region or part
        yield part, style, region
        if style == "rows":
            region = ""


def _of_class(module: nn.Module, size: int) -> Iterator[tuple[str, Style]]:
    """Yield the parts of `module` in the order in which they run."""
    if type(module).__module__.startswith("transformers.") and (
        parts := _PARTS.get(type(module).__name__)
    ):
        _check_heads(module, getattr(module, "config", None) or _config_in(module), size)
        yield from parts.items()
    elif isinstance(module, nn.TransformerEncoderLayer):
        # Its attention holds query, key and value in one matrix and is replicated.
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
    """Raise ValueError if the attention heads cannot be split evenly across the ranks."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise ValueError(
                f"tensor_parallel={size}: {type(module).__name__} has {name}={heads}, which cannot "
                f"be split evenly across {size} ranks; choose tensor_parallel="
                f"{max(each for each in range(1, size) if heads % each == 0)}"
            )


def _pairs(module: nn.Sequential) -> Iterator[tuple[str, Style]]:
    """Yield pairs of Linear layers with only elementwise functions between them."""
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
    """Return how often each module and parameter is used in `model`, by id."""
    places: dict[int, int] = {}
    for module in model.modules():
        for each in (*module._modules.values(), *module._parameters.values()):
            if each is not None:
                places[id(each)] = places.get(id(each), 0) + 1
    return places


def _unfit(module: nn.Module, style: Style, users: dict[int, int], size: int) -> str | None:
    """Return why `module` cannot be sharded, as a clause that follows its name, or None."""
    if any(users[id(each)] > 1 for each in (module, *module.parameters())):
        return "is shared with another layer, so its shards would be used in two ways"
    if style == "summed":
        return None
    if type(module) is nn.Linear:
        inputs, outputs = module.in_features, module.out_features
    elif type(module).__name__ == "Conv1D" and isinstance(module.weight, torch.Tensor):
        inputs, outputs = module.weight.shape  # of transformers, with a transposed weight
    else:
        return f"is a {type(module).__name__}, and only torch.nn.Linear is sharded"
    if module._forward_hooks or module._forward_pre_hooks:
        return "has hooks of its own, which would get shards"
    split = inputs if style == "rows" else outputs
    if split % size:
        what = "inputs" if style == "rows" else "outputs"
        return f"has {split} {what}, which cannot be split evenly across {size} ranks"
    return None
