"""ZeRO (arXiv:1910.02054): optimizer state, gradients and parameters cut over the ranks of `shard`."""
