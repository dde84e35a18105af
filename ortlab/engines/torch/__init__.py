"""Engines that PyTorch itself runs: eager and torch.compile."""
