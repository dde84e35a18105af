"""Conversion of an exported model to half precision and to 8-bit weights.

The converters are onnxruntime's own, which match its kernels in each release:
``onnxruntime.transformers.float16`` (onnxconverter-common has an older copy of it, and would be one
more dependency) and ``onnxruntime.quantization.quantize_dynamic``.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import onnx

from ortlab.deploy import weights
from ortlab.utils import plain_onnxruntime

_EXTERNAL_BYTES = weights.PROTOBUF_LIMIT - 2**26


def to_fp16(source: Path, target: Path) -> None:
    """Convert a model to half-precision weights and arithmetic.

    Inputs and outputs keep their types, so that callers need no change.

    Args:
        source: The model in full precision.
        target: Where to write the converted model.
    """
    from onnxruntime.transformers import float16  # optional: onnxruntime
    from onnxruntime.transformers.onnx_model import OnnxModel  # optional: onnxruntime

    weights.check_places(source)
    model = onnx.load_model(str(source))
    with _quiet():
        half = float16.convert_float_to_float16(
            model, keep_io_types=True, disable_shape_infer=_is_large(source)
        )
        OnnxModel.graph_topological_sort(half.graph)  # the converter appends casts at the end
    _save(half, target, external=_has_data(source))


def to_int8(source: Path, target: Path) -> None:
    """Convert a model to 8-bit weights.

    Activations are quantized dynamically. Weights are unsigned: with signed ones, AVX2 and AVX-512
    without VNNI silently saturate sums (onnxruntime's documentation, "Quantize ONNX models"), and
    the difference measured on one machine would not hold on another.

    Args:
        source: The model in full precision.
        target: Where to write the converted model.
    """
    onnxruntime = plain_onnxruntime.plain_onnxruntime()
    from onnxruntime.quantization import QuantType, quantize_dynamic  # optional: onnxruntime

    weights.check_places(source)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, _quiet():
        folded = Path(folder) / "folded.onnx"
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        # Folds constants, because only initializers are quantized.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(folded)
        if _has_data(source):
            entry = "session.optimized_model_external_initializers"
            options.add_session_config_entry(f"{entry}_file_name", "folded.onnx.data")
            options.add_session_config_entry(f"{entry}_min_size_in_bytes", "0")
        onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
        quantized = Path(folder) / "quantized.onnx"
        quantize_dynamic(
            folded,
            quantized,
            weight_type=QuantType.QUInt8,
            per_channel=True,
            use_external_data_format=_has_data(source),
        )
        model = onnx.load_model(str(quantized))
        described = onnx.load_model(str(source), load_external_data=False)
        model.producer_name, model.producer_version = (
            described.producer_name,
            described.producer_version,
        )
        del model.metadata_props[:]
        model.metadata_props.extend(described.metadata_props)
        _save(model, target, external=_has_data(source))


def _is_large(source: Path) -> bool:
    return sum(file.stat().st_size for file in weights.files(source)) > _EXTERNAL_BYTES


def _has_data(source: Path) -> bool:
    return len(weights.files(source)) > 1


def _save(model: onnx.ModelProto, target: Path, *, external: bool) -> None:
    if external or model.ByteSize() > _EXTERNAL_BYTES:
        onnx.save_model(
            model,
            str(target),
            save_as_external_data=True,
            location=f"{target.name}.data",
            size_threshold=0,
        )
    else:
        target.write_bytes(model.SerializeToString())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the converters' warnings about things that are checked here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
