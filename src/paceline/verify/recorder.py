"""What a worker writes down for `paceline verify`: a line for the start, each item and each step, as JSON.

    start   what the job is, and its first weights
    item    of (step, lane, micro-batch): samples, random states after forward, loss, weight, the lane's own gradients
    entry   weights that are not what the last step left, by the script's own hands
    step    the summed gradient, learning rates, buffers and weights after it

Tensors are told by a fingerprint: 64 bits of a hash over dtype, shape and bytes. Where the sum's order is not promised
(`reduction="fast"`) weights are also told by a *sketch*, 16 sums over elements with random signs: the length of the
difference of two sketches is about that of the tensors.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.data.sharded_sampler import WorkItem
from paceline.verify.operators import OperatorTrace, fingerprint, leaves
from paceline.verify.request import Look, Request, operators_file, record_file, values_file

SKETCH = 16
BEHIND = 64  # steps that the loop may be behind what is fetched

Named = Mapping[str, Tensor]


def sketch(name: str, tensor: Tensor) -> list[float]:
    """Its norm, then sums over every 16th element with signs that depend on the name alone."""
    values = tensor.detach().to("cpu", torch.float64).reshape(-1)
    signs = torch.randint(0, 2, values.shape, generator=torch.Generator().manual_seed(int(_hash(name), 16) >> 1))
    signed = torch.nn.functional.pad(values * (2 * signs - 1), (0, -values.numel() % SKETCH))
    return [float(values.norm()), *signed.view(-1, SKETCH).sum(0).tolist()]


def local(tensor: Tensor) -> Tensor | None:
    """What this worker has of it; None where that is nothing at the moment."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    is_there = not tensor.is_meta and tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()
    return tensor.detach() if is_there else None


def random_states() -> dict[str, str]:
    """Of every library that the engine seeds."""
    states = {"torch": fingerprint(torch.default_generator.get_state()), "random": _hash(repr(random.getstate()))}
    if "numpy" in sys.modules:
        states["numpy"] = _hash(repr([str(part) for part in _numpy_state()]))
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = fingerprint(torch.cuda.get_rng_state())
    return states


def _numpy_state() -> Sequence[Any]:
    name, keys, *others = sys.modules["numpy"].random.get_state()
    return name, hashlib.blake2b(keys.tobytes(), digest_size=8).hexdigest(), *others


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Recorder:
    """Of one worker, for the life of its engine."""

    made = 0  # steps, in this process

    def __init__(
        self,
        request: Request,
        about: Mapping[str, Any],
        state: Callable[[], dict[str, Tensor]],
        full: Callable[[Tensor], Tensor],
    ) -> None:
        """`state`: parameters and buffers by name, as they are here; `full` is called by all workers in order."""
        self._request, self._state, self._full = request, state, full
        self._about, self._in_bits = about, about["reduction"] != "fast"
        self._file = (request.folder / record_file(about["worker"])).open("a", encoding="utf-8")
        self._data: dict[tuple[int, ...], dict[str, str]] = {}
        self._item: dict[str, Any] = {}
        self._gradients: dict[str, str] = {}
        self._hooked: set[int] = set()
        self._after: dict[str, str] = {}
        self._trace: OperatorTrace | None = None
        self._kept: dict[str, Tensor] = {}
        self._reduced: dict[str, str] | None = None
        self.steps = Recorder.made  # a second engine of the script goes on counting

    @property
    def is_done(self) -> bool:
        last = self._request.steps if self._request.look is None else self._request.look.step
        return self.steps >= last

    @property
    def _look(self) -> Look | None:
        """Of the step that is under way."""
        look = self._request.look
        return look if look is not None and look.step == self.steps + 1 else None

    # -- data --------------------------------------------------------------------------------------------------------

    def fetched(self, pairs: Iterator[tuple[WorkItem, Any]]) -> Iterator[tuple[WorkItem, Any]]:
        """The same pairs; perhaps in the thread that fetches ahead."""
        for item, batch in pairs:
            for old in [key for key in self._data if key[:2] < (item.epoch, item.step - BEHIND)]:
                self._data.pop(old, None)
            self._data[_key(item)] = {path: fingerprint(leaf) for path, leaf in leaves(batch)}
            yield item, batch

    # -- a step, in its order ----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Before anything of the step: which weights are not what the last step left?"""
        found = self._fingerprints()
        if not self._after:
            weights = {name: fingerprint(self._full(value)) for name, value in self._state().items()}
            self._write("start", **self._about, weights=weights)
        changed = {name: value for name, value in found.items() if self._after.get(name, value) != value}
        if changed:
            self._write("entry", step=self.steps + 1, changed=changed)
        if self._look is not None:
            self._keep("entry", self._state(), local)
            self._write_kept()  # the step may be refused

    def begin_item(self, item: WorkItem, update: int) -> None:
        self.leave_item()
        if item.shadow:
            return
        self._hook_gradients()
        self._gradients = {}
        data = self._data.get(_key(item), {})  # kept: several updates of a step have the same items
        self._item = {
            "step": self.steps + 1,
            "place": [item.lane, item.micro_batch, update],
            "epoch": item.epoch,
            "ids": list(item.sample_ids),
            "data": data,
        }
        if (look := self._look) is not None and look.item == (item.lane, item.micro_batch, update):
            parts = {name: local(value) for name, value in self._state().items()}
            here = {name: part for name, part in parts.items() if part is not None}
            self._trace = OperatorTrace(here, set(data.values()))
            self._trace.begin()

    def forward_done(self, loss: Tensor, weight: float) -> None:
        if self._item and "loss" not in self._item:
            self._item |= {"random": random_states(), "loss": float(loss.detach()).hex(), "weight": float(weight)}

    def leave_item(self) -> None:
        """Its backward is done, or the body left it."""
        if self._trace is not None:
            self._trace.end()
            lane, micro_batch, update = self._item["place"]
            file = self._request.folder / operators_file((lane, micro_batch, update))
            file.write_text(json.dumps(self._trace.entries))
            self._trace = None
        if self._item:
            self._write("item", **self._item, gradients=self._gradients)
            self._item = {}

    def collected(self, parameters: Named) -> None:
        """The step's gradient is there: under ddp and star on every worker, otherwise nowhere whole."""
        whole = {name: p.grad for name, p in parameters.items() if type(p.grad) is Tensor}
        self._reduced = {name: fingerprint(gradient) for name, gradient in whole.items()} or None
        if self._look is not None:
            self._keep("gradient", whole, local)

    def end_step(self, rates: Sequence[float], *, update: int, empty: bool) -> None:
        """Right after the update, before the script does anything else."""
        self.leave_item()
        state = self._state()
        full = {name: self._full(value) for name, value in state.items()}
        kinds = {name: "weights" if isinstance(value, Parameter) else "buffers" for name, value in state.items()}
        after: dict[str, dict[str, str]] = {"weights": {}, "buffers": {}}
        for name, value in full.items():
            after[kinds[name]][name] = fingerprint(value)
        sketches = {} if self._in_bits else {name: sketch(name, value) for name, value in full.items()}
        if self._look is not None:
            for kind in after:
                self._keep(kind, {name: full[name] for name in after[kind]}, local)
            self._write_kept()
        self.steps = Recorder.made = self.steps + 1
        self._write(
            "step", step=self.steps, update=update, empty=empty, rates=list(rates), gradients=self._reduced,
            sketches=sketches, **after,
        )  # fmt: skip
        self._after, self._reduced = self._fingerprints(), None

    def close(self) -> None:
        if self._trace is not None:
            self._trace.end()
            self._trace = None
        self._file.close()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _fingerprints(self) -> dict[str, str]:
        """Of what this worker has."""
        parts = {name: local(value) for name, value in self._state().items() if isinstance(value, Parameter)}
        return {name: fingerprint(part) for name, part in parts.items() if part is not None}

    def _hook_gradients(self) -> None:
        """A lane's own gradients, before any sum; under fsdp parameters in forward are others than the model's."""
        for name, parameter in self._state().items():
            if type(parameter) is Parameter and parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                parameter.register_hook(partial(self._note_gradient, name))  # type: ignore[no-untyped-call]

    def _note_gradient(self, name: str, gradient: Tensor) -> None:
        found = fingerprint(gradient)
        self._gradients[name] = found if name not in self._gradients else _hash(self._gradients[name] + found)

    def _keep(self, kind: str, tensors: Named, value_of: Callable[[Tensor], Tensor | None]) -> None:
        assert self._request.look is not None
        for wanted, name in self._request.look.tensors:
            if wanted == kind and name in tensors and (value := value_of(tensors[name])) is not None:
                self._kept[f"{kind} {name}"] = value.to("cpu", copy=True).contiguous()

    def _write_kept(self) -> None:
        from safetensors.torch import save_file

        save_file(self._kept, self._request.folder / values_file(self._about["worker"]))

    def _write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")
        self._file.flush()


def _key(item: WorkItem) -> tuple[int, ...]:
    return item.epoch, item.step, item.lane, item.micro_batch
