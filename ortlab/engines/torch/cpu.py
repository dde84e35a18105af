"""What the CPU can do, as torch detects it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import torch

_OF_BF16: Final = ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16")
_OF_FP16: Final = ("avx512_fp16", "amx_fp16", "avx10_1", "fp16_arith")
_INSTRUCTIONS: Final[dict[torch.dtype | str, tuple[str, ...]]] = {
    torch.bfloat16: _OF_BF16,
    "bf16": _OF_BF16,
    torch.float16: _OF_FP16,
    "fp16": _OF_FP16,
}
"""Instruction sets that make torch's products of a type fast, as `torch.cpu` names them."""


@functools.cache
def has_instructions(dtype: torch.dtype | str) -> bool:
    """Return True if this CPU has instructions for products of a 16-bit type, or it is unknown.

    Without them torch's products take many times as long as in float32.

    Args:
        dtype: torch.bfloat16 or torch.float16, or its name as a setting, "bf16" or "fp16".
    """
    known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # newer torch
    return not known or any(known.get(name) for name in _INSTRUCTIONS[dtype])
