"""Transformers small enough for a test, and a batch for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
)


def bert(dropout: float = 0.0, **changes: Any) -> nn.Module:
    """Return a classifier of two classes; `changes` are passed to BertConfig."""
    config: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    model: nn.Module = BertForSequenceClassification(BertConfig(**{**config, **changes}))
    return model


def gpt2(dropout: float = 0.0, **changes: Any) -> nn.Module:
    """Return a language model without a cache; `changes` are passed to GPT2Config."""
    config: dict[str, Any] = {
        "vocab_size": 50,
        "n_positions": 40,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "use_cache": False,
    }
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**{**config, **changes}))
    return model


def batch(rows: int = 2, length: int = 7) -> dict[str, torch.Tensor]:
    """Return `rows` sentences of `length` tokens for `bert`, with their labels."""
    drawn = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(0, 50, (rows, length), generator=drawn),
        "attention_mask": torch.ones(rows, length, dtype=torch.long),
        "labels": torch.randint(0, 2, (rows,), generator=drawn),
    }


def spread(model: nn.Module) -> nn.Module:
    """Set weights that affect the output: BERT's initial ones hardly reach it."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    return model
