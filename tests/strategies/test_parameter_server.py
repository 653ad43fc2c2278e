"""The parameter server: the bits of ddp when it is synchronous, one hash for each delay, on any number of workers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.parameter_server.clock import parse_clock
from paceline.strategies.server import ParameterServer
from tests.bits.programs import PROGRAMS
from tests.workers import hashes, run_workers

pytestmark = pytest.mark.workers


@cache
def hash_of_ddp(program: str, lanes: int, accumulate: int = 1) -> str:
    (found,) = hashes(run_workers(PROGRAMS[program], 1, strategy="ddp", lanes=lanes, accumulate=accumulate))
    return found


def hash_of(
    program: str,
    workers: int,
    servers: int,
    *,
    clock: str = "s=0",
    mode: Any = "update",
    devices: tuple[str, ...] = ("cpu",),
    **job: Any,
) -> str:
    strategy = ParameterServer(clock=parse_clock(clock), mode=mode, server_devices=devices)
    results = run_workers(PROGRAMS[program], workers, servers=servers, strategy=strategy, **job)
    (found,) = hashes(results)
    return found


# program, workers, servers, clock, mode, backend, lanes: every pair of the last six appears in some row.
SYNCHRONOUS = [
    ("gpt", 2, 1, "s=0", "update", "gloo", 4), ("clipped", 2, 3, "s=0", "update", "paceline", 5),
    ("clipped", 4, 3, "s=0", "update", "gloo", 4), ("gan", 2, 1, "s=0", "update", "paceline", 5),
    ("convnet", 4, 1, "d=0", "aggregate", "paceline", 5), ("odd_parameters", 1, 1, "s=0", "update", "paceline", 4),
    ("short_last_step", 4, 1, "s=0", "aggregate", "gloo", 4), ("scheduled", 1, 3, "d=0", "update", "gloo", 5),
    ("gan", 2, 3, "s=0", "aggregate", "gloo", 4), ("clipped", 1, 0, "s=0", "aggregate", "gloo", 5),
    ("odd_parameters", 4, 0, "d=0", "update", "gloo", 5), ("gpt", 2, 0, "s=0", "aggregate", "paceline", 4),
]  # fmt: skip


@pytest.mark.parametrize(("program", "workers", "servers", "clock", "mode", "backend", "lanes"), SYNCHRONOUS)
def test_synchronous_servers_give_the_bits_of_ddp_and_of_one_process(
    program: str, workers: int, servers: int, clock: str, mode: str, backend: str, lanes: int
) -> None:
    found = hash_of(program, workers, servers, clock=clock, mode=mode, backend=backend, lanes=lanes)
    assert found == hash_of_ddp(program, lanes)


# -- bounded delay -----------------------------------------------------------------------------------------------------


@cache
def hash_of_delay(program: str, clock: str, lanes: int, accumulate: int) -> str:
    """Alone, where worker 0 is its own server."""
    return hash_of(program, 1, 0, clock=clock, lanes=lanes, accumulate=accumulate)


# The last group of most of them is cut short by the end of an epoch, where all weights are looked at.
DELAYED = [
    ("gpt", 2, 1, "d=1", "update", "paceline", 4, 1), ("gpt", 3, 0, "d=3", "aggregate", "gloo", 4, 1),
    ("gpt", 4, 2, "d=1", "aggregate", "paceline", 5, 2), ("clipped", 2, 2, "d=3", "update", "gloo", 5, 1),
    ("clipped", 4, 0, "d=1", "update", "paceline", 4, 2), ("clipped", 3, 1, "d=3", "aggregate", "paceline", 5, 1),
    ("convnet", 4, 1, "d=3", "update", "gloo", 4, 2), ("convnet", 2, 0, "d=1", "aggregate", "gloo", 5, 1),
    ("convnet", 3, 2, "d=1", "update", "paceline", 5, 1), ("scheduled", 2, 1, "d=3", "aggregate", "paceline", 4, 1),
    ("scheduled", 3, 2, "d=1", "update", "gloo", 4, 1), ("gan", 3, 1, "d=1", "update", "paceline", 5, 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("program", "workers", "servers", "clock", "mode", "backend", "lanes", "accumulate"), DELAYED
)  # fmt: skip
def test_a_delay_has_one_hash_on_any_number_of_workers_and_servers_in_both_modes(
    program: str, workers: int, servers: int, clock: str, mode: str, backend: str, lanes: int, accumulate: int
) -> None:
    job: dict[str, Any] = {"lanes": lanes, "accumulate": accumulate}
    found = hash_of(program, workers, servers, clock=clock, mode=mode, backend=backend, **job)
    assert found == hash_of_delay(program, clock, lanes, accumulate)


def test_another_delay_gives_other_bits() -> None:
    """The oracle can fail: it sees that the weights were read later."""
    assert len({hash_of_ddp("gpt", 4), hash_of_delay("gpt", "d=1", 4, 1), hash_of_delay("gpt", "d=3", 4, 1)}) == 3


# -- several devices of a server ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clock", "servers"), [("s=0", 1), ("s=0", 0), ("d=1", 2)])
def test_keys_spread_over_several_devices_of_a_server_give_the_same_bits(clock: str, servers: int) -> None:
    job: dict[str, Any] = {"clock": clock, "lanes": 4}
    spread = hash_of("gpt", 2, servers, devices=("cpu", "cpu:0", "cpu"), **job)
    assert spread == hash_of("gpt", 1, 0, **job)


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        (
            (),
            "ParameterServer(server_devices=()): name at least one device, such as ('cpu',) or ('cuda:0', 'cuda:1')",
        ),
        (
            "cpu",
            "ParameterServer(server_devices='cpu'): name at least one device, such as ('cpu',) or ('cuda:0', 'cuda:1')",
        ),
        (("gpu",), "ParameterServer(server_devices=…): 'gpu' is no device; write cpu, cuda:0 and the like"),
    ],
)
def test_what_is_no_device_of_a_server_is_refused_in_one_line(devices: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ParameterServer(server_devices=devices)
    assert str(caught.value) == text


def test_a_gpu_that_a_server_does_not_see_is_named_before_training() -> None:
    results = run_workers(PROGRAMS["gpt"], 1, servers=1, strategy=ParameterServer(server_devices=("cuda:63",)))
    assert "server 0 is to hold keys on cuda:63, but sees" in str(results[1].error), results
    assert all(str(result.error).split(":")[0] in ("ConfigError", "PeerLostError") for result in results), results


def test_aggregate_with_an_asynchronous_clock_is_one_clear_line() -> None:
    with pytest.raises(
        ConfigError, match=r"\(mode='aggregate'\) with clock s=2,from=100: pushes that are applied on arrival need"
    ):
        ParameterServer(clock=parse_clock("s=2"), mode="aggregate")


@pytest.mark.parametrize("clock", ["s=0", "d=2"])
def test_a_run_whose_order_is_fixed_is_not_recorded(clock: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ParameterServer(clock=parse_clock(clock), record="runs/mine")
    assert str(caught.value) == (
        f"ParameterServer(record='runs/mine') with clock {clock}: its rounds are applied in order, so the run gives "
        "the same bits when it is simply run again; leave record out"
    )
