"""Engine of ONNX Runtime's training runtime, onnxruntime-training 1.19.2 (2024)."""
