"""Tracing a model's forward by torch's TorchScript exporter; needs no onnxruntime-training."""
