"""Instruction sets of the CPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import torch

_INSTRUCTIONS: Final = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "avx10_1", "fp16_arith"),
}
"""Instruction sets that make torch's products of a type fast, as `torch.cpu` names them."""


@functools.cache
def has_instructions(dtype: torch.dtype) -> bool:
    """Return True if this CPU has instructions for products of a 16-bit type, or it is unknown.

    Without them torch's products take many times as long as in float32.

    Args:
        dtype: torch.bfloat16 or torch.float16.
    """
    known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # newer torch
    return not known or any(known.get(name) for name in _INSTRUCTIONS[dtype])
