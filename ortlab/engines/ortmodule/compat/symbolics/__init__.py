"""Export rules for operators that torch's exporter or ORT's gradient builder get wrong or lack.

Each rule names the operator and the symptom without the rule, and writes ONNX nodes that replace
the operator. ``ATen`` nodes call torch's own kernel; their gradients are declared with the rule.
The modules imported here declare the rules.
"""

from __future__ import annotations

from typing import Any

from torch.onnx._internal.torchscript_exporter import registration

from ortlab.engines.ortmodule.compat.symbolics import (
    activations,
    attention,
    builder,
    layers,
    products,
    tensors,
)
from ortlab.engines.ortmodule.compat.symbolics import run_by_torch as torch_rules

__all__ = ["activations", "layers", "products", "register", "tensors"]


def register(registry: Any, gradients: Any) -> None:
    """Add the rules to ORT's registries, which ORTModule passes on to torch and to ORT.

    Args:
        registry: ORT's CustomOpSymbolicRegistry.
        gradients: ORT's CustomGradientRegistry.
    """
    torch_rules.define()
    attention.define()
    for each in builder.RULES:
        domain, _, name = each.operator.rpartition("::")
        if each.operator not in builder.STOCK:
            group = registration.registry.get_function_group(f"{domain or 'aten'}::{name}")
            torchs = group.get(builder.OPSET) if group is not None else None
            builder.STOCK[each.operator] = registry._SYMBOLICS.get(f"{domain}::{name}", torchs)
        registry.register(name, domain, each.export)
        if each.gradient is not None:
            kernel, overload, nodes = each.gradient
            if nodes is None:
                stop = gradients.register_custom_stop_gradient_edges
                stop([0], builder.ATEN, "ATen", kernel, overload)
            else:
                gradients.register(builder.ATEN, "ATen", (kernel, overload), nodes)
