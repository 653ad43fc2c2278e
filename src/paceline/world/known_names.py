"""The names that a job may be started with, known without torch: a launcher refuses a wrong one before it starts.

What they mean is documented where it is done (`strategies/`, `optim/`, `collectives/`); a test holds both together.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError

BACKENDS = ("paceline", "gloo", "nccl")
PRECISIONS = ("fp32", "bf16", "fp16")
OFFLOADS = ("optimizer", "parameters")
COMPRESSORS = ("bf16", "fp16", "int8", "sign", "topk", "powersgd")

MOST_LANES = 2**16
MOST_THREADS = 2**10
SEEDS = 2**63
"""Seeds are whole numbers from 0 to one less: what torch takes, and what 64 bits hold with a sign."""


AUTO = "auto"
"""In place of a strategy: the Engine chooses one (engine/auto_strategy.py)."""


@dataclass(frozen=True)
class StrategyTraits:
    """Which options a strategy takes."""

    uses_servers: bool = False
    takes_offload: bool = False
    takes_low_precision: bool = True


STRATEGIES = {
    "ddp": StrategyTraits(),
    "diloco": StrategyTraits(takes_low_precision=False),
    "fsdp": StrategyTraits(takes_offload=True),
    "hybrid": StrategyTraits(),
    "local_sgd": StrategyTraits(takes_low_precision=False),
    "parameter_server": StrategyTraits(uses_servers=True, takes_low_precision=False),
    "star": StrategyTraits(),
    "zero1": StrategyTraits(takes_offload=True),
    "zero2": StrategyTraits(takes_offload=True),
    "zero3": StrategyTraits(takes_offload=True),
}


@dataclass(frozen=True)
class Recomputed:
    """What `activation_checkpointing` says as a text."""

    classes: tuple[str, ...] = ()  # none: blocks
    every: int = 1
    keeps_matmuls: bool = False


def recomputed(text: str) -> Recomputed:
    """`blocks`, `2`, `Block,Head`, each perhaps with `+matmuls`."""
    what, plus, kept = text.partition("+")
    if plus and kept != "matmuls":
        raise ConfigError(f"activation_checkpointing={text!r}: {kept!r} can't be kept; choose +matmuls, or nothing")
    if what == "blocks":
        return Recomputed(keeps_matmuls=bool(plus))
    if what.lstrip("-").isdecimal():
        if not 1 <= int(what[:20]) < 2**31:
            raise ConfigError(
                f"activation_checkpointing: every={what[:20]} is no count of blocks; 1 takes every block, 2 every "
                "second one; to take none leave activation_checkpointing out"
            )
        return Recomputed(every=int(what), keeps_matmuls=bool(plus))
    names = tuple(name.strip() for name in what.split(","))
    if not all(name.isidentifier() for name in names):
        raise ConfigError(
            f"activation_checkpointing={text!r} can't be read; write blocks, a number k for every k-th block, or "
            "names of classes with commas between them; +matmuls at the end keeps what products of matrices give"
        )
    return Recomputed(names, keeps_matmuls=bool(plus))
