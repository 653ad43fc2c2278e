"""The strategies that there are: each file registers itself when it is imported."""

from paceline.strategies import ddp, server, star
from paceline.strategies.fsdp import fsdp as fully_sharded  # as `fsdp` it would hide the package of that name
from paceline.strategies.fsdp import hybrid
from paceline.strategies.local import diloco, local_sgd
from paceline.strategies.zero import zero1, zero2, zero3

__all__ = ["ddp", "diloco", "fully_sharded", "hybrid", "local_sgd", "server", "star", "zero1", "zero2", "zero3"]
