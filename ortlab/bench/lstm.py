"""LSTM language model of the benchmark."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Lstm(nn.Module):
    """Predicts the next token from those before it.

    Args:
        vocabulary: Number of tokens.
        width: Width of the embeddings and of the hidden states.
        layers: Number of layers.
    """

    def __init__(self, vocabulary: int, width: int, *, layers: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocabulary, width)
        self.layers = nn.LSTM(width, width, layers, batch_first=True, dropout=0.1)
        self.scores = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of the next tokens.

        Args:
            ids: Tokens, [batch, length].
            labels: Tokens, [batch, length].
        """
        hidden, _ = self.layers(self.embeddings(ids))
        scores = self.scores(hidden[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten())
