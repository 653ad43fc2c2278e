"""Whole jobs around `ServerCore` without processes: messages wait in channels until a test delivers them.

    job = Job(model(), sgd, clock, holders=((0, 1), (2,)), servers=2)
    job.say_round(0)                     every worker's OPEN, PUSH… and CLOSE of a round are in its channels
    job.deliver_all(choose)              `choose` says from which channel the next message comes
    job.weights(worker)                  what the last pull brought

A gradient depends on the round, the lane and the weights it is computed from, so a wrong read shows in the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.collectives.canonical_sum import SumPlan
from paceline.optim.gradient_norm import clip_coefficient, global_norm
from paceline.optim.group_settings import GroupSettings
from paceline.parameter_server.clock import Clock
from paceline.parameter_server.key_ranges import Key, KeyTable, plan_keys
from paceline.parameter_server.server_core import Reply, ServerCore
from paceline.parameter_server.server_key import ServerKey, hold_keys
from paceline.parameter_server.wire import ALL, Close, Header, Kind, Protocol, lanes_payload
from paceline.sharding.bucket import GradientSpec, plan_buckets
from paceline.sharding.flat_layout import BLOCK, FlatLayout
from tests.collectives.one_process import one_process_sum, roots_of

Make = Callable[[Sequence[Tensor]], Optimizer]
Gradients = list[Tensor | None]
Choose = Callable[[int], int]
Message = tuple[Header, Tensor | None]


def model(seed: int = 0) -> list[Tensor]:
    """A weight of two blocks, a bias, a scalar, and a parameter that is not always used."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in [(2, BLOCK - 1000), (70,), (), (9, 3)]]


def adamw(parameters: Sequence[Tensor]) -> Optimizer:
    decayed = {"params": parameters[:1], "weight_decay": 0.1}
    return torch.optim.AdamW([decayed, {"params": parameters[1:]}], lr=0.05)


def sgd(parameters: Sequence[Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


@dataclass
class Setup:
    """One round of a job, as the loop sees it."""

    present: tuple[int, ...]
    weights: Mapping[int, float]
    max_norm: float | None = None
    skip: bool = False
    learning_rate: float = 0.05
    unused: frozenset[tuple[int, int]] = frozenset()  # (lane, parameter)

    @property
    def samples(self) -> float:
        return 4.0 * len(self.present)


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether two models have the same bits."""
    return all(torch.equal(_bytes(mine), _bytes(theirs)) for mine, theirs in zip(one, other, strict=True))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def plain(present: Sequence[int], **options: Any) -> Setup:
    return Setup(tuple(present), dict.fromkeys(present, 4.0), **options)


def gradients_of(round: int, lane: int, weights: Sequence[Tensor], setup: Setup) -> Gradients:
    found: Gradients = []
    for place, weight in enumerate(weights):
        generator = torch.Generator().manual_seed(round * 1009 + lane * 31 + place)
        noise = torch.randn(weight.shape, generator=generator) * 2.0 ** (lane % 5 * 4)
        part = setup.weights[lane] / setup.samples
        value = (noise + weight.float() * 0.5) * part
        found.append(None if (lane, place) in setup.unused else value)
    return found


class Job:
    """Workers, servers and channels; `holders` are the lanes of each worker."""

    def __init__(
        self,
        start: Sequence[Tensor],
        make: Make,
        clock: Clock,
        *,
        holders: Sequence[Sequence[int]],
        lanes: int | None = None,
        servers: int = 1,
        key_bytes: int = 4 * BLOCK,
        look_ahead: bool = False,
        **options: Any,
    ) -> None:
        self.holders = [tuple(held) for held in holders]
        self.clock, self.workers = clock, len(holders)
        self.lanes = lanes or sum(map(len, self.holders))
        self.table = table_of(start, servers, key_bytes)
        self.protocol = Protocol(self.table, self.workers, self.lanes)
        self.cores: list[ServerCore] = []
        self.held: list[dict[int, ServerKey]] = []
        for server in range(servers):
            parameters = [Parameter(tensor.clone()) for tensor in start]
            optimizer = make(parameters)
            settings = GroupSettings([optimizer])
            aggregates = options.get("mode") == "aggregate"
            keys = () if aggregates else self.table.of_server(server)
            held = hold_keys(keys, parameters, [optimizer], settings, look_ahead=look_ahead)
            self.held.append(held)
            self.cores.append(ServerCore(self.protocol, server, held, settings, clock, **options))
        self.optimizer = make([Parameter(tensor.clone()) for tensor in start])
        self.settings = GroupSettings([self.optimizer])
        self.read = [[tensor.clone() for tensor in start] for _ in range(self.workers)]
        self.came: list[list[Reply]] = [[] for _ in range(self.workers)]
        self.channels: dict[tuple[int, int], deque[Message]] = {
            (sender, server): deque() for sender in range(self.workers + servers) for server in range(servers)
        }
        self.versions = [dict.fromkeys(range(len(self.table.keys)), 0) for _ in range(self.workers)]

    # -- saying ------------------------------------------------------------------------------------------------------

    def header(self, kind: Kind, worker: int, **fields: Any) -> Header:
        return Header(kind, worker, self.table.digest, **fields)

    def say(self, worker: int, server: int, header: Header, payload: Tensor | None = None) -> None:
        header = header if payload is None else header.holding(payload)
        empty = payload is None or payload.numel() == 0
        self.channels[worker, server].append((header, None if empty else payload))

    def say_everywhere(self, worker: int, header: Header, payload: Tensor | None = None) -> None:
        for server in range(len(self.cores)):
            self.say(worker, server, header, payload)

    def say_round(self, round: int, setup: Setup) -> None:
        """Every worker computes its lanes from what it read last, and says it all."""
        holders = tuple(tuple(lane for lane in held if lane in setup.present) for held in self.holders)
        plan = SumPlan(setup.present, holders)
        for worker in range(self.workers):
            self.say_everywhere(worker, self.header(Kind.OPEN, worker, round=round), lanes_payload(holders[worker]))
            lanes = {lane: gradients_of(round, lane, self.read[worker], setup) for lane in holders[worker]}
            self.say_pushes(worker, round, plan, lanes)
            self.say_close(worker, round, holders[worker], setup)

    def say_pushes(self, worker: int, round: int, plan: SumPlan, lanes: Mapping[int, Gradients]) -> None:
        used = [any(g[place] is not None for g in lanes.values()) for place in range(len(self.read[worker]))]
        for key in self.table.keys:
            values = {lane: slice_of(key, gradients, self.read[worker]) for lane, gradients in lanes.items()}
            flags = sum(1 << place for place, piece in enumerate(key.pieces) if used[piece.parameter])
            for lane, root in roots_of(plan, worker, values).items():
                header = self.header(
                    Kind.PUSH, worker, round=round, lane=lane, key=key.number, flags=flags,
                    version=self.versions[worker][key.number],
                )  # fmt: skip
                self.say(worker, key.server, header, root)

    def say_close(self, worker: int, round: int, lanes: Sequence[int], setup: Setup) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = setup.learning_rate
        weights = tuple((lane, setup.weights[lane]) for lane in lanes)
        settings = tuple(self.settings.read())
        close = Close(weights, setup.samples, setup.max_norm, setup.skip, settings)
        self.say_everywhere(worker, self.header(Kind.CLOSE, worker, round=round), close.packed())

    def say_pulls(self, round: int, complete: int) -> None:
        for worker in range(self.workers):
            header = self.header(Kind.PULL, worker, round=round, complete=complete, key=ALL)
            self.say_everywhere(worker, header)

    # -- delivering --------------------------------------------------------------------------------------------------

    def deliver(self, sender: int, server: int) -> list[Reply]:
        header, payload = self.channels[sender, server].popleft()
        return self.take(self.cores[server].handle(header, payload), server)

    def take(self, replies: Iterator[Reply], server: int) -> list[Reply]:
        """Carry replies to where they go; those to other servers wait in channels."""
        taken = list(replies)
        for reply in taken:
            if reply.to >= self.workers:
                channel = self.channels[self.workers + server, reply.to - self.workers]
                channel.append((reply.header, reply.payload))
            else:
                # The payload may be the live weights: a worker keeps what it reads, not what they become.
                payload = None if reply.payload is None else reply.payload.clone()
                self.came[reply.to].append(Reply(reply.to, reply.header, payload))
        return taken

    def deliver_all(self, choose: Choose = lambda _: 0) -> None:
        while ready := [place for place, waiting in self.channels.items() if waiting]:
            self.deliver(*ready[choose(len(ready))])

    # -- reading -----------------------------------------------------------------------------------------------------

    def read_pulled(self, worker: int, round: int) -> list[Tensor]:
        """The weights that came for `round`, all keys of them."""
        flats = {r.header.key: r for r in self.came[worker] if (r.header.kind, r.header.round) == (Kind.WEIGHTS, round)}
        assert sorted(flats) == list(range(len(self.table.keys))), f"worker {worker} got keys {sorted(flats)}"
        self.versions[worker] = {key: reply.header.version for key, reply in flats.items()}
        self.read[worker] = assembled(self.table, {key: reply.payload for key, reply in flats.items()}, self.read[0])
        return self.read[worker]

    def on_servers(self) -> list[Tensor]:
        """The weights as the servers hold them."""
        flats = {number: held.weights for server in self.held for number, held in server.items()}
        return assembled(self.table, flats, self.read[0])


def table_of(parameters: Sequence[Tensor], servers: int, key_bytes: int) -> KeyTable:
    specs = [GradientSpec(tuple(p.shape), p.dtype, p.device) for p in parameters]
    buckets = plan_buckets(specs, list(reversed(range(len(specs)))), 1 << 20, aligned=False)
    layout = FlatLayout.of((f"p{place}", p) for place, p in enumerate(parameters))
    return plan_keys(layout, buckets, servers=servers, key_bytes=key_bytes)


def slice_of(key: Key, gradients: Gradients, like: Sequence[Tensor]) -> Tensor:
    """A lane's gradient of a key; a parameter that it did not use counts as +0.0."""
    full = [torch.zeros(w.shape) if g is None else g for g, w in zip(gradients, like, strict=True)]
    return key.gathered(full).to(key.sum_dtype)


def assembled(table: KeyTable, flats: Mapping[int, Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    out = [torch.full_like(tensor, float("nan")) for tensor in like]
    for key in table.keys:
        flat = flats[key.number]
        assert flat is not None
        for piece, view in zip(key.pieces, key.views(flat), strict=True):
            out[piece.parameter].view(-1)[piece.start : piece.stop] = view
    return out


def one_process(
    start: Sequence[Tensor], make: Make, clock: Clock, setups: Sequence[Setup]
) -> Iterator[tuple[list[Tensor], Optimizer]]:
    """The same training as a plain loop: the user's optimizer on whole parameters and summed gradients, per round."""
    parameters = [Parameter(tensor.clone()) for tensor in start]
    optimizer = make(parameters)
    history = [[tensor.clone() for tensor in start]]
    for round, setup in enumerate(setups):
        read = history[clock.needs(round) + 1]
        lanes = {lane: gradients_of(round, lane, read, setup) for lane in setup.present}
        total = sum(setup.weights[lane] for lane in setup.present)
        for place, parameter in enumerate(parameters):
            values = {lane: zeros_for(g[place], parameter) for lane, g in lanes.items()}
            summed = one_process_sum(values)
            if total and setup.samples / total != 1.0:
                summed = summed * (setup.samples / total)
            used = any(g[place] is not None for g in lanes.values())
            parameter.grad = summed.to(parameter.dtype) if used else None
        if not setup.skip and total:
            if setup.max_norm is not None:
                clip([p.grad for p in parameters if p.grad is not None], setup.max_norm)
            for group in optimizer.param_groups:
                group["lr"] = setup.learning_rate
            optimizer.step()
        history.append([p.detach().clone() for p in parameters])
        yield history[-1], optimizer


def zeros_for(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros(parameter.shape) if gradient is None else gradient


def clip(gradients: list[Tensor], max_norm: float) -> None:
    norm = float(global_norm(gradients))
    if norm > max_norm or norm != norm:
        for gradient in gradients:
            gradient.mul_(clip_coefficient(norm, max_norm))


# -- single messages to the first server -------------------------------------------------------------------------------


def open_of(job: Job, worker: int, round: int, lanes: Sequence[int], **fields: Any) -> Message:
    payload = lanes_payload(lanes)
    return job.header(Kind.OPEN, worker, round=round, **fields).holding(payload), payload if lanes else None


def push_of(job: Job, worker: int, round: int, lane: int, key: int = 0, **fields: Any) -> Message:
    """A gradient of whole numbers: a sum of such is exact in any order."""
    payload = whole_numbers(job.table.keys[key].elements, round, lane)
    used = (1 << len(job.table.keys[key].pieces)) - 1
    header = job.header(Kind.PUSH, worker, round=round, lane=lane, key=key, **{"flags": used, **fields})
    return header.holding(payload), payload


def whole_numbers(elements: int, round: int, lane: int) -> Tensor:
    return torch.randint(-50, 50, (elements,), generator=torch.Generator().manual_seed(round * 100 + lane)).float()


def tell(job: Job, message: Message) -> list[Reply]:
    return job.take(job.cores[0].handle(*message), 0)


def ask(job: Job, kind: Kind, worker: int, **fields: Any) -> list[Reply]:
    return tell(job, (job.header(kind, worker, **fields), None))


def goodbye(job: Job, worker: int) -> list[Reply]:
    return job.take(job.cores[0].worker_left(worker, said_goodbye=True), 0)


def two_workers(clock: Clock, **options: Any) -> Job:
    """Three weights, one lane each."""
    return Job([torch.zeros(3)], sgd, clock, holders=[[0], [1]], **options)


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """Lanes scattered over workers in any way."""
    lanes, workers = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    holders: list[list[int]] = [[] for _ in range(workers)]
    for lane in range(lanes):
        holders[draw(st.integers(0, workers - 1))].append(lane)
    return lanes, holders
