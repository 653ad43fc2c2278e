"""What the loop's body carries from item to item: an item then gets what is left of those that its worker had before,
and so other numbers on another number of workers. Looked for in a worker's first two items, and only told.

    torch.randn(…, generator=mine)     seen by a mode over torch's functions
    mine = np.random.default_rng(0)    found once among all objects, as `random.Random(0)` is; states are compared
    out, h = model(x, h)               a tensor in a variable of the script
    dist.all_gather(others, out)       what torch.distributed gave, in the loss: of as many items as there are workers

A generator that is seeded anew in every item is no harm: its state before the second item's first draw is not the one
that the first item left. A tensor is told of if the first item made it or wrote to it, if the second one's loss comes
from it, by the functions of torch that the mode sees, and if that of the third does not, or of what was written to it
meanwhile: what is made once and kept, and a sum that is only printed, are no harm. The second item has to be of another
lane in the same step, since between steps a script may change what it likes. In an elastic job it may be of the next
step too: a worker that joins later begins without what the script kept (as far as it was made before the backward).
"""

from __future__ import annotations

import gc
import random
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from paceline.torch_compat import innermost_function_mode, version_of
from paceline.world import messages
from paceline.world.determinism import state_of
from paceline.world.script_line import frames_to_script, place_of

_FROM_OTHERS = 0
"""Where a tensor comes from that is no id of one."""
_LOOP = str(Path(__file__).with_name("loop.py"))


class _Body(TorchFunctionMode):
    """Notes each generator that torch's functions are given, with its state before its first draw of the item, and the
    tensors that they make or write to; and follows some tensors, and what comes from them."""

    def __init__(self, followed: Sequence[Tensor]) -> None:
        super().__init__()
        self.is_on, self.notes_made = True, True
        self.seen: dict[int, tuple[torch.Generator, str, str]] = {}
        self.made: dict[int, weakref.ref[Tensor]] = {}  # by id
        self.first_used: dict[int, str] = {}  # one of those that are followed: where
        # By id: which one it comes from, by its id. The tensor itself stays, so that no other has its id.
        self._comes_from = {id(tensor): (id(tensor), tensor) for tensor in followed}
        self.versions = {id(tensor): _version(tensor) for tensor in followed}
        self._received: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = kwargs.get("generator")
        if self.is_on and isinstance(given, torch.Generator) and given is not torch.default_generator:
            name = f"torch.Generator, in {getattr(func, '__name__', 'a function of torch')}()"
            self.seen.setdefault(id(given), (given, name, state_of(given)))
        result = func(*args, **kwargs)
        function = getattr(func, "__name__", "")
        if self.is_on and self._comes_from:
            self._follow(function, args, kwargs, result)
        if self.notes_made:
            self._note_made(function, args, kwargs, result)
        return result

    def _note_made(self, function: str, args: Any, kwargs: Any, result: Any) -> None:
        if _loop_is_running():  # the next batch is fetched
            return
        writes = function == "__setitem__" or function.startswith("__i") or function[-1:] == "_" != function[-2:-1]
        given = set() if writes else set(map(id, _tensors((args, kwargs))))  # `to` may give what it was given
        for tensor in _tensors((result, args[:1] if writes else ())):
            if id(tensor) not in given:
                self.made[id(tensor)] = weakref.ref(tensor)

    def _follow(self, function: str, args: Any, kwargs: Any, result: Any) -> None:
        origin = next((found for one in _tensors((args, kwargs)) if (found := self.origin_of(one)) is not None), None)
        if origin is None or function.startswith("new_") or function.endswith("_like"):  # of its shape alone
            return
        if origin not in self.first_used:
            _, frame = frames_to_script(sys._getframe())
            self.first_used[origin] = "" if frame is None else f" ({place_of(frame)})"
        for tensor in _tensors((result, args[0] if function == "__setitem__" else None)):
            self._comes_from.setdefault(id(tensor), (origin, tensor))

    def received(self, tensors: Iterable[Tensor]) -> None:
        found = {id(tensor): (_FROM_OTHERS, tensor) for tensor in tensors}
        self._comes_from |= found
        self._received |= found.keys()

    def was_received(self, tensor: Tensor) -> bool:
        """Itself, which changes its value and no gradient: a loss that is reduced in place, to be printed."""
        return id(tensor) in self._received

    def followed(self, origin: int) -> Tensor:
        return self._comes_from[origin][1]

    def origin_of(self, tensor: Tensor) -> int | None:
        return self._comes_from[id(tensor)][0] if id(tensor) in self._comes_from else None


class BodyState:
    """`begin` before a body and `end` at its backward, twice; `tell`; `begin_again`, `end_again` for a third item."""

    def __init__(self, known: Iterable[object], models: Iterable[Tensor]) -> None:
        """`known`: generators that others look after, as the models' own; `models`: their parameters and buffers."""
        self._known, self._models = [*known, *_shared()], set(map(id, models))
        self._objects: list[object] | None = None
        self._mode: _Body | None = None
        self._made: dict[int, weakref.ref[Tensor]] = {}  # in the item that is looked at, or was
        self._suspect: tuple[Tensor, int, str] | None = None  # of which the second item's loss came, and where
        self._told_received = self._joins = False
        self._before: dict[int, tuple[object, str]] = {}
        self._items: list[dict[int, tuple[str, str, str]]] = []  # (name, state before, state after), of what was drawn

    @property
    def is_under_way(self) -> bool:
        return self._mode is not None or self._suspect is not None

    def begin(self, *, other_lane: bool, joins: bool = False) -> None:
        """`other_lane`: than the item before it, in the same step. `joins`: of another, and workers may join."""
        made = self._made
        self.abandon()
        if self._mode is not None:
            return  # it is below one of the body's, and leaves with a later item
        self._before = {id(one): (one, state_of(one)) for one in self._of_numpy_and_random()}
        alive = [one for ref in made.values() if (one := ref()) is not None and type(one) in (Tensor, Parameter)]
        kept = [one for one in alive if id(one) not in self._models]
        self._joins = joins
        self._enter(kept if other_lane or joins else [])

    def _enter(self, followed: Sequence[Tensor]) -> None:
        self._mode = _Body(followed)
        self._made = self._mode.made
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def end(self, loss: Tensor, *, another_follows: bool) -> None:
        """`another_follows`: in the same step; until it begins, what the body makes after backward is seen too."""
        mode = self._mode
        if mode is None or not mode.is_on:
            return
        if (origin := mode.origin_of(loss)) == _FROM_OTHERS:
            if not self._told_received and not mode.was_received(loss):
                self._tell_received(mode.first_used.get(origin, ""))
        elif origin is not None:
            tensor = mode.followed(origin)
            self._suspect = tensor, mode.versions[origin], mode.first_used.get(origin, "")
        known = set(map(id, self._known))
        drawn = {id(one): (name, before, state_of(one)) for one, name, before in mode.seen.values()}
        for one, before in self._before.values():
            if (after := state_of(one)) != before:
                drawn[id(one)] = (f"{type(one).__module__.split('.')[0]}'s {type(one).__name__}", before, after)
        self._items.append({key: found for key, found in drawn.items() if key not in known})
        mode.is_on = False
        if not another_follows:
            self.abandon()

    def abandon(self) -> None:
        """The item's body has gone on to another one without a backward, or the engine is closed."""
        self._before = {}
        if self._mode is None:
            return
        self._mode.is_on = self._mode.notes_made = False
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

    def received(self, tensors: Iterable[Tensor]) -> None:
        """By a collective of the script's own; after a backward they are for the next item, or for the eyes."""
        if self._mode is not None and self._mode.is_on:
            self._mode.received(tensors)

    def _tell_received(self, where: str) -> None:
        self._told_received = True
        messages.warn(
            f"the loss is made of what a collective of torch.distributed gave{where}: that is of one item of each "
            "worker, and so the numbers depend on how many workers there are. Make it of the item's own samples, with "
            "as large a batch for each lane as it needs; a mean over all tokens is engine.backward(loss, weight=tokens)"
        )

    def begin_again(self) -> None:
        self.abandon()
        if self._suspect is None:
            return
        tensor, version, _ = self._suspect
        if self._mode is not None:
            self._suspect = None
        elif _version(tensor) != version:
            self._tell_carried()
        else:
            self._enter([tensor])

    def end_again(self, loss: Tensor) -> None:
        if self._suspect is not None and self._mode is not None and self._mode.origin_of(loss) is None:
            self._tell_carried()
        self._suspect = None
        self.abandon()

    def _tell_carried(self) -> None:
        assert self._suspect is not None
        (_, _, where), self._suspect = self._suspect, None
        if self._joins:
            messages.warn(
                f"a tensor that the loop's body keeps from step to step is part of the loss{where}: a worker that "
                "joins this elastic job later begins without it, and then the numbers are others. Hand it over by "
                "engine.share_with_joiners(give, take), or make it a buffer of the model that forward changes"
            )
            return
        messages.warn(
            f"a tensor that the loop's body carries from item to item is part of the loss{where}: what is in it "
            "depends on the items that its worker had before, and so on the number of workers. Keep one for each "
            "lane (in a dict, by engine.lane), or make it a buffer of the model that forward changes: every lane then "
            "starts from the step's"
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


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)  # one of inference mode has none


def _loop_is_running() -> bool:
    """Then it is not the body that runs, during which the loop waits in its `yield`."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == _LOOP:
            return True
        frame = frame.f_back
    return False


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Among the arguments or results of a function."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors(tuple(tree.values()))
    elif isinstance(tree, list | tuple):
        for one in tree:
            yield from _tensors(one)
