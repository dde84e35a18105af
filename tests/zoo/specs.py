"""The sweep's cells: every architecture with each head, attention and dropout that it offers.

The models are tiny and random, from transformers and from torch. This list was fixed before the
export rules that it needed were written; a cell that fails is fixed or refused, never removed.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch = dict[str, Any]

LABELS: Final = 3
_VOCABULARY: Final = 61
_FIRST_WORD: Final = 5  # smaller ids are reserved for padding, beginning, end and separator


@dataclass(frozen=True)
class Cell:
    """One training setup. A field is None where the architecture offers no choice."""

    family: str
    head: str
    attention: str | None
    dropout: float | None

    @property
    def name(self) -> str:
        """Name of the cell, such as ``bert/sequence/sdpa/0.1``."""
        chosen = [str(each) for each in (self.attention, self.dropout) if each is not None]
        return "/".join([self.family, self.head, *chosen])


@dataclass(frozen=True)
class Family:
    """An architecture of transformers: its configuration and the class of each head.

    ``sizes`` holds (samples, length) of the two batches; for images, length is height and
    width. ``options`` are the settings for wrapping the model.
    """

    config: str
    settings: Mapping[str, Any]
    heads: Mapping[str, str]
    sdpa: bool = True
    dropout: bool = True
    sizes: tuple[tuple[int, Any], tuple[int, Any]] = ((2, 8), (3, 11))
    options: Mapping[str, Any] = field(default_factory=dict)


def _heads(prefix: str, *heads: str, **others: str) -> dict[str, str]:
    return {head: f"{prefix}For{_CLASSES[head]}" for head in heads} | others


_CLASSES: Final = {
    "sequence": "SequenceClassification",
    "token": "TokenClassification",
    "answers": "QuestionAnswering",
    "masked": "MaskedLM",
    "causal": "CausalLM",
    "seq2seq": "ConditionalGeneration",
    "image": "ImageClassification",
    "segmentation": "SemanticSegmentation",
}
_UNDERSTANDING: Final = ("sequence", "token", "answers", "masked")
_DECODING: Final = ("causal", "sequence", "token", "answers")

_BERT: Final = {
    "vocab_size": _VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
_ROBERTA: Final = {**_BERT, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_DEBERTA: Final = {**_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_LLAMA: Final = {**_BERT, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
_GPT2: Final = {
    "vocab_size": _VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "pad_token_id": 0,
}  # fmt: skip
_T5: Final = {
    "vocab_size": _VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
    "num_heads": 4, "decoder_start_token_id": 0,
}  # fmt: skip
_BART: Final = {
    "vocab_size": _VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 64,
}  # fmt: skip
_VIT: Final = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
_FIXED_IMAGES: Final = ((2, (16, 16)), (3, (16, 16)))
_IMAGES: Final = ((2, (32, 32)), (3, (48, 40)))

FAMILIES: Final[Mapping[str, Family]] = {
    "bert": Family("BertConfig", _BERT, _heads("Bert", *_UNDERSTANDING, causal="BertLMHeadModel")),
    "roberta": Family("RobertaConfig", _ROBERTA, _heads("Roberta", *_UNDERSTANDING, "causal")),
    "distilbert": Family(
        "DistilBertConfig",
        {"vocab_size": _VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48,
         "max_position_embeddings": 64},
        _heads("DistilBert", *_UNDERSTANDING),
    ),
    "albert": Family(
        "AlbertConfig", {**_BERT, "embedding_size": 16}, _heads("Albert", *_UNDERSTANDING)
    ),
    "electra": Family(
        "ElectraConfig",
        {**_BERT, "embedding_size": 16},
        _heads("Electra", *_UNDERSTANDING, "causal"),
    ),
    # ORT would drop a slice of the relative positions where torch slices the dropped positions:
    # same distribution, but masks of another shape.
    "deberta": Family(
        "DebertaConfig",
        _DEBERTA,
        _heads("Deberta", *_UNDERSTANDING),
        sdpa=False,
        options={"compute_optimizer": False},
    ),
    "deberta-v2": Family(
        "DebertaV2Config", _DEBERTA, _heads("DebertaV2", *_UNDERSTANDING), sdpa=False
    ),
    "mpnet": Family("MPNetConfig", _ROBERTA, _heads("MPNet", *_UNDERSTANDING), sdpa=False),
    "mobilebert": Family(
        "MobileBertConfig",
        {**_BERT, "embedding_size": 16, "intra_bottleneck_size": 16,
         "num_feedforward_networks": 2},
        _heads("MobileBert", *_UNDERSTANDING),
    ),
    "xlm-roberta": Family(
        "XLMRobertaConfig", _ROBERTA, _heads("XLMRoberta", *_UNDERSTANDING, "causal")
    ),
    "longformer": Family(
        "LongformerConfig",
        {**_ROBERTA, "attention_window": 4},
        _heads("Longformer", *_UNDERSTANDING),
        sdpa=False,
    ),
    # Longer than 28 tokens: attention is not sparse for fewer.
    "big-bird": Family(
        "BigBirdConfig",
        {**_BERT, "block_size": 4, "num_random_blocks": 1, "sep_token_id": 3},
        _heads("BigBird", *_UNDERSTANDING, "causal"),
        sdpa=False,
        sizes=((2, 32), (3, 46)),
    ),
    "funnel": Family(
        "FunnelConfig",
        {"vocab_size": _VOCABULARY, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48,
         "block_sizes": [1, 1], "num_decoder_layers": 1, "pad_token_id": 0},
        _heads("Funnel", *_UNDERSTANDING),
        sdpa=False,
    ),
    "gpt2": Family(
        "GPT2Config",
        _GPT2,
        _heads("GPT2", "sequence", "token", "answers", causal="GPT2LMHeadModel"),
    ),
    "gpt-neo": Family(
        "GPTNeoConfig",
        {"vocab_size": _VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
         "attention_types": [[["global", "local"], 1]], "window_size": 4,
         "max_position_embeddings": 64, "pad_token_id": 0},
        _heads("GPTNeo", *_DECODING),
        sdpa=False,
    ),
    "gptj": Family(
        "GPTJConfig",
        {**_GPT2, "rotary_dim": 4},
        _heads("GPTJ", "causal", "sequence", "answers"),
        sdpa=False,
    ),
    "gpt-neox": Family(
        "GPTNeoXConfig", {**_BERT, "pad_token_id": 0}, _heads("GPTNeoX", *_DECODING)
    ),
    "opt": Family(
        "OPTConfig",
        {"vocab_size": _VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 48,
         "num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 16},
        _heads("OPT", "causal", "sequence", "answers"),
    ),
    "bloom": Family(
        "BloomConfig",
        {"vocab_size": _VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4,
         "pad_token_id": 0},
        _heads("Bloom", *_DECODING),
        sdpa=False,
    ),
    "llama": Family("LlamaConfig", _LLAMA, _heads("Llama", *_DECODING)),
    "mistral": Family(
        "MistralConfig", {**_LLAMA, "sliding_window": 4}, _heads("Mistral", *_DECODING)
    ),
    "qwen2": Family("Qwen2Config", _LLAMA, _heads("Qwen2", *_DECODING)),
    "qwen3": Family("Qwen3Config", _LLAMA, _heads("Qwen3", *_DECODING)),
    "phi": Family("PhiConfig", _LLAMA, _heads("Phi", "causal", "sequence", "token")),
    "gemma": Family("GemmaConfig", _LLAMA, _heads("Gemma", "causal", "sequence", "token")),
    "falcon": Family(
        "FalconConfig",
        {"vocab_size": _VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2},
        _heads("Falcon", *_DECODING),
    ),
    "t5": Family("T5Config", _T5, _heads("T5", "seq2seq", "sequence", "token", "answers")),
    "mt5": Family(
        "MT5Config",
        {**_T5, "feed_forward_proj": "gated-gelu"},
        _heads("MT5", "seq2seq", "sequence", "token", "answers"),
    ),
    "bart": Family(
        "BartConfig", _BART, _heads("Bart", "seq2seq", "sequence", "answers", "causal")
    ),
    "mbart": Family(
        "MBartConfig", _BART, _heads("MBart", "seq2seq", "sequence", "answers", "causal")
    ),
    "pegasus": Family("PegasusConfig", _BART, _heads("Pegasus", "seq2seq", "causal")),
    "marian": Family(
        "MarianConfig",
        {**_BART, "pad_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2,
         "forced_eos_token_id": 2},
        _heads("Marian", "causal", seq2seq="MarianMTModel"),
    ),
    # It accepts spectrograms of a single length.
    "whisper": Family(
        "WhisperConfig",
        {**_BART, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 24,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3,
         "begin_suppress_tokens": None, "classifier_proj_size": 16},
        _heads("Whisper", "seq2seq", "causal", sequence="WhisperForAudioClassification"),
    ),
    "wav2vec2": Family(
        "Wav2Vec2Config",
        {"vocab_size": 12, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 48, "conv_dim": [16, 16], "conv_stride": [5, 2],
         "conv_kernel": [10, 3], "num_conv_pos_embeddings": 8,
         "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
         "classifier_proj_size": 16},
        _heads("Wav2Vec2", "sequence", ctc="Wav2Vec2ForCTC",
               frame="Wav2Vec2ForAudioFrameClassification"),
        sizes=((2, 200), (3, 275)),
    ),
    "vit": Family("ViTConfig", _VIT, _heads("ViT", "image"), sizes=_FIXED_IMAGES),
    "swin": Family(
        "SwinConfig",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 2],
         "num_heads": [2, 4], "window_size": 2},
        _heads("Swin", "image"),
        sizes=_IMAGES,
    ),
    "beit": Family(
        "BeitConfig",
        {**_VIT, "num_hidden_layers": 4, "use_relative_position_bias": True,
         "out_indices": [1, 2, 3, 4], "pool_scales": [1, 2], "auxiliary_channels": 16},
        _heads("Beit", "image", "segmentation"),
        sizes=_FIXED_IMAGES,
    ),
    "deit": Family("DeiTConfig", _VIT, _heads("DeiT", "image"), sizes=_FIXED_IMAGES),
    "clip": Family(
        "CLIPConfig",
        {"text_config": {**_BERT, "projection_dim": 16, "pad_token_id": 1, "bos_token_id": 0,
                         "eos_token_id": 2},
         "vision_config": {**_VIT, "projection_dim": 16}, "projection_dim": 16},
        _heads("CLIP", "image", contrastive="CLIPModel"),
    ),
    "segformer": Family(
        "SegformerConfig",
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
         "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [2, 4],
         "mlp_ratios": [2, 2], "decoder_hidden_size": 16},
        _heads("Segformer", "image", "segmentation"),
        sizes=_IMAGES,
    ),
    "convnext": Family(
        "ConvNextConfig",
        {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1]},
        _heads("ConvNext", "image"),
        sdpa=False,
        dropout=False,
        sizes=_IMAGES,
    ),
    "resnet": Family(
        "ResNetConfig",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2]},
        _heads("ResNet", "image"),
        sdpa=False,
        dropout=False,
        sizes=_IMAGES,
    ),
}  # fmt: skip

TORCH: Final = ("transformer-encoder", "lstm", "gru", "cnn", "mlp")
"""Torch's own layers: nn.TransformerEncoder, LSTM, GRU, convolutions with BatchNorm, Linear."""


def cells() -> tuple[Cell, ...]:
    """Return every cell of the sweep."""
    return tuple(_cells())


def _cells() -> Iterator[Cell]:
    for name, family in FAMILIES.items():
        attentions = ("eager", "sdpa") if family.sdpa else (None,)
        dropouts = (0.0, 0.1) if family.dropout else (None,)
        for chosen in itertools.product(family.heads, attentions, dropouts):
            yield Cell(name, *chosen)
    for name, dropout in itertools.product(TORCH, (0.0, 0.1)):
        yield Cell("torch", name, None, dropout)


QUICK: Final = (
    "bert/sequence/sdpa/0.1",
    "roberta/masked/eager/0.1",
    "deberta-v2/token/0.0",
    "longformer/answers/0.0",
    "funnel/token/0.0",
    "gpt2/causal/eager/0.1",
    "gpt-neox/causal/sdpa/0.0",
    "llama/causal/sdpa/0.1",
    "t5/seq2seq/sdpa/0.0",
    "bart/sequence/eager/0.1",
    "wav2vec2/ctc/sdpa/0.0",
    "clip/contrastive/eager/0.0",
    "segformer/segmentation/sdpa/0.0",
    "resnet/image",
    "torch/lstm/0.1",
)
"""The sample of cells that `make test` runs on engine ``ortmodule``."""

QUICK_ON_ORT: Final = (
    "bert/sequence/sdpa/0.1",
    "gpt2/causal/eager/0.1",
    "t5/seq2seq/sdpa/0.0",
    "segformer/segmentation/sdpa/0.0",
    "resnet/image",
    "torch/mlp/0.1",
)
"""The sample of cells that `make test` runs on engine ``ort``."""


# ---- models --------------------------------------------------------------------------------------


def model(cell: Cell) -> nn.Module:
    """Return the cell's model in training mode, with weights that depend on the cell alone."""
    import torch

    torch.manual_seed(_seed(cell))
    made = _torch_model(cell) if cell.family == "torch" else _transformers_model(cell)
    _spread(made)
    return made.train()


def _seed(cell: Cell) -> int:
    return zlib.crc32(cell.name.encode())


def _spread(module: nn.Module) -> None:
    """Spread the weights so that each of them affects the output.

    With the usual initial weights, attention is uniform and biases are zero, which hides most
    errors in them.
    """
    import torch

    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                fan_in = parameter.numel() // parameter.shape[0]
                parameter.normal_(0.0, fan_in**-0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))


def _transformers_model(cell: Cell) -> nn.Module:
    import torch
    import transformers

    family = FAMILIES[cell.family]
    chosen: dict[str, Any] = {**family.settings, "num_labels": LABELS}
    if cell.head == "answers":
        chosen["num_labels"] = 2  # begin and end
    if cell.head == "causal" and "masked" in family.heads:
        chosen["is_decoder"] = True
    if cell.family == "big-bird" and cell.head == "causal":
        chosen["attention_type"] = "original_full"  # a decoder offers no other
    if cell.family == "beit" and cell.head == "image":
        chosen.pop("out_indices")
    config = getattr(transformers, family.config)(**chosen)
    if cell.attention is not None:
        config._attn_implementation = cell.attention
    for name in ("", *getattr(config, "sub_configs", ())):
        _set_dropout(getattr(config, name) if name else config, cell.dropout or 0.0)
    made: nn.Module = getattr(transformers, family.heads[cell.head])(config)
    if not cell.dropout:
        # A decoder's token head uses a dropout of 0.1 where its configuration has no ratio for it.
        for each in made.modules():
            if isinstance(each, torch.nn.Dropout):
                each.p = 0.0
    return made


def _set_dropout(config: Any, ratio: float) -> None:
    """Set every dropout ratio. Whole layers and paths are never dropped."""
    for name in vars(config):
        if "drop" in name:
            layers = "layerdrop" in name or "drop_path" in name
            setattr(config, name, 0.0 if layers else ratio)


def _torch_model(cell: Cell) -> nn.Module:
    from tests.zoo import nets

    assert cell.dropout is not None
    return nets.NETS[cell.head](cell.dropout)


# ---- batches -------------------------------------------------------------------------------------


def batches(cell: Cell) -> tuple[Batch, Batch]:
    """Return two labeled batches of different sizes; the last sample of each is shorter."""
    import torch

    torch.manual_seed(_seed(cell) + 1)
    if cell.family == "torch":
        from tests.zoo import nets

        return nets.batch(cell.head, 4, 8), nets.batch(cell.head, 6, 11)
    made = [_batch(cell, samples, length) for samples, length in FAMILIES[cell.family].sizes]
    return made[0], made[1]


def _batch(cell: Cell, samples: int, length: Any) -> Batch:
    if cell.family == "wav2vec2":
        return _sounds(cell, samples, length)
    if cell.family == "whisper":
        return _spectrograms(cell, samples, length)
    if cell.family == "clip":
        return _captions(cell, samples, length)
    if cell.head in ("image", "segmentation"):
        return _images(cell, samples, length)
    return _text(cell, samples, length)


def _text(cell: Cell, samples: int, length: int) -> Batch:
    import torch
    import transformers

    family = FAMILIES[cell.family]
    config = getattr(transformers, family.config)(**family.settings)
    ids, mask = _words(samples, length, pad=config.pad_token_id)
    ends = mask.sum(1) - 1
    if "seq2seq" in family.heads:  # the sample's representation is read at its end
        ids[torch.arange(samples), ends] = config.eos_token_id
    if cell.head == "answers" and getattr(config, "sep_token_id", None) is not None:
        ids[:, [2, 3, 5]] = config.sep_token_id  # question, context
    return {"input_ids": ids, "attention_mask": mask} | _targets(cell, ids, mask)


def _targets(cell: Cell, ids: Tensor, mask: Tensor) -> Batch:
    import torch

    samples, length = ids.shape
    if cell.head == "sequence":
        return {"labels": torch.randint(LABELS, (samples,))}
    if cell.head == "answers":
        starts = torch.randint(length // 2, (samples,))
        return {"start_positions": starts, "end_positions": starts + 1}
    if cell.head == "token":
        labels = torch.randint(LABELS, (samples, length))
    elif cell.head == "seq2seq":
        labels, mask = _words(samples, length - 3, pad=0)
    elif cell.head == "masked":
        labels = torch.where(torch.rand(samples, length) < 0.5, ids, -100)
        labels[:, 0] = ids[:, 0]
    else:
        labels = ids.clone()
    return {"labels": labels.masked_fill(mask == 0, -100)}


def _words(samples: int, length: int, *, pad: int) -> tuple[Tensor, Tensor]:
    """Return token ids and their attention mask, [samples, length]; the last sample is padded."""
    import torch

    ids = torch.randint(_FIRST_WORD, _VOCABULARY, (samples, length))
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    return ids.masked_fill(mask == 0, pad), mask


def _images(cell: Cell, samples: int, size: tuple[int, int]) -> Batch:
    import torch

    shape = (samples, *size) if cell.head == "segmentation" else (samples,)
    images = torch.randn(samples, 3, *size)
    return {"pixel_values": images, "labels": torch.randint(LABELS, shape)}


def _captions(cell: Cell, samples: int, length: int) -> Batch:
    import torch

    if cell.head == "image":
        return _images(cell, samples, (16, 16))
    ids, mask = _words(samples, length, pad=1)
    ids[torch.arange(samples), mask.sum(1) - 1] = 2
    images = torch.randn(samples, 3, 16, 16)
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": images, "return_loss": True}


def _spectrograms(cell: Cell, samples: int, length: int) -> Batch:
    import torch

    if cell.head == "causal":
        return _text(cell, samples, length)
    ids, mask = _words(samples, length, pad=0)
    features = torch.randn(samples, 8, 24)
    return {"input_features": features} | _targets(cell, ids, mask)


def _sounds(cell: Cell, samples: int, length: int) -> Batch:
    import torch

    mask = torch.ones(samples, length, dtype=torch.long)
    mask[-1, -length // 5 :] = 0
    sounds = torch.randn(samples, length) * mask
    frames = ((length - 10) // 5 + 1 - 3) // 2 + 1
    labels = {
        "sequence": lambda: torch.randint(LABELS, (samples,)),
        "ctc": lambda: torch.randint(1, 12, (samples, 4)),
        "frame": lambda: torch.eye(LABELS)[torch.randint(LABELS, (samples, frames))],
    }
    made: Callable[[], Tensor] = labels[cell.head]
    return {"input_values": sounds, "attention_mask": mask, "labels": made()}
