"""Models built from torch's own layers that return their loss, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.specs import LABELS

_WIDTH: Final = 16


class Classifier(nn.Module):
    """A body that returns one vector per sample, followed by a linear layer and cross entropy."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(width, LABELS)

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the scalar loss. `mask` is True at the padding of `x`, [samples, length]."""
        found = self.body(x) if mask is None else self.body(x, mask)
        return functional.cross_entropy(self.head(found), labels)


class Encoder(nn.Module):
    """A TransformerEncoder averaged over the length; attention ignores the padding."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(_WIDTH, 2, 32, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map [samples, length, width] to [samples, width]."""
        found: Tensor = self.layers(x, src_key_padding_mask=mask)
        return found.mean(1)


class Recurrent(nn.Module):
    """The last output of a two-layer bidirectional recurrent network."""

    def __init__(self, kind: type[nn.RNNBase], dropout: float) -> None:
        super().__init__()
        options: dict[str, Any] = {"batch_first": True, "bidirectional": True}
        self.layers = kind(_WIDTH, _WIDTH, 2, dropout=dropout, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Map [samples, length, width] to [samples, 2 * width]."""
        found: Tensor = self.layers(x)[0]
        return found[:, -1]


def _convolutions(dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=4, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(dropout),
    )


def _linear(dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Linear(_WIDTH, 32),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(32, _WIDTH),
        nn.Tanh(),
        nn.Dropout(dropout),
    )


NETS: Final[dict[str, Callable[[float], nn.Module]]] = {
    "transformer-encoder": lambda dropout: Classifier(Encoder(dropout), _WIDTH),
    "lstm": lambda dropout: Classifier(Recurrent(nn.LSTM, dropout), 2 * _WIDTH),
    "gru": lambda dropout: Classifier(Recurrent(nn.GRU, dropout), 2 * _WIDTH),
    "cnn": lambda dropout: Classifier(_convolutions(dropout), 8),
    "mlp": lambda dropout: Classifier(_linear(dropout), _WIDTH),
}


def batch(head: str, samples: int, length: int) -> dict[str, Tensor]:
    """Return a labeled batch for `NETS[head]`."""
    shape = {"cnn": (samples, 3, length, length), "mlp": (samples, _WIDTH)}
    made = {
        "x": torch.randn(shape.get(head, (samples, length, _WIDTH))),
        "labels": torch.randint(LABELS, (samples,)),
    }
    if head == "transformer-encoder":
        mask = torch.zeros(samples, length, dtype=torch.bool)
        mask[-1, -2:] = True
        made["mask"] = mask
    return made
