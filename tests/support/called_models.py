"""BERT and GPT-2 in engine ortmodule, called once, so that there are graphs to read."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import ortlab

BATCH, TOKENS = 2, 8


def bert() -> tuple[nn.Module, dict[str, Any]]:
    config = BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        vocab_size=100,
    )  # fmt: skip
    ids = torch.randint(0, 100, (BATCH, TOKENS))
    labels = torch.arange(BATCH) % 2
    return BertForSequenceClassification(config), {"input_ids": ids, "labels": labels}


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    config = GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=100, use_cache=False)
    ids = torch.randint(0, 100, (BATCH, TOKENS))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def called(model: nn.Module, batch: dict[str, Any], **settings: Any) -> nn.Module:
    """Return the wrapped model, called once in training and once in evaluation mode."""
    wrapped = ortlab.wrap(model.train(), engine="ortmodule", **settings)
    wrapped(**batch).loss.backward()
    wrapped.eval()
    with torch.no_grad():
        wrapped(**batch)
    return wrapped
