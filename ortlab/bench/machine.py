"""What computes: the processor's name, cores and instructions that bf16 is fast with."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ortlab.utils.hardware import processor

_IDLE = 0.5
"""The most that a machine's load is while it does nothing to speak of."""


@dataclass(frozen=True)
class Machine:
    """A processor, and the GPU where the models trained on one.

    ``cores`` are the whole machine's, ``cpus`` what this process may use of its hardware threads,
    ``threads`` what torch computes with. ``avx512_bf16`` and ``amx_bf16`` are None where nobody
    tells. ``load`` is how many threads wanted to compute in the minute before.
    """

    processor: str
    cores: int
    cpus: int
    threads: int
    avx512_bf16: bool | None
    amx_bf16: bool | None
    load: float | None = None
    gpu: str = ""

    @property
    def busy(self) -> bool:
        """Whether something else was computing, which the figures then tell of too."""
        return self.load is not None and self.load > _IDLE

    def __str__(self) -> str:
        words = {True: "with", False: "without", None: "not known to have"}
        parts = [
            self.processor,
            f"{_count(self.cores, 'core')}, {_count(self.threads, 'thread')} of torch's",
            f"{words[self.avx512_bf16]} AVX512-BF16, {words[self.amx_bf16]} AMX",
        ]
        return ", ".join([*([self.gpu] if self.gpu else []), *parts])


def machine(device: str) -> Machine:
    """This machine; `device` is where the models train, ``cpu`` or ``cuda``."""
    import torch

    here = processor()
    return Machine(
        processor=here.name,
        cores=here.cores,
        cpus=here.cpus,
        threads=torch.get_num_threads(),
        avx512_bf16="avx512_bf16" in here.flags if here.flags else None,
        amx_bf16="amx_bf16" in here.flags if here.flags else None,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        gpu=torch.cuda.get_device_name() if device == "cuda" else "",
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
