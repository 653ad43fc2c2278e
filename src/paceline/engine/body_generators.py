"""Random generators that the loop's body draws from: one that goes on from item to item gives an item what was left of
those that its worker had before, and so other numbers on another number of workers.

    torch.randn(…, generator=mine)     seen by a mode over torch's functions, in a worker's first items
    mine = np.random.default_rng(0)    found once among all objects, as `random.Random(0)` is; states are compared

One that is seeded anew in every item is no harm: its state before the second item's first draw is not the one that the
first item left. Told in a warning and no error, since what is drawn may be for the eyes alone.
"""

from __future__ import annotations

import gc
import random
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paceline.torch_compat import innermost_function_mode
from paceline.world import messages
from paceline.world.determinism import state_of


class _Draws(TorchFunctionMode):
    """Notes each generator that torch's functions are given, with its state before its first draw of the item."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on = True
        self.seen: dict[int, tuple[torch.Generator, str, str]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (kwargs or {}).get("generator")
        if self.is_on and isinstance(given, torch.Generator) and given is not torch.default_generator:
            name = f"torch.Generator, in {getattr(func, '__name__', 'a function of torch')}()"
            self.seen.setdefault(id(given), (given, name, state_of(given)))
        return func(*args, **(kwargs or {}))


class BodyGenerators:
    """`begin` before an item's body, `end` at its backward, for two items; then `tell`."""

    def __init__(self, known: Iterable[object]) -> None:
        """`known`: those that others look after, as the models' own."""
        self._known = [*known, *_shared()]
        self._objects: list[object] | None = None
        self._mode: _Draws | None = None
        self._before: dict[int, tuple[object, str]] = {}
        self._items: list[dict[int, tuple[str, str, str]]] = []  # (name, state before, state after), of what was drawn

    @property
    def is_under_way(self) -> bool:
        return self._mode is not None

    def begin(self) -> None:
        self.abandon()
        if self._mode is not None:
            return  # it is below one of the body's, and leaves with a later item
        self._before = {id(one): (one, state_of(one)) for one in self._of_numpy_and_random()}
        self._mode = _Draws()
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        mode = self._mode
        if mode is None or not mode.is_on:
            return
        known = set(map(id, self._known))
        drawn = {id(one): (name, before, state_of(one)) for one, name, before in mode.seen.values()}
        for one, before in self._before.values():
            if (after := state_of(one)) != before:
                drawn[id(one)] = (f"{type(one).__module__.split('.')[0]}'s {type(one).__name__}", before, after)
        self._items.append({key: found for key, found in drawn.items() if key not in known})
        self.abandon()

    def abandon(self) -> None:
        """The item's body has gone on to another one without a backward, or the engine is closed."""
        self._before = {}
        if self._mode is None:
            return
        self._mode.is_on = False
        if innermost_function_mode() is self._mode:  # else the body has one of its own inside ours
            self._mode.__exit__(None, None, None)
            self._mode = None

    def tell(self) -> None:
        """Of those that went on in the second item where the first had left them."""
        if len(self._items) < 2:
            return
        first, second = self._items[-2:]
        for key, (name, before, _) in second.items():
            if key in first and first[key][2] == before:
                messages.warn(
                    f"the loop's body draws from a random generator of its own ({name}): what an item gets depends on "
                    "the items that its worker had before it, and so on the number of workers. Draw from torch, numpy "
                    "or random without a generator, which are seeded for every item, or seed yours anew in every item"
                )

    def _of_numpy_and_random(self) -> list[object]:
        """torch's are not among the objects that Python lists; so they are seen where they are used."""
        if self._objects is None:
            kinds: tuple[type, ...] = (random.Random,)
            if "numpy" in sys.modules:
                kinds += (sys.modules["numpy"].random.Generator, sys.modules["numpy"].random.RandomState)
            known = set(map(id, self._known))
            self._objects = [one for one in gc.get_objects() if type(one) in kinds and id(one) not in known]
        return self._objects


def _shared() -> list[object]:
    """The generators that `seed_everything` seeds, and the one that names temporary files."""
    numpy = sys.modules.get("numpy")
    shared = [random.seed.__self__, getattr(getattr(tempfile, "_name_sequence", None), "_rng", None)]  # type: ignore[attr-defined]
    return shared if numpy is None else [*shared, numpy.random.mtrand._rand]
