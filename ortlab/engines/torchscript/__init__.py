"""Tracing of `forward` with torch's TorchScript exporter; needs no onnxruntime-training."""
