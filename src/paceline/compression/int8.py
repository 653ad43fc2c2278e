"""int8: each block of values as whole numbers from -127 to 127 and one fp32 scale.    bytes: (1 + 4/block) / 4 of fp32

    scale = max |x| / 127        code = round(x · (1 / scale))        x̂ = code · scale

Nearest rounding is at most half a scale off and has a bias, which error feedback gives back later. Stochastic rounding
(down or up with the probability that keeps the mean) has none by itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from paceline.collectives.shared_memory.kernels import CKernels, Merges, choose_kernels, merge_table
from paceline.compression.block_codec import (
    BlockCodec,
    OwnedRows,
    Partial,
    clear_beyond,
    payload_like,
    row_scales,
)
from paceline.errors import ConfigError
from paceline.world import environment
from paceline.world.checked_values import one_word, whole_number

LARGEST = 127
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # below, x / scale would overflow; the residual keeps such values


@dataclass(frozen=True)
class Int8(BlockCodec):
    """Each `block` of values becomes as many bytes and one fp32 scale, rounded to the nearest or at random."""

    block: int = 128
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        check_block("Int8", self.block)
        one_word("Int8(rounding=…)", self.rounding, ("nearest", "stochastic"))

    @property
    def row_bytes(self) -> int:
        return self.block + 4

    @property
    def draws(self) -> bool:
        return self.rounding == "stochastic"

    def encode(self, values: Tensor, partial: Partial, noise: Tensor | None = None) -> Tensor:
        payload = payload_like(values, self.row_bytes)
        scales = values.abs().amax(dim=1, keepdim=True)  # in two passes, and 20 times as fast as a norm
        scales.div_(LARGEST).clamp_(min=SMALLEST_SCALE)
        codes = values * (1 / scales)  # a division for every value would take twice as long
        if noise is None:
            codes.round_()
        else:
            codes.add_(noise).floor_().clamp_(-LARGEST, LARGEST)
        payload[:, : self.block].view(torch.int8).copy_(codes)
        row_scales(payload).copy_(scales)
        return payload

    def split(self, values: Tensor, partial: Partial, noise: Tensor | None, residual: Tensor | None) -> Tensor:
        kernels = in_c()
        given = [values] if residual is None else [values, residual]
        if kernels is None or noise is not None or not all(map(_is_plain, given)):
            return super().split(values, partial, noise, residual)
        payload = payload_like(values, self.row_bytes)
        address = 0 if residual is None else residual.data_ptr()
        kernels.paceline_int8_split(values.data_ptr(), address, payload.data_ptr(), values.shape[0], self.block)
        clear_beyond(values, partial)
        return payload

    def sum(self, parts: Sequence[Tensor], merges: Merges, rows: OwnedRows) -> Tensor:
        kernels = in_c()
        partial, noise, residual, lost, out = rows
        given = [*parts, lost, out, *([] if residual is None else [residual])]
        if kernels is None or noise is not None or not all(map(_is_plain, given)):
            return super().sum(parts, merges, rows)
        payload = payload_like(lost, self.row_bytes)
        addresses = (ctypes.c_uint64 * len(parts))(*(part.data_ptr() for part in parts))
        address = 0 if residual is None else residual.data_ptr()
        failed = kernels.paceline_int8_sum(
            addresses, len(parts), merge_table(tuple(merges)), len(merges), address,
            lost.data_ptr(), payload.data_ptr(), out.data_ptr(), lost.shape[0], self.block,
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no room for {len(parts)} blocks of sums")
        clear_beyond(lost, partial)
        clear_beyond(out, partial)
        return payload

    def decode(self, payload: Tensor, partial: Partial, out: Tensor) -> None:
        kernels = in_c()
        if kernels is not None and _is_plain(payload) and _is_plain(out):
            kernels.paceline_int8_decode(payload.data_ptr(), out.data_ptr(), out.shape[0], self.block)
        else:
            out.copy_(payload[:, : self.block].view(torch.int8)).mul_(row_scales(payload))
        clear_beyond(out, partial)


@cache
def in_c() -> ctypes.CDLL | None:
    """The same in one pass over memory, with the same bits of what is finite, where there is a compiler."""
    kernels = choose_kernels(environment.wanted_kernels())
    if not isinstance(kernels, CKernels):
        return None
    size, address, count = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    kernels.library.paceline_int8_split.argtypes = [address, address, address, size, size]
    kernels.library.paceline_int8_decode.argtypes = [address, address, size, size]
    kernels.library.paceline_int8_sum.argtypes = [
        address, count, address, count, address, address, address, address, size, size,
    ]  # fmt: skip
    return kernels.library


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def check_block(name: str, block: int, least: int = 16) -> None:
    """Owners' ranges are cut at multiples of 4096 elements of a parameter, and memory is aligned to 16."""
    whole_number(f"{name}(block=…)", block, least=least, most=2048, why=f"a block has at least {least} elements")
    if 4096 % block:
        raise ConfigError(f"{name}(block={block}): a block is a power of two, from {least} to 2048")
