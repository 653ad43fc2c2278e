"""paceline: data-parallel training for PyTorch with the same bits on any number of workers."""

from __future__ import annotations

__version__ = "0.1.0"
