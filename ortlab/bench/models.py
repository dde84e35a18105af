"""Models of the benchmark with a batch for each: fixed shapes, random weights, no download.

All models but the LSTM are from transformers, with dropout of 0.1 wherever their configuration has
one, and with torch's scaled_dot_product_attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    Task = tuple[nn.Module, dict[str, torch.Tensor]]

SEED = 0
_DROPOUT = 0.1
_CLASSES = 10


@dataclass(frozen=True)
class Model:
    """A model of the benchmark.

    Attributes:
        about: Description of model and batch.
        build: Creates model and batch. Its argument is True for a tiny model.
    """

    about: str
    build: Callable[[bool], Task]


def build(name: str, *, quick: bool = False, known: Mapping[str, Model] | None = None) -> Task:
    """Return a model in training mode and the batch that it trains on.

    Weights and batch are the same each time. Random states are restored.

    Args:
        name: Name of the model.
        quick: True for a tiny model.
        known: Models to choose from. By default `MODELS`.
    """
    import torch  # heavy: torch
    from torch.random import fork_rng  # heavy: torch

    with fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model, batch = (MODELS if known is None else known)[name].build(quick)
    return model.train(), batch


def _ids(vocabulary: int, *shape: int) -> torch.Tensor:
    import torch  # heavy: torch

    return torch.randint(vocabulary, shape)


def _bert(
    quick: bool, *, layers: int, hidden: int, rows: int, tokens: int, vocabulary: int
) -> Task:
    """Return a classifier and a batch without padding, with the attention mask of a tokenizer."""
    import torch  # heavy: torch
    from transformers import BertConfig, BertForSequenceClassification  # heavy: transformers

    if quick:
        layers, hidden, vocabulary = 1, 32, 100
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2 if quick else hidden // 64,
        intermediate_size=4 * hidden,
        hidden_dropout_prob=_DROPOUT,
        attention_probs_dropout_prob=_DROPOUT,
        **_classes(2),
    )
    ids = _ids(vocabulary, rows, tokens)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": _ids(2, rows)}
    return BertForSequenceClassification(config), batch


def _gpt2(quick: bool) -> Task:
    from transformers import GPT2Config, GPT2LMHeadModel  # heavy: transformers

    layers, hidden, heads, vocabulary = (1, 32, 2, 100) if quick else (4, 768, 12, 50257)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=_DROPOUT,
        embd_pdrop=_DROPOUT,
        attn_pdrop=_DROPOUT,
        bos_token_id=vocabulary - 1,
        eos_token_id=vocabulary - 1,
        use_cache=False,
        **_common(),
    )
    ids = _ids(vocabulary, *((2, 16) if quick else (4, 256)))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def _t5(quick: bool) -> Task:
    from transformers import T5Config, T5ForConditionalGeneration  # heavy: transformers

    layers, hidden, heads, vocabulary = (1, 32, 2, 100) if quick else (6, 512, 8, 32128)
    config = T5Config(
        vocab_size=vocabulary,
        d_model=hidden,
        d_kv=hidden // heads,
        d_ff=4 * hidden,
        num_layers=layers,
        num_heads=heads,
        dropout_rate=_DROPOUT,
        use_cache=False,
        **_common(decoder_start_token_id=0),
    )
    shape = (2, 16) if quick else (4, 64)
    batch = {"input_ids": _ids(vocabulary, *shape), "labels": _ids(vocabulary, *shape)}
    return T5ForConditionalGeneration(config), batch


def _vit(quick: bool) -> Task:
    import torch  # heavy: torch
    from transformers import ViTConfig, ViTForImageClassification  # heavy: transformers

    layers, hidden, heads, pixels = (1, 32, 2, 32) if quick else (12, 384, 6, 224)
    config = ViTConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        image_size=pixels,
        patch_size=16,
        hidden_dropout_prob=_DROPOUT,
        attention_probs_dropout_prob=_DROPOUT,
        **_classes(_CLASSES),
    )
    rows = 4
    batch = {"pixel_values": torch.randn(rows, 3, pixels, pixels), "labels": _ids(_CLASSES, rows)}
    return ViTForImageClassification(config), batch


def _resnet(quick: bool) -> Task:
    import torch  # heavy: torch
    from transformers import ResNetConfig, ResNetForImageClassification  # heavy: transformers

    widths, rows = ([8, 16], 2) if quick else ([64, 128, 256, 512], 32)
    config = ResNetConfig(
        embedding_size=widths[0],
        hidden_sizes=widths,
        depths=[2] * len(widths),
        layer_type="basic",
        **_classes(_CLASSES, attn_implementation="eager"),  # without attention, sdpa is refused
    )
    batch = {"pixel_values": torch.randn(rows, 3, 32, 32), "labels": _ids(_CLASSES, rows)}
    return ResNetForImageClassification(config), batch


def _mobilenet(quick: bool) -> Task:
    import torch  # heavy: torch
    from transformers import (
        MobileNetV2Config,
        MobileNetV2ForImageClassification,
    )  # heavy: transformers

    pixels, rows = (32, 2) if quick else (64, 16)
    config = MobileNetV2Config(
        image_size=pixels,
        depth_multiplier=0.1 if quick else 1.0,
        classifier_dropout_prob=_DROPOUT,
        **_classes(_CLASSES, attn_implementation="eager"),
    )
    batch = {"pixel_values": torch.randn(rows, 3, pixels, pixels), "labels": _ids(_CLASSES, rows)}
    return MobileNetV2ForImageClassification(config), batch


def _lstm(quick: bool) -> Task:
    from ortlab.bench.lstm import Lstm  # heavy: torch

    width, vocabulary, tokens = (16, 100, 8) if quick else (256, 10000, 64)
    ids = _ids(vocabulary, 2 if quick else 32, tokens)
    return Lstm(vocabulary, width, layers=2), {"ids": ids, "labels": ids}


def _common(**more: Any) -> dict[str, Any]:
    """Return settings that are not declared fields of a configuration, extended by `more`."""
    return {"attn_implementation": "sdpa", **more}


def _classes(number: int, **more: Any) -> dict[str, Any]:
    """Return a classifier's settings, extended by `more`.

    Without a problem type, the first call would choose one and modify the model.
    """
    return _common(num_labels=number, problem_type="single_label_classification", **more)


def _berts(layers: int, hidden: int, rows: int, tokens: int, vocabulary: int = 30522) -> Model:
    about = f"BERT {layers} x {hidden}, {rows} x {tokens} tokens"
    build = functools.partial(
        _bert, layers=layers, hidden=hidden, rows=rows, tokens=tokens, vocabulary=vocabulary
    )
    return Model(about, build)


MODELS = {
    "bert-768": _berts(4, 768, 8, 128),
    "bert-256/8x64": _berts(4, 256, 8, 64),
    "bert-256/2x128": _berts(4, 256, 2, 128),
    "bert-256/16x32": _berts(4, 256, 16, 32),
    "bert-128": _berts(2, 128, 16, 32),
    "gpt2-768": Model("GPT-2 4 x 768, 4 x 256 tokens", _gpt2),
    "t5-small": Model("T5-small, 4 x 64 tokens to 4 x 64", _t5),
    "vit-small": Model("ViT-small, 4 images of 224 x 224", _vit),
    "resnet-18": Model("ResNet-18, 32 images of 32 x 32", _resnet),
    "mobilenet-v2": Model("MobileNetV2, 16 images of 64 x 64", _mobilenet),
    "lstm-256": Model("LSTM 2 x 256, 32 x 64 tokens", _lstm),
}

HEAVY = {"bert-512/16x16": _berts(4, 512, 16, 16, vocabulary=8192)}
"""Models whose parameters take more memory than their activations, for claims about the former."""
