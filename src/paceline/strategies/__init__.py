"""The strategies that there are: each file registers itself when it is imported."""

from paceline.strategies import ddp, star

__all__ = ["ddp", "star"]
