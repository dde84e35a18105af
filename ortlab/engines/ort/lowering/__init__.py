"""Rules that lower ATen operators to ONNX nodes, by family; importing this registers them."""

from ortlab.engines.ort.lowering import (
    activations,
    convolution,
    elementwise,
    indexing,
    losses,
    normalization,
    pooling,
    products,
    reductions,
    views,
)

__all__ = [
    "activations",
    "convolution",
    "elementwise",
    "indexing",
    "losses",
    "normalization",
    "pooling",
    "products",
    "reductions",
    "views",
]
