"""Gradient compression: fewer bytes per step, with what was lost given back in the next (error feedback)."""

from __future__ import annotations

from paceline.compression.cast import Cast
from paceline.compression.int8 import Int8
from paceline.compression.power_sgd import PowerSgd
from paceline.compression.rules import (
    COMPRESSORS,
    UNCOMPRESSED,
    BlockCompressor,
    Compression,
    Compressor,
    compression_of,
)
from paceline.compression.sign import Sign
from paceline.compression.topk import TopK

__all__ = [
    "COMPRESSORS",
    "UNCOMPRESSED",
    "BlockCompressor",
    "Cast",
    "Compression",
    "Compressor",
    "Int8",
    "PowerSgd",
    "Sign",
    "TopK",
    "compression_of",
]
