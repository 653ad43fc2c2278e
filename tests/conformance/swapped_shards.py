"""A pytest plugin: accelerate's own tests of its data loaders get paceline's classes of shards.

Its DataLoaders, which are made by `prepare_data_loader`, shard with ours then. With PACELINE_WHOSE_CLASSES=accelerate
nothing is swapped.
"""

from __future__ import annotations

import os
from typing import Any

import accelerate.data_loader

import paceline.data as ours

NAMES = ("BatchSamplerShard", "IterableDatasetShard")


def pytest_configure() -> None:
    """Before the tests import them by name."""
    theirs: Any = accelerate.data_loader
    if os.environ.get("PACELINE_WHOSE_CLASSES") != "accelerate":
        for name in NAMES:
            setattr(theirs, name, getattr(ours, name))
