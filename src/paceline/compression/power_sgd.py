"""PowerSGD: a matrix as the product of two thin ones.                 bytes: r·(n + m) / (n·m) of fp32

    n×m gradients M_l of lanes        P = Σ M_l Q     orthonormal columns     Q = Σ M_lᵀ P        Σ M̂_l = P Qᵀ

Both are kept transposed, with r rows: so made, their products are many times as fast.

One step of a power iteration, which begins with the Q of the step before (Vogels et al., 2019). It is linear: the
factors of lanes are added up as gradients are, and a worker sends the sum of its lanes. What a lane loses, M_l - P Pᵀ
M_l, is found without the others. The columns of P are made orthonormal by Householder's QR, which has a full set of
them for every matrix, one of zeros included. Vectors, and matrices too small to gain by it, are left as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.world.checked_values import whole_number


@dataclass(frozen=True)
class PowerSgd:
    """A matrix travels as two factors of this `rank`; vectors and small matrices travel as they are."""

    rank: int = 4

    def __post_init__(self) -> None:
        whole_number("PowerSgd(rank=…)", self.rank, least=1, why="a matrix that is not 0 has a rank of at least 1")

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a parameter gains by it; a matrix that can't have such a rank is refused."""
        if len(shape) < 2 or not prod(shape):
            return False
        rows, columns = matrix_shape(shape)
        if min(rows, columns) == 1:
            return False
        if self.rank > min(rows, columns):
            raise ConfigError(
                f"PowerSgd(rank={self.rank}) for {name!r}, a matrix of {rows} × {columns} whose rank is at most "
                f"{min(rows, columns)}; choose a smaller rank, or leave it out: compression={{{name!r}: None, '*': …}}"
            )
        return self.rank * (rows + columns) < rows * columns


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], prod(shape[1:])


def first_factor(columns: int, rank: int, seed: int) -> Tensor:
    """Where the power iteration begins: r rows."""
    return torch.randn((rank, columns), generator=torch.Generator().manual_seed(seed))


def orthonormal(factor: Tensor) -> Tensor:
    """Rows of length 1 at right angles that span what the given rows do."""
    columns: Tensor = torch.linalg.qr(factor.t()).Q
    return columns.t()
