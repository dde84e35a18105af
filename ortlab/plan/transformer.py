"""Shape of a transformer, from sizes or a Hugging Face config: its parameters and operations."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?)", re.IGNORECASE)
_TIMES: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_GATED: Final = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo", "olmo2")
"""Model types whose MLP has three matrices, and whose layers have neither biases nor dropout."""
_KEYS: Final = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocabulary": ("vocab_size",),
    "kv_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim"),
    "sequence": ("max_position_embeddings", "n_positions", "seq_length"),
}
"""Size -> its keys in the configs of Hugging Face's transformers; the first four are needed."""
_TIED: Final = ("gemma", "gemma2")
"""Gated model types whose logits use the embedding's weights unless the config says otherwise."""
_NO_POSITIONS: Final = ("bloom", "gpt_neox", "falcon", "mpt", *_GATED)
"""Model types without an embedding of positions."""
VOCABULARY: Final = 51_200
"""Vocabulary of a model that is given by its size: GPT-2's, padded as Megatron-LM does."""
_CLOSE: Final = 0.1
"""Largest relative difference between a given number of parameters and that of the sizes."""


@dataclass(frozen=True)
class Transformer:
    """Shape of a decoder.

    Attributes:
        layers: Number of layers.
        hidden: Hidden size.
        heads: Attention heads.
        sequence: Tokens of a sample.
        vocabulary: Vocabulary size; 0 counts neither embedding nor logits.
        kv_heads: Heads of keys and values; 0 is as many as `heads`.
        head_size: Size of a head; 0 is ``hidden / heads``.
        intermediate: Width of the MLP; 0 is ``4 * hidden``.
        gated: True for an MLP with three matrices (SwiGLU), without biases and dropout.
        tied: True if the logits use the embedding's weights.
        positions: True if positions have an embedding.
        about: Remark about sizes that were assumed; "" for none.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int = VOCABULARY
    kv_heads: int = 0
    head_size: int = 0
    intermediate: int = 0
    gated: bool = False
    tied: bool = True
    positions: bool = True
    about: str = ""

    @property
    def query_width(self) -> int:
        """Width of all queries."""
        return self.heads * self.head_size if self.head_size else self.hidden

    @property
    def kv_width(self) -> int:
        """Width of all keys, which is that of all values."""
        return self.query_width * (self.kv_heads or self.heads) // self.heads

    @property
    def mlp_width(self) -> int:
        """Width of the MLP."""
        return self.intermediate or 4 * self.hidden

    @property
    def matrices(self) -> int:
        """Elements of the matrices of a layer: 12 h^2 for GPT."""
        attention = 2 * self.hidden * (self.query_width + self.kv_width)
        return attention + (3 if self.gated else 2) * self.hidden * self.mlp_width

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer: 12 h^2 + 13 h for GPT."""
        biases = self.query_width + 2 * self.kv_width + 2 * self.hidden + self.mlp_width
        return self.matrices + (2 * self.hidden if self.gated else 4 * self.hidden + biases)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding of tokens."""
        return self.vocabulary * self.hidden

    @property
    def position_parameters(self) -> int:
        """Parameters of the embedding of positions."""
        return self.sequence * self.hidden if self.positions else 0

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        norm = self.hidden * (1 if self.gated else 2)
        tables = self.embedding * (1 if self.tied else 2) + self.position_parameters
        return self.layers * self.layer_parameters + tables + norm

    def layer_flops(self, batch: int) -> int:
        """Return the operations of a layer's forward pass, without attention's scores.

        Args:
            batch: Number of samples.
        """
        return 2 * batch * self.sequence * self.matrices

    def score_flops(self, batch: int) -> int:
        """Return the operations of the scores and of their product with the values.

        Masked scores count, as in appendix A of Narayanan et al. 2021 (arXiv:2104.04473).

        Args:
            batch: Number of samples.
        """
        return 4 * batch * self.sequence**2 * self.query_width

    def logit_flops(self, batch: int) -> int:
        """Return the operations of the logits' forward pass.

        Args:
            batch: Number of samples.
        """
        return 2 * batch * self.sequence * self.embedding

    def step_flops(self, batch: int, *, again: bool) -> int:
        """Return the operations of a step: forward, and twice as many backward.

        Args:
            batch: Number of samples.
            again: True if each layer's forward pass is computed again.
        """
        layers = self.layers * (self.layer_flops(batch) + self.score_flops(batch))
        return (4 if again else 3) * layers + 3 * self.logit_flops(batch)


def parse_count(count: str | int, *, of: str = "parameters") -> int:
    """Parse a number of parameters or tokens.

    Args:
        count: A number, or text such as "1_558_000_000", "350M" or "2.7B".
        of: Name of the counted things, for the message.

    Raises:
        ValueError: `count` is not a positive number; the message shows the format.
    """
    if isinstance(count, int) and not isinstance(count, bool) and count > 0:
        return count
    match = _COUNT.fullmatch(str(count).strip().replace("_", "").replace(",", ""))
    found = 0 if match is None else round(float(match[1]) * _TIMES[match[2].upper()])
    if found < 1:
        raise ValueError(
            f"{count!r} is not a number of {of}; use one such as 350M, 2.7B or 1558000000"
        )
    return found


def transformer(model: Any, sizes: Mapping[str, int]) -> Transformer:
    """Return the shape of a model.

    Args:
        model: Number of parameters, such as "175B"; a config of Hugging Face's transformers as a
            dictionary, an object or the path of its ``config.json``; or a model with such a config.
        sizes: Sizes by name (`layers`, `hidden`, ...), which replace the config's.

    Raises:
        ValueError: If it is neither, sizes are missing or contradict the number of parameters, or
            the heads do not divide the hidden size.
    """
    config = _config(model)
    found = _of_config(config, sizes) if config is not None else _of_count(model, sizes)
    if found.hidden % found.heads and not found.head_size:
        near = nearest(found.heads, divisors(found.hidden))
        raise ValueError(
            f"hidden={found.hidden} is not a multiple of heads={found.heads}; the nearest number "
            f"of heads is {near}"
        )
    if found.heads % (found.kv_heads or 1):
        near = nearest(found.kv_heads, divisors(found.heads))
        raise ValueError(
            f"heads={found.heads} is not a multiple of kv_heads={found.kv_heads}; the nearest is "
            f"kv_heads={near}"
        )
    return found


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, in order.

    Args:
        number: The number.
    """
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def nearest(number: int, choices: list[int]) -> int:
    """Return the choice nearest to a number; the lower one of two.

    Args:
        number: The number.
        choices: The choices, at least one.
    """
    return min(choices, key=lambda each: (abs(each - number), each))


def _config(model: Any) -> Mapping[str, Any] | None:
    """Return the config of Hugging Face's transformers that `model` names or has, or None."""
    if isinstance(model, str) and (model.endswith(".json") or Path(model).is_dir()):
        path = Path(model)
        path = path / "config.json" if path.is_dir() else path
        try:
            read = json.loads(path.read_text())
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror}); name a file") from None
        except ValueError:
            raise ValueError(f"{path} is not a JSON file; name a config.json") from None
        if not isinstance(read, dict):
            raise ValueError(f"{path} is not a config: it has no names; name a config.json")
        return read
    if isinstance(model, str | int):
        return None
    if isinstance(model, Mapping):
        return model
    made = getattr(getattr(model, "config", model), "to_dict", None)
    config = made() if callable(made) else None
    if not isinstance(config, Mapping):
        raise ValueError(
            f"{type(model).__name__} has no config of Hugging Face's transformers; use a number "
            "of parameters such as '7B' with layers, hidden and heads, or a config"
        )
    return config


def _of_config(config: Mapping[str, Any], sizes: Mapping[str, int]) -> Transformer:
    kind = str(config.get("model_type", ""))
    for experts in ("num_local_experts", "n_routed_experts", "num_experts"):
        if (config.get(experts) or 1) > 1:
            raise ValueError(
                f"{experts}={config[experts]}: mixtures of experts are not planned yet; use the "
                "config of a dense model"
            )
    if config.get("is_encoder_decoder"):
        raise ValueError(
            f"model_type={kind!r}: encoder-decoders are not planned yet; use a decoder's config"
        )
    found: dict[str, int] = {}
    for size, keys in _KEYS.items():
        value = sizes.get(size) or next((config[key] for key in keys if config.get(key)), 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{size}={value!r} in the config is not a whole number")
        found[size] = value
    if missing := [name for name in tuple(_KEYS)[:4] if not found[name]]:
        known = ", ".join(_KEYS[missing[0]])
        raise ValueError(f"the config has no {missing[0]} ({known}); add it, or use {missing[0]}=")
    found["sequence"] = found["sequence"] or 2048
    gated = kind in _GATED
    tied = bool(config.get("tie_word_embeddings", kind in _TIED or not gated))
    positions = kind not in _NO_POSITIONS
    return replace(_sized(found), gated=gated, tied=tied, positions=positions)


def _sized(sizes: Mapping[str, int], about: str = "") -> Transformer:
    return Transformer(
        sizes["layers"],
        sizes["hidden"],
        sizes["heads"],
        sizes["sequence"],
        sizes["vocabulary"],
        sizes.get("kv_heads", 0),
        sizes.get("head_size", 0),
        sizes.get("intermediate", 0),
        about=about,
    )


def _of_count(count: str | int, sizes: Mapping[str, int]) -> Transformer:
    """Return the shape with the given sizes, or one as GPT-3's with that many parameters."""
    wanted = parse_count(count)
    found = {name: size for name, size in sizes.items() if size}
    found = {"sequence": 2048, "vocabulary": VOCABULARY, **found}
    needed = ("layers", "hidden", "heads")
    missing = [name for name in needed if name not in found]
    if len(missing) == len(needed):
        return _assumed(wanted, found)
    if missing:
        raise ValueError(
            f"there is no {', '.join(missing)}; give layers, hidden and heads, or none of them"
        )
    model = _sized(found)
    if abs(model.parameters / wanted - 1) > _CLOSE:
        raise ValueError(
            f"{count} parameters, but layers={model.layers}, hidden={model.hidden} and vocabulary="
            f"{model.vocabulary} make {model.parameters / 1e9:.3g}B; correct one of them"
        )
    return model


def _assumed(wanted: int, sizes: Mapping[str, int]) -> Transformer:
    """Return the shape like GPT-3's that has about as many parameters.

    GPT-3 is 64 times as wide as it has layers, and from 3 billion parameters on 128 times
    (arXiv:2005.14165, table 2.1). Degrees of parallelism should divide layers and heads.
    """
    ratio = 64 if wanted < 3e9 else 128
    heads = [1, 2, 3, 4, 6, 8, 12, *range(16, 400, 8)]
    shapes = [
        {**sizes, "layers": layers, "hidden": 128 * each, "heads": each}
        for layers in range(4, 260, 4)
        for each in heads
        if 0.5 < 128 * each / layers / ratio < 2
    ]

    def far(shape: Mapping[str, int]) -> float:
        off = abs(math.log(_sized(shape).parameters / wanted))
        return 4 * off + abs(math.log(shape["hidden"] / shape["layers"] / ratio))

    best = min(shapes, key=far)
    told = f"{best['layers']} layers, hidden size {best['hidden']}, {best['heads']} heads"
    return _sized(best, about=f"assumed shape, as GPT-3's: {told}")
