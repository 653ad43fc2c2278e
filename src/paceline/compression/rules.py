"""Which gradients are compressed, how, and from which step on.

    Engine(compression="int8")                                                    all of them
    Engine(compression=TopK(share=0.001))                                         with settings
    Engine(compression={"*.bias": None, "head.*": "bf16", "*": PowerSgd(rank=4)}) the first pattern that fits decides
    Engine(compression=Compression("int8", start_after=100))                      from step 101 on

Patterns are those of the shell, for names as `model.named_parameters()` has them. None leaves a gradient as it is, and
so does a name that no pattern fits. What a compressor has no use for (a vector under `powersgd`, a parameter in fp64)
is left as it is too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from paceline.compression.cast import Cast
from paceline.compression.int8 import Int8
from paceline.compression.power_sgd import PowerSgd
from paceline.compression.sign import Sign
from paceline.compression.topk import TopK
from paceline.errors import ConfigError
from paceline.input_file import one_line
from paceline.world.checked_values import switch, whole_number

BlockCompressor = Int8 | Cast | Sign
Compressor = BlockCompressor | TopK | PowerSgd
COMPRESSORS: Mapping[str, Compressor] = {
    "bf16": Cast("bf16"),
    "fp16": Cast("fp16"),
    "int8": Int8(),
    "sign": Sign(),
    "topk": TopK(),
    "powersgd": PowerSgd(),
}


@dataclass(frozen=True)
class Compression:
    """`feedback`: what a step's compression loses is added to the lane's gradient of the next step."""

    rules: Any  # as given; afterwards a tuple of (pattern, compressor or None)
    start_after: int = 0
    feedback: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", _rules(self.rules))
        whole_number("Compression(start_after=…)", self.start_after, why="a number of steps")
        switch("Compression(feedback=…)", self.feedback)

    def compressor(self, name: str, shape: tuple[int, ...]) -> Compressor | None:
        found: Compressor | None = next((found for pattern, found in self.rules if fnmatchcase(name, pattern)), None)
        if isinstance(found, PowerSgd) and not found.takes(name, shape):
            return None
        return found

    def __str__(self) -> str:
        """Equal for what gives equal bits."""
        told = ", ".join(f"{pattern}: {found}" for pattern, found in self.rules)
        more = f", start_after={self.start_after}" if self.start_after else ""
        return told + more + ("" if self.feedback else ", without feedback")


def compression_of(given: Any) -> Compression | None:
    """What `Engine(compression=…)` was given, a name, an object or rules by parameter name, as a `Compression`."""
    return given if given is None or isinstance(given, Compression) else Compression(given)


def compressor_of(given: Any) -> Compressor | None:
    if given is None or isinstance(given, Compressor):
        return given
    if isinstance(given, str) and given in COMPRESSORS:
        return COMPRESSORS[given]
    raise ConfigError(
        f"compression={one_line(repr(given), 60)} is no compressor; give one of the names {', '.join(COMPRESSORS)}, or "
        "an object: " + ", ".join(dict.fromkeys(f"{type(one).__name__}(…)" for one in COMPRESSORS.values()))
    )


def _rules(given: Any) -> tuple[tuple[str, Compressor | None], ...]:
    if isinstance(given, tuple) and given and all(isinstance(rule, tuple) and len(rule) == 2 for rule in given):
        given = dict(given)  # those of another Compression, by `dataclasses.replace`
    if not isinstance(given, Mapping):
        given = {"*": given}
    if not given:
        raise ConfigError("compression={}: no rule, so nothing is compressed; leave it out, or give {'*': 'int8'}")
    for pattern in given:
        if not isinstance(pattern, str) or not pattern:
            told = one_line(repr(pattern), 60)
            raise ConfigError(
                f"compression={{{told}: …}}: a pattern for names of parameters is a text such as '*.bias'"
            )
    return tuple((pattern, compressor_of(wanted)) for pattern, wanted in given.items())


UNCOMPRESSED = Compression({"*": None})
