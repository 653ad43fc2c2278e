"""What an audit of the ledger of samples found, as plain values: they make the tables, and the JSON as they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Where:
    """The place of a sample in the run; None for what can't be known."""

    epoch: int
    step: int | None = None
    lane: int | None = None
    attempt: int | None = None
    worker: int | None = None


@dataclass(frozen=True)
class Lost:
    position: int
    id: int | None  # where a rolled back step had the same position
    where: Where  # it should have been


@dataclass(frozen=True)
class Repeated:
    position: int
    id: int | None
    where: tuple[Where, ...]


@dataclass(frozen=True)
class AttemptReport:
    attempt: int
    workers: int
    epoch: int
    position: int  # where it began; in a stream, of all lanes together
    steps: int
    samples: int
    rolled_back_steps: int
    rolled_back_samples: int


@dataclass(frozen=True)
class EpochReport:
    first: int
    last: int  # the same, but for epochs of which there is no line at all: they make one report
    steps: int
    samples: int
    of: int | None
    finished: bool
    lost: int
    repeated: int
    dropped: int
    left_out: int
    unused_ids: tuple[int, ...]  # the first of them, where samples of a finished epoch are lost


@dataclass(frozen=True)
class Report:
    folder: str
    lanes: int
    stream: bool
    ids_proved: bool
    attempts: tuple[AttemptReport, ...]
    epochs: tuple[EpochReport, ...]
    lost: int
    repeated: int
    left_out: int
    first_lost: tuple[Lost, ...]
    first_repeated: tuple[Repeated, ...]
    problems: tuple[str, ...]  # what keeps the record from being a proof
    notes: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return not (self.lost or self.repeated or self.problems)

    @property
    def verdict(self) -> str:
        left_out = f", {self.left_out:,} left out by the loop" if self.left_out else ""
        return f"{self.lost:,} lost, {self.repeated:,} repeated{left_out}"
