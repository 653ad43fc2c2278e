"""The strategies that there are: each file registers itself when it is imported."""

from paceline.strategies import ddp, fsdp, hybrid, server, star, zero1, zero2, zero3

__all__ = ["ddp", "fsdp", "hybrid", "server", "star", "zero1", "zero2", "zero3"]
