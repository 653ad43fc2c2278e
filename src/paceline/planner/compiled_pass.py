"""A pass as torch.compile runs it: torch cuts a block into forward and backward, here its operators become kernels.

    torch    decomposes the block, and decides what forward saves and what backward makes again (its min-cut)
    here     each of the two graphs becomes kernels:
                 products, convolutions, attention      as they are, a kernel each
                 elementwise and reductions between     fused: what a kernel needs is read once, and what others need
                                                        of it is written once

    mm ─► cast ─► mul ─► sum over a row ─► mul ─► mm        one kernel between the two products
                    └──► sum over all rows                  another one: its loop has another order

What needs a sum over all rows waits until all are read, so a kernel ends there. Elementwise results that several
kernels need are made again in each, as inductor makes them. Nothing here is measured, and nothing knows a model: bytes
are those of the graphs, rates those of the hardware.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from paceline.errors import ConfigError
from paceline.planner.model_profile import PassRecorder, explained, recording, tensors_in, touched
from paceline.torch_compat import partitioned, pytree, without_modes

_REDUCTIONS = frozenset(
    {"sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "any", "all", "var", "var_mean", "std"}
)
_LOOKED_UP = frozenset({"gather", "index", "index_select", "embedding"})
"""They read of their first argument what they return."""
_ELEMENTWISE = _LOOKED_UP | {
    "convert_element_type", "_to_copy", "clone", "copy", "cat", "where", "masked_fill", "constant_pad_nd", "full",
    "full_like", "empty", "scalar_tensor", "iota", "arange", "slice_scatter", "select_scatter", "rand", "rand_like",
    "randn", "inductor_random", "inductor_seed", "inductor_seeds", "inductor_lookup_seed",
}  # fmt: skip
"""Though torch does not tag them so: every element is made from a few others."""
SMALL = 2**16
"""Elements of what many kernels read that have nothing else in common, such as a norm's weights."""


# -- a graph as kernels ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """Of fused operators: `made` is written, `read` comes from other kernels or is an input."""

    made: tuple[fx.Node, ...]
    read: tuple[fx.Node, ...]
    moved_bytes: int


Step = fx.Node | Kernel  # an operator as it is, or a kernel
Sources = Mapping[tuple[fx.Node, fx.Node], int]  # bytes that are read, by (what is in memory, what looks at it)


def steps_of(graph: fx.Graph) -> list[Step]:
    """In an order in which they can run."""
    return _Fusion(graph).steps()


class _Fusion:
    """Which nodes are fused, which of these are written, and which are written by one kernel."""

    def __init__(self, graph: fx.Graph) -> None:
        self._nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
        self._place = {node: place for place, node in enumerate(graph.nodes)}
        self._fused = {node for node in self._nodes if _is_fused(node)}
        for node in self._nodes:  # what looks at something fused is no memory of its own
            if _is_look(node) and node.all_input_nodes[0] in self._fused:
                self._fused.add(node)
        self._stage: dict[fx.Node, int] = {}
        for node in graph.nodes:
            self._stage[node] = max((self._stage_after(one, node) for one in node.all_input_nodes), default=0)
        self._written = {node for node in self._fused if self._is_written(node)}

    def _stage_after(self, node: fx.Node, user: fx.Node) -> int:
        """Kernels of one stage need nothing of each other, but for those that sum over rows, which come last in it."""
        leaves = node in self._fused and user not in self._fused
        return self._stage[node] + (leaves or _sums_over_rows(node))

    def _is_written(self, node: fx.Node) -> bool:
        if _is_reduction(node):
            return not _is_tuple(node)  # otherwise its parts are
        if _is_look(node):
            return node.target is operator.getitem
        return self._is_needed(node)

    def _is_needed(self, node: fx.Node) -> bool:
        """In memory, by what isn't fused."""
        return any(
            self._is_needed(user) if _is_look(user) and user in self._fused else user not in self._fused
            for user in node.users
        )

    def _sources(self, made: fx.Node) -> Sources:
        """What a kernel has to read that makes this node: all that it comes from and that is in memory.

        Of what is only looked at in part, as the logits of the labels are, no more elements than are looked at.
        """
        found: dict[tuple[fx.Node, fx.Node], int] = defaultdict(int)
        waiting: list[tuple[fx.Node, float]] = [(made, math.inf)]
        most_of: dict[fx.Node, float] = {}
        while waiting:
            node, most = waiting.pop()
            for place, one in enumerate(node.all_input_nodes):
                in_part = _is_look(node) or (place == 0 and _name(node) in _LOOKED_UP)
                limit = min(most, _elements(node)) if in_part else most
                if one in self._written or one not in self._fused:
                    key = _memory_of(one), node if in_part else one
                    found[key] = max(found[key], int(min(1.0, limit / max(1, _elements(one))) * _bytes(one)))
                elif limit > most_of.get(one, -1):
                    most_of[one] = limit
                    waiting.append((one, limit))
        return found

    def _kernels(self) -> list[Kernel]:
        """Nodes of one stage and one order of the loop are one kernel if they read the same, or each other."""
        sources = {node: self._sources(node) for node in self._written}
        groups: dict[Any, list[tuple[set[fx.Node], set[fx.Node]]]] = defaultdict(list)  # what is made, what touched
        for node in sorted(self._written, key=self._place.__getitem__):
            kind = self._stage[node], _sums_over_rows(node)
            read = {memory for memory, _ in sources[node]}
            beside = {one for one in read if one in self._written and self._stage[one] == self._stage[node]}
            made, near = {node}, {node, *beside, *filter(_is_large, read)}
            for group in [group for group in groups[kind] if group[1] & near]:
                groups[kind].remove(group)
                made, near = made | group[0], near | group[1]
            groups[kind].append((made, near))
        return [self._kernel(made, sources) for of_kind in groups.values() for made, _ in of_kind]

    def _kernel(self, made: set[fx.Node], sources: Mapping[fx.Node, Sources]) -> Kernel:
        looks: dict[tuple[fx.Node, fx.Node], int] = {}
        for node in made:
            looks |= sources[node]
        read: dict[fx.Node, int] = defaultdict(int)
        for (memory, _), size in looks.items():
            if memory not in made:
                read[memory] = min(_bytes(memory), read[memory] + size)
        elsewhere = {memory for node, of in sources.items() if node not in made for memory, _ in of}
        written = {node for node in made if node in elsewhere or self._is_needed(node)}
        order = self._place.__getitem__
        moved = sum(read.values()) + sum(map(_bytes, written))
        return Kernel(tuple(sorted(written, key=order)), tuple(sorted(read, key=order)), moved)

    def steps(self) -> list[Step]:
        looks = [node for node in self._nodes if node in self._fused - self._written and _is_look(node)]
        alone = [node for node in self._nodes if node not in self._fused]
        steps: list[Step] = [*self._kernels(), *alone, *filter(self._is_needed, looks)]
        maker = {node: place for place, step in enumerate(steps) for node in made_by(step)}
        needs = [{maker[node] for node in read_by(step) if node in maker} for step in steps]
        stands = [max((self._place[node] for node in made_by(step)), default=0) for step in steps]
        return [steps[place] for place in _in_order(needs, stands)]


def made_by(step: Step) -> Sequence[fx.Node]:
    return step.made if isinstance(step, Kernel) else (step,)


def read_by(step: Step) -> Sequence[fx.Node]:
    return step.read if isinstance(step, Kernel) else step.all_input_nodes


def _in_order(needs: Sequence[set[int]], stands: Sequence[int]) -> Iterator[int]:
    """After what they need, otherwise as they stand in the graph."""
    missing = [len(needed) for needed in needs]
    users: dict[int, list[int]] = defaultdict(list)
    for step, needed in enumerate(needs):
        for one in needed:
            users[one].append(step)
    ready = [(stands[step], step) for step, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    while ready:
        _, step = heapq.heappop(ready)
        yield step
        for user in users[step]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (stands[user], user))
    assert not any(missing), "kernels wait for each other"


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return "" if packet is None else str(packet.__name__)


def _is_look(node: fx.Node) -> bool:
    """At memory of another node, or at one of its results."""
    return node.target is operator.getitem or bool(getattr(node.target, "is_view", False))


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def _is_reduction(node: fx.Node) -> bool:
    return _name(node) in _REDUCTIONS


def _is_fused(node: fx.Node) -> bool:
    if node.op != "call_function" or _is_look(node):
        return False
    if _name(node) == "scatter" and _name(node.all_input_nodes[0]) == "full":
        return True  # into a constant: inductor makes every element by comparing its place with the index
    is_tagged = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return is_tagged or _is_reduction(node) or _name(node) in _ELEMENTWISE


def _sums_over_rows(node: fx.Node) -> bool:
    """A reduction over more than the last dimensions: all rows have to be read before anything of it is known."""
    if node.target is operator.getitem:
        return _sums_over_rows(node.all_input_nodes[0])
    if not _is_reduction(node):
        return False
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    whole = node.all_input_nodes[0].meta["val"].dim()
    if isinstance(dim, int):
        dim = [dim]
    if not isinstance(dim, list | tuple) or not dim:
        return True  # over all dimensions
    reduced = sorted(one % whole for one in dim if isinstance(one, int))
    return len(reduced) == whole or reduced != list(range(whole - len(reduced), whole))


def _memory_of(node: fx.Node) -> fx.Node:
    """What it looks at, or it."""
    while _is_look(node) and not _is_tuple(node.all_input_nodes[0]):
        node = node.all_input_nodes[0]
    return node


def _bytes(node: fx.Node) -> int:
    return sum(map(touched, tensors_in(node.meta.get("val"))))


def _elements(node: fx.Node) -> int:
    return sum(tensor.numel() for tensor in tensors_in(node.meta.get("val")))


def _is_large(node: fx.Node) -> bool:
    return _elements(node) > SMALL


# -- running it on fake tensors ----------------------------------------------------------------------------------------


class FusedGraph:
    """In place of a compiled graph: takes memory, and tells the recorder its work, as the kernels would."""

    _boxed_call = True  # it takes a list of inputs, and empties it: what was saved is freed as it is used

    def __init__(self, graph: fx.GraphModule) -> None:
        nodes = list(graph.graph.nodes)
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        self._constants = {node: getattr(graph, str(node.target)) for node in nodes if node.op == "get_attr"}
        (self._outputs,) = (node.args[0] for node in nodes if node.op == "output")
        self._steps = steps_of(graph.graph)
        last = dict.fromkeys(self._inputs, 0)
        for place, step in enumerate(self._steps):
            last |= dict.fromkeys((*made_by(step), *read_by(step)), place)
        returned = set(filter(None, self._outputs))
        self._done: dict[int, list[fx.Node]] = defaultdict(list)  # by step: what nothing needs afterwards
        for node, place in last.items():
            if node not in returned:
                self._done[place].append(node)

    def __call__(self, given: list[Any]) -> list[Any]:
        recorder = recording()
        values: dict[fx.Node, Any] = dict(zip(self._inputs, given, strict=True)) | self._constants
        given.clear()
        for place, step in enumerate(self._steps):
            if isinstance(step, Kernel):
                _run(step, values, self._done[place], recorder)
            else:
                values[step] = _called(step, values)
            for node in self._done[place]:
                values.pop(node, None)
        return [None if node is None else values[node] for node in self._outputs]


def _called(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _run(kernel: Kernel, values: dict[fx.Node, Any], done: Sequence[fx.Node], recorder: PassRecorder | None) -> None:
    with recorder.paused() if recorder else nullcontext():
        made = [_new(node.meta["val"]) for node in kernel.made]
    if recorder is not None:
        recorder.kernel([values[node] for node in kernel.read], kernel.moved_bytes)
    sizes = [tensor.untyped_storage().nbytes() for tensor in made]
    for node in done:  # a result is written over an input of its size that nothing needs afterwards: inductor does it
        size = values[node].untyped_storage().nbytes() if isinstance(values.get(node), Tensor) else -1
        if size in sizes:
            sizes.remove(size)
            del values[node]
    if recorder is not None:
        recorder.appeared(made)
    values |= dict(zip(kernel.made, made, strict=True))


def _new(like: Tensor) -> Tensor:
    return like.new_empty_strided(like.shape, like.stride())


# -- a model -----------------------------------------------------------------------------------------------------------

Known = dict[Any, Callable[..., Any]]  # what torch has cut, by what is cut alike


@contextmanager
def compiling(blocks: Iterable[nn.Module], models: Iterable[nn.Module]) -> Iterator[None]:
    """These blocks run as under Engine(compile=True), and so does the loss function of a model of transformers."""
    known: Known = {}
    blocks = list(blocks)
    own = [block.__dict__.get("forward") for block in blocks]
    losses: list[tuple[nn.Module, Any]] = [
        (model, model.loss_function) for model in models if callable(getattr(model, "loss_function", None))
    ]
    try:
        for block in blocks:
            block.forward = partial(_compiled, known, block, block.forward)
        for model, loss in losses:
            model.loss_function = partial(_compiled, known, None, loss)  # type: ignore[assignment]
        yield
    finally:
        for block, before in zip(blocks, own, strict=True):
            if before is None:
                block.__dict__.pop("forward", None)
            else:
                block.forward = before
        for model, loss in losses:
            model.loss_function = loss


def _compiled(known: Known, block: nn.Module | None, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    held = {} if block is None else {**dict(block.named_parameters()), **dict(block.named_buffers())}
    leaves, layout = pytree.tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [*held.values(), *(leaves[place] for place in places)]
    others = [repr(leaf) if isinstance(leaf, int | float | str) else type(leaf) for leaf in leaves]
    alike = type(block), getattr(forward, "__func__", forward), repr(layout), *others, *(
        (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad) for tensor in tensors
    )  # fmt: skip
    if alike not in known:

        def run(*tensors: Tensor) -> Any:
            own, inside = tensors[: len(held)], list(leaves)
            for place, tensor in zip(places, tensors[len(held) :], strict=True):
                inside[place] = tensor
            args, kwargs = pytree.tree_unflatten(inside, layout)
            if block is None:
                return forward(*args, **kwargs)
            with _own_forward(block, forward):
                return torch.func.functional_call(block, dict(zip(held, own, strict=True)), args, kwargs)

        known[alike] = _cut(run, tensors, "the loss" if block is None else type(block).__name__)
    return known[alike](*tensors)


def _cut(run: Callable[..., Any], tensors: Sequence[Tensor], what: str) -> Callable[..., Any]:
    """torch traces in the first call, of which nothing belongs to the pass; checkpoints would count what it saves."""
    made, recorder = partitioned(run, FusedGraph), recording()
    try:
        with recorder.paused() if recorder else nullcontext(), without_modes(), saved_tensors_hooks(_same, _same):
            made(*tensors)
    except Exception as error:  # whatever torch's tracing raises at code that it can't take
        raise ConfigError(f"--compile: {what} {explained(error)}; leave --compile out") from error
    return made


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def _own_forward(block: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    compiled, block.forward = block.forward, forward
    try:
        yield
    finally:
        block.forward = compiled
