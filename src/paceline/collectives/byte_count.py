"""Bytes and messages, counted where they are handed to the wire: what moved, not what a formula says should have.

    comm.traffic                            since the group was built
    comm.traffic - before                   since a snapshot
    traffic.of("ring").sent                 {1: 83 messages with 41,943,040 bytes}: by peer, for one operation
    traffic.native                          {"all_gather": 1}: calls into the backend's own collectives

The communicator counts. What a backend's own collective moves can't be seen from outside: it is listed as a call with
no bytes, never computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Flow:
    """What went one way, to or from one peer or all of them."""

    bytes: int = 0
    messages: int = 0

    def __add__(self, other: Flow) -> Flow:
        return Flow(self.bytes + other.bytes, self.messages + other.messages)

    def __sub__(self, other: Flow) -> Flow:
        return Flow(self.bytes - other.bytes, self.messages - other.messages)


NOTHING = Flow()
Flows = Mapping[tuple[str, int], Flow]  # by (operation, peer)


@dataclass(frozen=True)
class Traffic:
    """One rank's traffic: a value, so that it can be kept, subtracted and told."""

    sent_by_operation: Flows = field(default_factory=dict)
    received_by_operation: Flows = field(default_factory=dict)
    native: Mapping[str, int] = field(default_factory=dict)

    @property
    def sent(self) -> dict[int, Flow]:
        """By peer."""
        return _by_peer(self.sent_by_operation)

    @property
    def received(self) -> dict[int, Flow]:
        return _by_peer(self.received_by_operation)

    @property
    def sent_bytes(self) -> int:
        return sum(flow.bytes for flow in self.sent_by_operation.values())

    @property
    def received_bytes(self) -> int:
        return sum(flow.bytes for flow in self.received_by_operation.values())

    @property
    def operations(self) -> frozenset[str]:
        return frozenset(name for flows in (self.sent_by_operation, self.received_by_operation) for name, _ in flows)

    def of(self, operation: str) -> Traffic:
        """The part of one operation."""

        def only(flows: Flows) -> Flows:
            return {key: flow for key, flow in flows.items() if key[0] == operation}

        calls = {operation: self.native[operation]} if operation in self.native else {}
        return Traffic(only(self.sent_by_operation), only(self.received_by_operation), calls)

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(
            _difference(self.sent_by_operation, before.sent_by_operation),
            _difference(self.received_by_operation, before.received_by_operation),
            dict(Counter(self.native) - Counter(before.native)),
        )


def _by_peer(flows: Flows) -> dict[int, Flow]:
    out: dict[int, Flow] = {}
    for (_, peer), flow in sorted(flows.items(), key=lambda entry: entry[0][1]):
        out[peer] = out.get(peer, NOTHING) + flow
    return out


def _difference(now: Flows, before: Flows) -> Flows:
    moved = {key: flow - before.get(key, NOTHING) for key, flow in now.items()}
    return {key: flow for key, flow in moved.items() if flow.messages}
