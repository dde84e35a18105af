"""Description of the machine: processor, cores, and instructions for fast bf16."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ortlab.utils.hardware import processor
from ortlab.utils.wording import counted

_IDLE = 0.5
"""Load average up to which a machine counts as idle."""


@dataclass(frozen=True)
class Machine:
    """A processor, and the GPU if the models trained on one.

    Attributes:
        processor: Name of the processor.
        cores: Number of cores of the whole machine.
        cpus: Number of hardware threads that this process may use.
        threads: Number of threads that torch computes with.
        avx512_bf16: True if the processor has AVX512-BF16, None if unknown.
        amx_bf16: True if the processor has AMX for bf16, None if unknown.
        load: Load average of the minute before the benchmark.
        gpu: Name of the GPU, empty if none was used.
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
        """True if other processes were computing, which affects the results."""
        return self.load is not None and self.load > _IDLE

    def __str__(self) -> str:
        words = {True: "with", False: "without", None: "not known to have"}
        parts = [
            self.processor,
            f"{counted(self.cores, 'core')}, {counted(self.threads, 'torch thread')}",
            f"{words[self.avx512_bf16]} AVX512-BF16, {words[self.amx_bf16]} AMX",
        ]
        return ", ".join([*([self.gpu] if self.gpu else []), *parts])


def machine(device: str) -> Machine:
    """Return a description of this machine.

    Args:
        device: Device that the models train on, "cpu" or "cuda".
    """
    import torch  # heavy: torch

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
