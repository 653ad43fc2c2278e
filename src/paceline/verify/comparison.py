"""The first difference of two runs, in the order in which a step comes to be.

    written   a weight is not what the last step left         data, random, loss, share    an item, lane by lane
    rates     learning rates                                  lane gradient                its own, before any sum
    gradient  the sum over lanes                              buffer, weight               after the update

What comes first explains what follows: where the loss of a lane differs, all weights differ after the step. Runs are
compared by fingerprints, or by values within a tolerance where the order of sums is not promised (`reduction="fast"`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.verify.record import After, Item, Run, Step
from paceline.verify.request import Place

LANES, START, WRITTEN, ITEMS, DATA, RANDOM, LOSS, SHARE, LANE_GRADIENT, RATES, GRADIENT, BUFFER, WEIGHT, STEPS = (
    "lanes", "start", "written", "items", "data", "random", "loss", "share", "lane gradient", "rates", "gradient",
    "buffer", "weight", "steps",
)  # fmt: skip

KEPT = {WRITTEN: "entry", GRADIENT: "gradient", BUFFER: "buffers", WEIGHT: "weights"}
"""Kinds of which the closer look keeps values, and what the recorder calls them."""


@dataclass(frozen=True)
class Difference:
    kind: str
    step: int
    name: str = ""  # of the tensor, of the library that draws, or of the place in the batch
    place: Place | None = None  # of the item
    workers: tuple[int, ...] = ()  # of the other run, that are unlike
    values: tuple[Any, Any] | None = None  # of the reference and of the other, where they are numbers
    inside: bool = False  # the workers of one run are unlike each other
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)


def first_difference(a: Run, b: Run, tolerance: float) -> Difference | None:
    """`a` is the reference. None: all that both have recorded is alike."""
    if a.about and b.about and a.about["lanes"] != b.about["lanes"]:
        return Difference(LANES, 0, values=(a.about["lanes"], b.about["lanes"]))
    for worker, weights in b.start.items():
        for name in _unlike(a.start.get(0, weights), weights):
            return Difference(START, 0, name, workers=(worker,))
    for number in sorted(a.steps.keys() & b.steps.keys()):
        for found in differences_in(number, a, b, tolerance):
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
        ours = {left.get(worker, {}).get(name) for worker in range(a.workers)}
        writers = tuple(worker for worker, value in theirs.items() if value is not None)
        if b.whole and len(set(theirs.values())) > 1:
            yield Difference(WRITTEN, number, name, workers=writers, inside=True)
        elif set(theirs.values()) != ours if a.whole and b.whole else bool(writers) != (ours != {None}):
            yield Difference(WRITTEN, number, name, workers=writers)


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
    ours = left.after[0]
    theirs = sorted(right.after.items())
    for worker, after in theirs:
        if after.rates != ours.rates:
            values = next(pair for pair in zip(ours.rates, after.rates, strict=False) if pair[0] != pair[1])
            yield Difference(RATES, number, "learning rate", workers=(worker,), values=values)
    if tolerance is None and ours.gradients is not None:
        for worker, after in theirs:
            for name in _unlike(ours.gradients, after.gradients) if after.gradients is not None else ():
                yield Difference(GRADIENT, number, name, workers=(worker,), inside=_inside(theirs, "gradients", name))
    for kind, of in ((BUFFER, "buffers"), (WEIGHT, "weights")):
        for worker, after in theirs:
            for name in _unlike_after(ours, after, of, tolerance):
                yield Difference(kind, number, name, workers=(worker,), inside=_inside(theirs, of, name))
    for worker, after in sorted(left.after.items())[1:]:  # the reference's own workers
        for name in _unlike_after(ours, after, "weights", tolerance):
            yield Difference(WEIGHT, number, name, workers=(worker,), inside=True, more={"of": "reference"})


def _unlike_after(ours: After, theirs: After, of: str, tolerance: float | None) -> Iterator[str]:
    for name in _unlike(getattr(ours, of), getattr(theirs, of)):
        apart = distance(ours.sketches.get(name), theirs.sketches.get(name)) if tolerance is not None else math.inf
        if tolerance is None or not apart <= tolerance:
            yield name


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
