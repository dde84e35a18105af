"""Benchmarks that were published for ORT's training: their models, shapes and results.

Shapes and batch sizes are those of the published scripts. Weights and tokens are random, which does
not change the time of a step. The optimizer is always AdamW, even where the scripts used LAMB. Only
results that could be found are quoted, each with its source.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ortlab.bench.models import Model

if TYPE_CHECKING:
    import torch
    from torch import nn

    Task = tuple[nn.Module, dict[str, torch.Tensor]]

EXAMPLES = "https://github.com/microsoft/onnxruntime-training-examples/blob/master"
EIGHT_V100 = "8 V100 of 32 GB, onnxruntime-training 1.8.0, total samples/s"
_DROPOUT = 0.1


@dataclass(frozen=True)
class Shape:
    """A model and the batch of one device: `rows` sequences of `tokens`, also for a decoder."""

    layers: int
    hidden: int
    heads: int
    rows: int
    tokens: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.layers} x {self.hidden}, {self.rows} x {self.tokens} tokens"


@dataclass(frozen=True)
class Published:
    """Published results of PyTorch and of ORT, in samples/s. None if not found.

    Attributes:
        hardware: Hardware and versions.
        source: Address of the results.
        torch: Samples/s of PyTorch.
        ort: Samples/s of ORT.
        told_gain: Published gain, where samples/s were not published. 0.34 is 34% more.
    """

    hardware: str
    source: str
    torch: float | None = None
    ort: float | None = None
    told_gain: float | None = None

    @property
    def gain(self) -> float | None:
        """Relative gain of ORT over PyTorch, or None if it was not found."""
        if self.torch is None or self.ort is None:
            return self.told_gain
        return self.ort / self.torch - 1


@dataclass(frozen=True)
class Paper:
    """A published benchmark.

    Attributes:
        title: Name of the benchmark.
        build: Creates model and batch.
        published_shape: Published shape, in fp16.
        cpu_shape: Scaled-down shape for a CPU.
        shape_source: Source of the published batch sizes.
        published: Published results.
    """

    title: str
    build: Callable[[Shape], Task]
    published_shape: Shape
    cpu_shape: Shape
    shape_source: str
    published: Published

    def shape(self, device: str, *, quick: bool = False) -> Shape:
        """Return the shape to train.

        Args:
            device: "cpu" or "cuda".
            quick: True for a tiny model.
        """
        if quick:
            return Shape(1, 32, 2, 2, 16, 100)
        return self.cpu_shape if device == "cpu" else self.published_shape


def models(shapes: Mapping[str, Shape]) -> dict[str, Model]:
    """Return benchmarks as models for `timing`, keyed by name.

    Args:
        shapes: Shape of each benchmark.
    """

    def build(name: str, shape: Shape, _quick: bool) -> Task:
        return PAPERS[name].build(shape)  # a quick benchmark already has a tiny shape

    return {
        name: Model(f"{PAPERS[name].title}: {shape}", functools.partial(build, name, shape))
        for name, shape in shapes.items()
    }


# ---- the models ----------------------------------------------------------------------------------


def _ids(shape: Shape) -> torch.Tensor:
    import torch  # heavy: torch

    return torch.randint(shape.vocabulary, (shape.rows, shape.tokens))


def _masked(shape: Shape) -> dict[str, torch.Tensor]:
    """Return a batch for masked language modeling with 15% of tokens (BERT paper, section 3.1)."""
    import torch  # heavy: torch

    ids = _ids(shape)
    labels = torch.where(torch.rand(ids.shape) < 0.15, ids, -100)
    labels[:, 0] = ids[:, 0]  # so that every row has a label
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _encoder(shape: Shape) -> dict[str, Any]:
    """Return the settings that configurations of BERT-like models share."""
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": 4 * shape.hidden,
        "hidden_dropout_prob": _DROPOUT,
        "attention_probs_dropout_prob": _DROPOUT,
    }


def _bert_pretraining(shape: Shape) -> Task:
    import torch  # heavy: torch
    from transformers import BertConfig, BertForPreTraining  # heavy: transformers

    batch = _masked(shape)
    batch["next_sentence_label"] = torch.randint(2, (shape.rows,))
    batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    return BertForPreTraining(BertConfig(**_encoder(shape))), batch


def _bert_mlm(shape: Shape) -> Task:
    from transformers import BertConfig, BertForMaskedLM  # heavy: transformers

    return BertForMaskedLM(BertConfig(**_encoder(shape))), _masked(shape)


def _distilbert(shape: Shape) -> Task:
    from transformers import DistilBertConfig, DistilBertForMaskedLM  # heavy: transformers

    config = DistilBertConfig(
        vocab_size=shape.vocabulary,
        dim=shape.hidden,
        n_layers=shape.layers,
        n_heads=shape.heads,
        hidden_dim=4 * shape.hidden,
    )
    return DistilBertForMaskedLM(config), _masked(shape)


def _gpt2(shape: Shape) -> Task:
    from transformers import GPT2Config, GPT2LMHeadModel  # heavy: transformers

    config = GPT2Config(
        vocab_size=shape.vocabulary,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        bos_token_id=shape.vocabulary - 1,
        eos_token_id=shape.vocabulary - 1,
        use_cache=False,
    )
    ids = _ids(shape)
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def _bart(shape: Shape) -> Task:
    from transformers import BartConfig, BartForConditionalGeneration  # heavy: transformers

    sides: dict[str, Any] = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            ("layers", shape.layers),
            ("attention_heads", shape.heads),
            ("ffn_dim", 4 * shape.hidden),
        )
    }
    config = BartConfig(
        vocab_size=shape.vocabulary,
        d_model=shape.hidden,
        dropout=_DROPOUT,
        use_cache=False,
        **sides,
    )
    return BartForConditionalGeneration(config), _translation(shape)


def _t5(shape: Shape) -> Task:
    from transformers import T5Config, T5ForConditionalGeneration  # heavy: transformers

    more: dict[str, Any] = {"decoder_start_token_id": 0}
    config = T5Config(
        vocab_size=shape.vocabulary,
        d_model=shape.hidden,
        d_kv=shape.hidden // shape.heads,
        d_ff=4 * shape.hidden,
        num_layers=shape.layers,
        num_heads=shape.heads,
        dropout_rate=_DROPOUT,
        use_cache=False,
        **more,
    )
    return T5ForConditionalGeneration(config), _translation(shape)


def _translation(shape: Shape) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(shape), "labels": _ids(shape)}


def _deberta(shape: Shape) -> Task:
    """Return microsoft/deberta-v2-xxlarge: relative positions in buckets, and a convolution."""
    import torch  # heavy: torch
    from transformers import (
        DebertaV2Config,
        DebertaV2ForSequenceClassification,
    )  # heavy: transformers

    more: dict[str, Any] = {
        "relative_attention": True,
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": False,
        "type_vocab_size": 0,
        "conv_kernel_size": 3,
        "conv_act": "gelu",
        "num_labels": 2,
        "problem_type": "single_label_classification",
    }
    config = DebertaV2Config(**_encoder(shape), **more)
    ids = _ids(shape)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return DebertaV2ForSequenceClassification(config), batch | {
        "labels": torch.randint(2, (shape.rows,))
    }


def _roberta(shape: Shape) -> Task:
    import torch  # heavy: torch
    from transformers import RobertaConfig, RobertaForQuestionAnswering  # heavy: transformers

    # Positions start after the padding index, and the batch has no padding tokens.
    config = RobertaConfig(**_encoder(shape), max_position_embeddings=shape.tokens + 2)
    ids = torch.randint(2, shape.vocabulary, (shape.rows, shape.tokens))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name in ("start_positions", "end_positions"):
        batch[name] = torch.randint(shape.tokens, (shape.rows,))
    return RobertaForQuestionAnswering(config), batch


# ---- what was published --------------------------------------------------------------------------


def _fine_tuning(name: str, torch: float, ort: float) -> Published:
    """Return a row of the fp16 table of ORT's training examples for Hugging Face models."""
    return Published(EIGHT_V100, f"{EXAMPLES}/huggingface/{name}.md", torch, ort)


_RECIPE = f"{EXAMPLES}/huggingface/script/hf-ort.py"
_NVIDIA_BERT = f"{EXAMPLES}/nvidia-bert/README.md"
_NVIDIA_TABLE = "https://github.com/NVIDIA/DeepLearningExamples/issues/939"
_EIGHT_16 = "8 V100 of 16 GB, NVIDIA's PyTorch in mixed precision, total samples/s, batch size"
_GPT2_BLOG = (
    "https://cloudblogs.microsoft.com/opensource/2020/08/24/"
    "pytorch-gpt-2-fine-tuning-onnx-runtime-speedup-training-time/"
)
_BERT, _GPT, _ROBERTA = 30522, 50257, 50265

PAPERS: dict[str, Paper] = {
    "bert-large-phase-1": Paper(
        "BERT-Large, pre-training phase 1",
        _bert_pretraining,
        Shape(24, 1024, 16, 48, 128, _BERT),
        Shape(4, 256, 4, 8, 128, _BERT),
        _NVIDIA_BERT,
        Published(f"{_EIGHT_16} 16", _NVIDIA_TABLE, torch=1236.0),
    ),
    "bert-large-phase-2": Paper(
        "BERT-Large, pre-training phase 2",
        _bert_pretraining,
        Shape(24, 1024, 16, 8, 512, _BERT),
        Shape(4, 256, 4, 2, 512, _BERT),
        _NVIDIA_BERT,
        Published(f"{_EIGHT_16} 4", _NVIDIA_TABLE, torch=263.0),
    ),
    "gpt2-medium": Paper(
        "GPT-2 Medium at sequence 1024",
        _gpt2,
        Shape(24, 1024, 16, 1, 1024, _GPT),
        Shape(4, 256, 4, 1, 1024, _GPT),
        f"{EXAMPLES}/huggingface-gpt2/README.md",
        Published("model size and GPU of that GPT-2 not found", _GPT2_BLOG, told_gain=0.34),
    ),
    "bart-large": Paper(
        "BART-Large, translation",
        _bart,
        Shape(12, 1024, 16, 16, 64, _ROBERTA),
        Shape(2, 256, 4, 4, 64, _ROBERTA),
        _RECIPE,
        _fine_tuning("BART", 338.04, 384.61),
    ),
    "bert-large": Paper(
        "BERT-Large, masked language",
        _bert_mlm,
        Shape(24, 1024, 16, 8, 512, _BERT),
        Shape(4, 256, 4, 2, 512, _BERT),
        _RECIPE,
        _fine_tuning("BERT", 137.61, 150.50),
    ),
    "deberta-v2-xxlarge": Paper(
        "DeBERTa-v2 XXLarge, classification",
        _deberta,
        Shape(48, 1536, 24, 4, 128, 128100),
        Shape(4, 256, 4, 4, 128, 32000),
        _RECIPE,
        _fine_tuning("DeBERTa", 47.22, 59.19),
    ),
    "distilbert-base": Paper(
        "DistilBERT, masked language",
        _distilbert,
        Shape(6, 768, 12, 16, 512, _BERT),
        Shape(2, 256, 4, 4, 512, _BERT),
        f"{EXAMPLES}/huggingface/DistilBERT.md",
        _fine_tuning("DistilBERT", 890.66, 928.36),
    ),
    "gpt2": Paper(
        "GPT-2, causal language",
        _gpt2,
        Shape(12, 768, 12, 8, 1024, _GPT),
        Shape(2, 256, 4, 2, 1024, _GPT),
        _RECIPE,
        _fine_tuning("GPT2", 131.19, 166.60),
    ),
    "roberta-large": Paper(
        "RoBERTa-Large, question answering",
        _roberta,
        Shape(24, 1024, 16, 16, 384, _ROBERTA),
        Shape(4, 256, 4, 2, 384, _ROBERTA),
        _RECIPE,
        _fine_tuning("RoBERTa", 289.97, 343.56),
    ),
    "t5-large": Paper(
        "T5-Large, translation",
        _t5,
        Shape(24, 1024, 16, 16, 64, 32128),
        Shape(2, 256, 4, 4, 64, 32128),
        _RECIPE,
        _fine_tuning("T5", 262.34, 329.02),
    ),
}
"""Benchmarks by the names of the option ``--models``. The published scripts pad translation batches
to their longest sequence, which is fixed at 64 tokens here."""
