"""ZeRO: the optimizer state in shards (zero1), and gradients too (zero2), and weights too (zero3)."""
