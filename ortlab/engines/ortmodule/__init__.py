"""The engine of the training runtime of 2024, onnxruntime-training 1.19.2."""
