"""The progress line: where the job is, in one row, the same words whoever draws it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProgressLine:
    """Where the job is, as rank 0 tells it; `final` when the loop is over and the line may be left to stand."""

    step: int
    total: int | None = None
    fields: Mapping[str, float | int | str] = field(default_factory=dict)
    final: bool = False

    def text(self) -> str:
        of = f"/{self.total}" if self.total else ""
        return " · ".join(
            [f"step {self.step}{of}", *(f"{name} {_short(value)}" for name, value in self.fields.items())]
        )


def _short(value: float | int | str) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else value
