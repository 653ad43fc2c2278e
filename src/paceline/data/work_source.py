"""Where a worker's work comes from: the face that a dataset with positions and a stream show to the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.data.sharded_sampler import WorkItem


@dataclass(frozen=True)
class Assignment:
    """The lanes that this worker has of all, and the job's constants that a loader needs."""

    lanes: int
    accumulate: int
    own_lanes: tuple[int, ...]
    seed: int
    global_batch_size: int | None = None
    timeout_s: float = 600.0
    is_compared: bool = False
    """`paceline verify` compares batches itself; a second look would change what a dataset with a state gives next."""

    @property
    def looks_twice(self) -> bool:
        """A sample may be another worker's, so it has to be the same whoever fetches it (second_look.py)."""
        return self.lanes > 1 and not self.is_compared


class WorkSource(Protocol):
    """Where work items come from: a dataset with positions (ShardedLoader) or a stream (StreamLoader)."""

    dataset: Any

    @property
    def batch_size(self) -> int | None:
        """Samples of a micro-batch; None or 0 where a sampler or stream of the user's own makes these."""
        ...

    @property
    def epoch(self) -> int: ...

    @property
    def position(self) -> int: ...

    @property
    def steps(self) -> int | None:
        """Steps of the epoch, where they can be known."""
        ...

    @property
    def steps_left(self) -> int | None: ...

    @property
    def own_items(self) -> int | None:
        """Items of this worker in the epoch, where its steps can be known."""
        ...

    @property
    def digest(self) -> str | None:
        """Of this epoch's order, where it was drawn and might differ between workers."""
        ...

    @property
    def fetches_ahead(self) -> bool:
        """Whether the next item may be asked for while this one is being worked on."""
        ...

    @property
    def takes_places(self) -> bool:
        """Whether `reassign` needs the places of all workers, because each knows those of its own lanes only."""
        ...

    def begin_epoch(self, epoch: int) -> None:
        """Go to the first sample of that epoch."""
        ...

    def items(self) -> Iterator[tuple[WorkItem, Any]]:
        """This worker's items of what is left of the epoch."""
        ...

    def reassign(self, lanes: tuple[int, ...], places: Mapping[str, Any] | None = None) -> None:
        """Other lanes from the place that is committed on; what was fetched ahead is dropped. Call `items()` again.

        It ends what `items()` gave before. If that was not closed yet, the next `items()` goes on with the same loop
        (see `fetching.Loops`): nothing is left where its epoch's last step has been committed. With the same lanes, the
        step in progress is handed out again, bit for bit. `places` is `merged(…)` of the `state_after(None)` of each
        worker.
        """
        ...

    def state_after(self, item: WorkItem | None) -> dict[str, Any]:
        """The place in the data when the step of `item` is done, as JSON can hold it; with None, as it is now.

        Of a stream, the places of this worker's lanes.
        """
        ...

    def commit(self, item: WorkItem) -> None: ...

    def merged(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One state out of those of all workers, in rank order."""
        ...

    def restore(self, state: Mapping[str, Any], *, changed: frozenset[str] = frozenset()) -> None:
        """Go on from `state_after`; `changed` names the facts of the job that are others now and were accepted."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the samples of a step depend on besides seed, lanes and accumulate."""
        ...

    def log_header(self) -> dict[str, Any]:
        """What the sample log says about this place: fields of a `LogHeader`."""
        ...

    def described(self) -> tuple[str, str]:
        """How a global batch is made, and how much there is in all."""
        ...

    def close(self) -> None: ...
