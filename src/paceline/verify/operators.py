"""Every operator of one item: its name, the line it was called from, and fingerprints of what went in and came out.

    aten.native_dropout   train.py:31   in: an operator's 71a0…, 0.5   out: 9f03…, 11c2…

Where an input comes from is told as well, because it tells causes apart: an operator before, a parameter or buffer by
its name, the batch, or `outside`: something that a script made or kept by itself. Two lists of the same item on
different workers part at the first line that explains their difference (`first_different_operator.py`).
"""

from __future__ import annotations

import bisect
import hashlib
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.torch_compat import each_operator

OPERATOR = "an operator"
OUTSIDE = "outside"
BACKWARD = "backward"
BATCH = "the batch"
_NOTHING = "no values yet"

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])
_STEP = str(Path(__file__).parents[1] / "engine" / "step.py")
_SEEN_THROUGH = str(Path(__file__).parents[1] / "engine" / "body_state.py")  # it stands around the body's calls


def fingerprint(tensor: Tensor) -> str:
    """64 bits of a hash over dtype, shape and bytes."""
    told = tensor.detach().to("cpu").contiguous()
    digest = hashlib.blake2b(f"{told.dtype}|{tuple(told.shape)}|".encode(), digest_size=8)
    digest.update(told.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch, each with its place in it; other values as a tensor of their text."""
    if isinstance(tree, Tensor):
        yield path or "batch", tree
    elif isinstance(tree, Mapping) or isinstance(getattr(tree, "data", None), Mapping):
        for key, value in (tree if isinstance(tree, Mapping) else tree.data).items():
            yield from leaves(value, f"{path}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for place, value in enumerate(tree):
            yield from leaves(value, f"{path}[{place}]")
    elif type(tree).__module__ == "numpy":
        yield path, torch.frombuffer(bytearray(tree.tobytes()) or bytearray(1), dtype=torch.uint8)
    elif isinstance(tree, str | bytes | int | float | bool):
        yield path, torch.frombuffer(bytearray(repr(tree).encode()), dtype=torch.uint8)


class OperatorTrace:
    """From `begin` to `end`, in the thread that calls them."""

    def __init__(self, state: Mapping[str, Tensor], data: Set[str]) -> None:
        """`state`: parameters and buffers by name; `data`: fingerprints of what is in the batch."""
        self.entries: list[dict[str, Any]] = []
        self._origins: dict[int, str] = {}
        ranges = [(value.data_ptr(), value.numel() * value.element_size(), name) for name, value in state.items()]
        self._state = sorted((start, start + size, name) for start, size, name in ranges if start and size)
        self._data = data
        self._mode = each_operator(self._see)

    def begin(self) -> None:
        self._mode.__enter__()

    def end(self) -> None:
        self._mode.__exit__(None, None, None)

    def _see(self, operator: Any, args: Any, kwargs: Any) -> Any:
        line = _line()
        if line is None:  # of the engine's own
            return operator(*args, **kwargs)
        inputs = [self._input(tensor) for tensor in _plain((args, kwargs))]
        result = operator(*args, **kwargs)
        name, outputs = str(operator).rpartition(".")[0], list(_plain(result))
        is_empty = "empty" in name
        for tensor in outputs:
            self._origins[tensor.untyped_storage().data_ptr()] = _NOTHING if is_empty else OPERATOR
        self.entries.append(
            {
                "name": name,
                "line": line,
                "inputs": inputs,
                "others": _others(args, kwargs),
                "outputs": [] if is_empty else [fingerprint(tensor) for tensor in outputs],
                "random": torch.Tag.nondeterministic_seeded in operator.tags,
                "generator": any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())),
            }
        )
        return result

    def _input(self, tensor: Tensor) -> list[str]:
        """Where it comes from, and its fingerprint; memory that nothing was written to yet has none."""
        origin = self._name(tensor) or self._origins.get(tensor.untyped_storage().data_ptr(), OUTSIDE)
        if origin == _NOTHING:
            return [origin, ""]
        found = fingerprint(tensor)
        return [BATCH if origin == OUTSIDE and found in self._data else origin, found]

    def _name(self, tensor: Tensor) -> str | None:
        """Of the parameter or buffer that it is, or is a part of; many may share one memory."""
        address = tensor.data_ptr()
        at = bisect.bisect_right(self._state, address, key=lambda known: known[0]) - 1
        return self._state[at][2] if at >= 0 and address < self._state[at][1] else None


def _plain(tree: Any) -> Iterator[Tensor]:
    """Tensors with values of their own; not those of torch's subclasses, which call operators on plain ones."""
    if isinstance(tree, Tensor):
        if type(tree) in (Tensor, torch.nn.Parameter) and not tree.is_meta and tree.layout is torch.strided:
            yield tree
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _plain(value)
    elif isinstance(tree, dict):
        yield from _plain(list(tree.values()))


def _others(args: Any, kwargs: Any) -> str:
    """Numbers and words among the arguments."""

    def words(tree: Any) -> Iterator[str]:
        if isinstance(tree, bool | int | float | str):
            yield repr(tree)
        elif isinstance(tree, list | tuple):
            for value in tree:
                yield from words(value)
        elif isinstance(tree, dict):
            for value in tree.values():
                yield from words(value)

    return " ".join(words((args, kwargs)))[:200]


def _line() -> str | None:
    """Of the code that is neither torch's nor ours; None: the engine called it, as to put gradients into buckets."""
    frame: Any = sys._getframe(3)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _STEP:
            return BACKWARD
        if file.startswith(_OURS) and file != _SEEN_THROUGH:
            return None
        if not file.startswith((_TORCH, _OURS, "<")) and "/contextlib.py" not in file:
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None
