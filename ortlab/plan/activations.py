"""Formulas for the bytes of a transformer's activations on a rank.

Korthikanti et al. 2022 (arXiv:2205.05198), equations 1 to 6. For GPT in 16 bits they are theirs;
the terms are written by tensor, so that they hold for gated MLPs, shared keys and fp32, too.
"""

from __future__ import annotations

from ortlab.plan.transformer import Transformer


def layer_bytes(
    model: Transformer,
    batch: int,
    *,
    each: int,
    tensor: int = 1,
    sequence_parallel: bool = False,
    scores: bool = True,
) -> int:
    """Return the bytes that a layer stores for the backward pass.

    Args:
        model: The shape.
        batch: Samples of the micro-batch.
        each: Bytes of an element.
        tensor: Ranks that the layer's matrices are sharded across.
        sequence_parallel: True if these ranks share the rest of the layer by tokens.
        scores: True if attention stores its scores; fused attention does not.
    """
    tokens, masks = batch * model.sequence, 0 if model.gated else 1
    # Inputs of both norms and of both parts' first matrices, and the masks of two dropouts.
    whole = tokens * model.hidden * (4 * each + 2 * masks)
    widths = 2 * (model.query_width + model.kv_width) + (3 if model.gated else 2) * model.mlp_width
    split = tokens * each * widths
    if scores:
        split += score_bytes(model, batch, each=each)
    return -(-(split + whole) // tensor) if sequence_parallel else whole - (-split // tensor)


def score_bytes(model: Transformer, batch: int, *, each: int) -> int:
    """Return the bytes of attention's scores in a layer: softmax, dropout and its mask.

    Args:
        model: The shape.
        batch: Samples of the micro-batch.
        each: Bytes of an element.
    """
    return batch * model.heads * model.sequence**2 * (2 * each + (0 if model.gated else 1))


def input_bytes(model: Transformer, batch: int, *, each: int) -> int:
    """Return the bytes of a layer's input, all that a recomputed layer stores.

    Args:
        model: The shape.
        batch: Samples of the micro-batch.
        each: Bytes of an element.
    """
    return batch * model.sequence * model.hidden * each


def first_bytes(model: Transformer, batch: int) -> int:
    """Return the bytes that the embedding stores: the mask of its dropout.

    Args:
        model: The shape.
        batch: Samples of the micro-batch.
    """
    return 0 if model.gated else batch * model.sequence * model.hidden


def last_bytes(model: Transformer, batch: int, *, each: int) -> int:
    """Return the bytes of the last norm's input, the logits' input and the logits in fp32.

    Args:
        model: The shape.
        batch: Samples of the micro-batch.
        each: Bytes of an element.
    """
    return batch * model.sequence * (2 * each * model.hidden + 4 * model.vocabulary)
