"""Training in several processes: data, tensor and pipeline parallelism, ZeRO, Adasum."""
