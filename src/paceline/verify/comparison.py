"""The first difference of two runs, in the order in which a step comes to be.

    written   a weight is not what the last step left         data, random, loss, share    an item, lane by lane
    rates     learning rates                                  lane gradient                its own, before any sum
    gradient  the sum over lanes                              buffer, weight               after the update

What comes first explains what follows: where the loss of a lane differs, all weights differ after the step. Workers of
the reference that are unlike each other come before what differs from it: then it is no measure of the others. Runs are
compared by fingerprints, or by values within a tolerance where the order of sums is not promised (`reduction="fast"`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import eq
from typing import Any, TypeVar

from paceline.verify.record import After, Item, Run, Step
from paceline.verify.request import Place

LANES, START, WRITTEN, ITEMS, DATA, RANDOM, LOSS, SHARE, LANE_GRADIENT, RATES, GRADIENT, BUFFER, WEIGHT, STEPS = (
    "lanes", "start", "written", "items", "data", "random", "loss", "share", "lane gradient", "rates", "gradient",
    "buffer", "weight", "steps",
)  # fmt: skip

_T = TypeVar("_T")

KEPT = {WRITTEN: "entry", GRADIENT: "gradient", BUFFER: "buffers", WEIGHT: "weights"}
"""Kinds of which the closer look keeps values, and what the recorder calls them."""


@dataclass(frozen=True)
class Difference:
    kind: str
    step: int
    name: str = ""  # of the tensor, of the library that draws, or of the place in the batch
    place: Place | None = None  # of the item
    workers: tuple[int, ...] = ()  # of the other run, or of the reference where it is the one, that are unlike
    values: tuple[Any, Any] | None = None  # of the reference and of the other, where they are numbers
    inside: bool = False  # the workers of one run are unlike each other
    of_reference: bool = False  # this run is the reference
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)


def first_difference(a: Run, b: Run, tolerance: float, *, within_reference: bool = True) -> Difference | None:
    """`a` is the reference. None: all that both have recorded is alike.

    `within_reference`: also where its own workers are unlike each other.
    """
    if a.about and b.about and a.about["lanes"] != b.about["lanes"]:
        return Difference(LANES, 0, values=(a.about["lanes"], b.about["lanes"]))
    own_names = {name for weights in a.start.values() for name in weights} if within_reference else set()
    for name in sorted(own_names):
        ours = {worker: weights.get(name) for worker, weights in a.start.items()}
        if apart := _apart(ours, b.start.get(0, {}).get(name)):
            return Difference(START, 0, name, workers=apart, inside=True, of_reference=True)
    for worker, weights in b.start.items():
        for name in _unlike(a.start.get(0, weights), weights):
            return Difference(START, 0, name, workers=(worker,))
    for number in sorted(a.steps.keys() & b.steps.keys()):
        for found in differences_in(number, a, b, tolerance):
            if within_reference or not found.of_reference:
                return found
    if a.error is None and b.error is None and a.made != b.made:
        return Difference(STEPS, min(a.made, b.made) + 1, values=(a.made, b.made))
    return None


def differences_in(number: int, a: Run, b: Run, tolerance: float) -> Iterator[Difference]:
    """All of one step, in their order."""
    exact = a.in_bits and b.in_bits
    left, right = a.steps[number], b.steps[number]
    yield from _written(number, a, b)
    if left.items.keys() != right.items.keys() and left.after and right.after:
        place = min(left.items.keys() ^ right.items.keys())
        yield Difference(ITEMS, number, place=place, values=(place in left.items, place in right.items))
    places = sorted(left.items.keys() & right.items.keys())
    for compare in (_data, _random, _loss, _share, _lane_gradients):
        for place in places:
            yield from compare(number, place, left.items[place], right.items[place], None if exact else tolerance)
    yield from _after(number, left, right, None if exact else tolerance)


def _written(number: int, a: Run, b: Run) -> Iterator[Difference]:
    """Weights that a script has written between two steps: on all workers alike, or it is a difference."""
    left, right = a.steps[number].entry, b.steps[number].entry
    for name in sorted({name for entry in (*left.values(), *right.values()) for name in entry}):
        theirs = {worker: right.get(worker, {}).get(name) for worker in range(b.workers)}
        own = {worker: left.get(worker, {}).get(name) for worker in range(a.workers)}
        ours = set(own.values())
        writers = tuple(worker for worker, value in theirs.items() if value is not None)
        if a.whole and len(ours) > 1:
            apart = _writers_apart(own, theirs[0])
            yield Difference(WRITTEN, number, name, workers=apart, inside=True, of_reference=True)
        elif b.whole and len(set(theirs.values())) > 1:
            yield Difference(WRITTEN, number, name, workers=_writers_apart(theirs, own[0]), inside=True)
        elif set(theirs.values()) != ours if a.whole and b.whole else bool(writers) != (ours != {None}):
            yield Difference(WRITTEN, number, name, workers=writers)


def _writers_apart(written: Mapping[int, str | None], other_run: str | None) -> tuple[int, ...]:
    """Of workers that did not write alike: those that wrote, or where all did, those that wrote something else."""
    writers = tuple(worker for worker, value in written.items() if value is not None)
    return writers if len(writers) < len(written) else _apart(written, other_run)


# -- an item -----------------------------------------------------------------------------------------------------------


def _data(number: int, place: Place, left: Item, right: Item, tolerance: float | None) -> Iterator[Difference]:
    for name in _unlike(left.data, right.data):
        more = {"ids": (left.ids, right.ids), "epoch": right.epoch}
        yield Difference(DATA, number, name, place, (right.worker,), more=more)


def _random(number: int, place: Place, left: Item, right: Item, tolerance: float | None) -> Iterator[Difference]:
    if left.loss is not None and right.loss is not None:
        for name in _unlike(left.random, right.random):
            yield Difference(RANDOM, number, name, place, (right.worker,))


def _loss(number: int, place: Place, left: Item, right: Item, tolerance: float | None) -> Iterator[Difference]:
    if not _alike(left.loss, right.loss, tolerance):
        yield Difference(LOSS, number, "loss", place, (right.worker,), values=(left.loss, right.loss))


def _share(number: int, place: Place, left: Item, right: Item, tolerance: float | None) -> Iterator[Difference]:
    if left.weight != right.weight:
        yield Difference(SHARE, number, "weight", place, (right.worker,), values=(left.weight, right.weight))


def _lane_gradients(
    number: int, place: Place, left: Item, right: Item, tolerance: float | None
) -> Iterator[Difference]:
    if tolerance is None and left.gradients and right.gradients:  # fsdp has none to be seen
        for name in _unlike(left.gradients, right.gradients):
            yield Difference(LANE_GRADIENT, number, name, place, (right.worker,))


# -- what is left after it ---------------------------------------------------------------------------------------------


def _after(number: int, left: Step, right: Step, tolerance: float | None) -> Iterator[Difference]:
    if 0 not in left.after:
        return
    ours, own = left.after[0], left.after
    other = right.after[min(right.after)] if right.after else None
    theirs = sorted(right.after.items())
    if apart := _apart({worker: after.rates for worker, after in own.items()}, other.rates if other else None):
        rest = next(worker for worker in sorted(own) if worker not in apart)
        values = _first_unlike(own[rest].rates, own[apart[0]].rates)
        yield Difference(RATES, number, "learning rate", workers=apart, values=values, inside=True, of_reference=True)
    for worker, after in theirs:
        if after.rates != ours.rates:
            values = _first_unlike(ours.rates, after.rates)
            yield Difference(RATES, number, "learning rate", workers=(worker,), values=values)
    for kind, of in ((GRADIENT, "gradients"), (BUFFER, "buffers"), (WEIGHT, "weights")):
        if kind == GRADIENT and (tolerance is not None or ours.gradients is None):
            continue
        for name, apart in _own_apart(own, other, of, tolerance):
            yield Difference(kind, number, name, workers=apart, inside=True, of_reference=True)
        for worker, after in theirs:
            for name in _unlike_after(ours, after, of, tolerance) if getattr(after, of) is not None else ():
                yield Difference(kind, number, name, workers=(worker,), inside=_inside(theirs, of, name))


def _first_unlike(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, float] | None:
    return next((pair for pair in zip(left, right, strict=False) if pair[0] != pair[1]), None)


def _own_apart(
    own: Mapping[int, After], other: After | None, of: str, tolerance: float | None
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of which the reference's workers are unlike each other, and the workers that are."""
    first = own[0]
    names = {name for worker in sorted(own)[1:] for name in _unlike_after(first, own[worker], of, tolerance)}
    for name in sorted(names):
        yield name, _apart(own, other, partial(_same_after, of=of, name=name, tolerance=tolerance))


def _apart(of_workers: Mapping[int, _T], other_run: _T | None, same: Callable[[_T, _T], bool] = eq) -> tuple[int, ...]:
    """Of workers that should be alike, those that are not: unlike what the other run has, or else unlike most."""
    workers = sorted(of_workers)

    def witnesses(worker: int) -> tuple[bool, int]:
        value = of_workers[worker]
        return other_run is not None and same(value, other_run), sum(same(value, one) for one in of_workers.values())

    right = of_workers[max(workers, key=witnesses)]
    return tuple(worker for worker in workers if not same(of_workers[worker], right))


def _unlike_after(ours: After, theirs: After, of: str, tolerance: float | None) -> Iterator[str]:
    for name in _unlike(getattr(ours, of) or {}, getattr(theirs, of) or {}):
        if not _same_after(ours, theirs, of, name, tolerance):
            yield name


def _same_after(ours: After, theirs: After, of: str, name: str, tolerance: float | None) -> bool:
    if (getattr(ours, of) or {}).get(name) == (getattr(theirs, of) or {}).get(name):
        return True
    return tolerance is not None and distance(ours.sketches.get(name), theirs.sketches.get(name)) <= tolerance


def distance(ours: tuple[float, ...] | None, theirs: tuple[float, ...] | None) -> float:
    """About the norm of the difference of two tensors, beside that of the first."""
    if ours is None or theirs is None or len(ours) != len(theirs):
        return math.inf
    apart = math.sqrt(math.fsum((x - y) ** 2 for x, y in zip(ours[1:], theirs[1:], strict=True)))
    return 0.0 if apart == 0 else apart / ours[0] if ours[0] else math.inf


def _inside(of_workers: list[tuple[int, After]], of: str, name: str) -> bool:
    return len({(getattr(after, of) or {}).get(name) for _, after in of_workers}) > 1


def _unlike(left: Mapping[str, str], right: Mapping[str, str]) -> Iterator[str]:
    for name in [*left, *(name for name in right if name not in left)]:
        if left.get(name) != right.get(name):
            yield name


def _alike(left: float | None, right: float | None, tolerance: float | None) -> bool:
    if left is None or right is None:
        return left is right
    if tolerance is None:
        return left.hex() == right.hex()
    return left == right or abs(left - right) <= tolerance * max(abs(left), abs(right))
