"""Memory of ranks that train a small GPT, measured: ``planned_ranks RANK SIZE FOLDER``.

Each rank writes the bytes that it holds after a step, by stage of ZeRO, to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY, BATCH = 4, 128, 4, 64, 512, 4


class Block(nn.Module):
    """Layer of GPT, or a rank's part of it under tensor parallelism, without the communication."""

    def __init__(self, tensor: int = 1) -> None:
        super().__init__()
        part = HIDDEN // tensor
        self.heads = HEADS // tensor
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.query_key_value = nn.Linear(HIDDEN, 3 * part)
        self.out = nn.Linear(part, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * part), nn.Linear(4 * part, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        three = self.query_key_value(self.first(x)).view(batch, tokens, 3, self.heads, -1)
        query, key, value = three.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        grown: torch.Tensor = x + self.down(functional.gelu(self.up(self.second(x))))
        return grown


class Gpt(nn.Module):
    """GPT with tied embeddings and without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight
        logits = functional.linear(self.norm(self.blocks(x)), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def saved_bytes(forward: Callable[[], Any], parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes that `forward` saves for the backward pass, without the parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = forward()
    del kept
    return sum(found.values())


def _local(tensors: Iterable[Any]) -> int:
    """Return the bytes of a rank's parts of tensors."""
    parts = (each.to_local() if isinstance(each, DTensor) else each for each in tensors)
    return sum(part.nbytes for part in parts if torch.is_tensor(part) and part.ndim)


def step(stage: int) -> dict[str, int]:
    """Train a step and return what the rank holds: DDP, ZeRO's optimizer, or FSDP for stage 3."""
    torch.manual_seed(0)
    model: Any = Gpt()
    inner = model
    if stage == 3:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer: Any = (
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
        if stage == 1
        else torch.optim.AdamW(model.parameters())
    )
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE))
    model(tokens).backward()
    optimizer.step()
    held = optimizer.optim if stage == 1 else optimizer
    plain = Gpt()
    return {
        "parameters": _local(inner.parameters()),
        "gradients": _local(parameter.grad for parameter in inner.parameters()),
        "optimizer_state": _local(
            value for state in held.state.values() for value in state.values()
        ),
        "activations": saved_bytes(lambda: plain(tokens), plain.parameters()),
    }


def main() -> None:
    """Measure all stages."""
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    found = {stage: step(stage) for stage in (0, 1, 3)}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
