"""What the ranks of a replica do with gradients: buckets, ZeRO, priority, the norm, and what an optimizer updates."""
