"""Samples that can't be had twice: a job's first item is fetched once more, from the same random state, and compared.

    (index, epoch, random state) ──► dataset[index] ──► collate_fn ──► batch      the same, whenever and by whomever
    a count of calls, the time, a generator of a transform's own ──► another batch: said in one warning

Which samples a process has fetched before depends on the number of workers and on resumes, so such samples do too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.world import messages

LONGEST_S = 2.0
"""An item that took longer is not fetched again: a start of a job that waits is worse than a habit that goes unseen."""


def compare(batch: Any, again: Callable[[], Any], dataset: str, samples: str) -> None:
    """`again` fetches the batch once more."""
    try:
        differs = _differ(batch, again())
        found = "gave another batch"
    except Exception as error:  # the first one is good, and what the loop gets
        differs, found = True, f"failed ({type(error).__name__}: {error})"
    if differs:
        messages.logger("data").warning(
            f"paceline: {samples} of the {dataset}, fetched a second time from the same random state, {found}: the "
            "dataset or collate_fn depends on something besides the index, the epoch and the random numbers of torch, "
            "numpy and random, as a count of its calls, the time, or a generator of its own. Such samples are others "
            "on another number of workers, and after a resume"
        )


def _differ(first: Any, second: Any) -> bool:
    """In values; what can't be compared does not."""
    if isinstance(first, Tensor):
        if not isinstance(second, Tensor) or first.shape != second.shape or first.dtype != second.dtype:
            return True
        if first.layout is not torch.strided:
            return False
        return not torch.equal(first, second) and not torch.equal(*(torch.nan_to_num(one) for one in (first, second)))
    if isinstance(first, np.ndarray):
        return not isinstance(second, np.ndarray) or first.tobytes() != second.tobytes()
    if isinstance(first, Mapping):
        if not isinstance(second, Mapping) or first.keys() != second.keys():
            return True
        return any(_differ(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        if not isinstance(second, list | tuple) or len(first) != len(second):
            return True
        return any(_differ(one, other) for one, other in zip(first, second, strict=True))
    if isinstance(first, float) and math.isnan(first):
        return not (isinstance(second, float) and math.isnan(second))
    if isinstance(first, str | bytes | int | float | complex):
        return bool(first != second)
    return False
