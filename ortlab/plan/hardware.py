"""Catalog of GPUs and of the nodes that they are in, with sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Hardware:
    """A GPU, and the links of its node.

    Attributes:
        name: Name in the catalog.
        generation: Key of `EFFICIENCY`; "" if there is none.
        memory: Bytes of a GPU.
        flops: Peak operations per second of dense matrix products, by precision.
        link: Bytes per second and direction between the GPUs of a node, for each GPU.
        network: Bytes per second and direction between nodes, for each GPU.
        node: GPUs of a node.
        source: Addresses of the numbers.
        efficiency: Fraction of the peak that training reaches in its computation.
    """

    name: str
    generation: str
    memory: int
    flops: dict[str, float]
    link: float
    network: float
    node: int
    source: str
    efficiency: float


CONTEXT: Final = 1573 * 2**20
"""Bytes of CUDA's kernels on a GPU: nvidia-smi on an A100, as BigScience noted in
https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/chronicles-prequel.md
"""
EFFICIENCY: Final = {"V100": 0.435, "A100": 0.568, "H100": 0.534}
"""Generation -> the one constant that is fitted; see `ortlab.plan.published_runs.FITTED`."""
_NVIDIA: Final = "https://www.nvidia.com/en-us/data-center"
_V100: Final = {"fp16": 125e12, "fp32": 15.7e12}
_A100: Final = {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12}
_H100: Final = {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12}


def _gpu(
    name: str, memory: float, flops: dict[str, float], link: float, network: float, source: str
) -> Hardware:
    generation = name[:4].upper()
    generation = "H100" if generation == "H200" else generation  # the same processor
    node = 16 if name.endswith("dgx2") else 8
    efficiency = EFFICIENCY[generation]
    return Hardware(name, generation, int(memory), flops, link, network, node, source, efficiency)


CATALOG: Final = {
    each.name: each
    for each in (
        _gpu(
            "v100-32gb-dgx2",
            32 * 2**30,
            _V100,
            150e9,
            6.25e9,  # 8 links of 100 Gb/s for 16 GPUs: 800 Gb/s, as section 10 of the paper says
            f"{_NVIDIA}/v100/ and https://arxiv.org/abs/1910.02054",
        ),
        _gpu("v100-32gb", 32 * 2**30, _V100, 150e9, 12.5e9, f"{_NVIDIA}/v100/"),
        _gpu("a100-40gb", 40 * 2**30, _A100, 300e9, 25e9, f"{_NVIDIA}/a100/"),
        _gpu("a100-80gb", 80 * 2**30, _A100, 300e9, 25e9, f"{_NVIDIA}/a100/"),
        _gpu("h100-80gb", 80 * 2**30, _H100, 450e9, 50e9, f"{_NVIDIA}/h100/"),
        _gpu("h200-141gb", 141e9, _H100, 450e9, 50e9, f"{_NVIDIA}/h200/"),
    )
}
"""Name -> GPU. Memory of V100, A100 and H100 is in GiB, as nvidia-smi shows it."""
