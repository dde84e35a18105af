"""Engine ``ort``: training in today's onnxruntime, with graphs that torch captures."""
