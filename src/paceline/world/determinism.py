"""What bits depend on besides the data, and how each is pinned.

| bits depend on           | pinned by                                                                        |
|--------------------------|----------------------------------------------------------------------------------|
| random numbers           | `mix(seed, step, lane, …)`: every draw has its own seed, at any world size       |
| threads per worker       | `default_threads`: a function of cores and lanes, never of the number of workers |
| the order of atomic adds | `make_deterministic`; CPUs too: `index_put_(accumulate=True)` adds in any order  |
| torch, BLAS, CPU or GPU  | nothing pins them: `fingerprint` records them, to compare on resume and join     |

torch is imported where it is used: the supervisor counts threads without waiting seconds for it.
"""

from __future__ import annotations

import hashlib
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.world import environment
from paceline.world.host_limits import usable_cores

if TYPE_CHECKING:
    import torch

Fact = str | int | bool


def mix(*parts: int | str) -> int:
    """A stable 63-bit seed from what it is for: `mix(seed, step, lane, micro_batch, "dropout")`."""
    # repr keeps 1, 23 and 12, 3 apart, and 1 and "1"; int() makes numpy's and torch's integers read as Python's.
    text = repr([part if isinstance(part, str) else int(part) for part in parts])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_everything(seed: int, device: torch.device | None = None) -> None:
    """Seed random, numpy, torch's CPU and the accelerator: `device`, or the current one where it has started.

    Called for every micro-batch, so unlike `torch.manual_seed` (over 100 µs, all devices, a queue that grows while CUDA
    has not started) it touches one generator per library.
    """
    import torch

    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFF_FFFF)
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
    elif device is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)


def own_generators(thing: object) -> dict[str, object]:
    """The random generators in an object's attributes, which `seed_everything` does not reach."""
    import torch

    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if "numpy" in sys.modules:
        numbers = sys.modules["numpy"].random
        kinds += (numbers.Generator, numbers.RandomState)
    return {name: value for name, value in getattr(thing, "__dict__", {}).items() if isinstance(value, kinds)}


def state_of(generator: object) -> str:
    """To see whether it was drawn from."""
    import torch

    if isinstance(generator, torch.Generator):
        return str(generator.get_state().tolist())
    if isinstance(generator, random.Random):
        return repr(generator.getstate())
    of_numpy = getattr(generator, "bit_generator", None)
    return repr(generator.get_state() if of_numpy is None else of_numpy.state)  # type: ignore[attr-defined]


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """What is drawn inside comes from `seed`; outside, the CPU's random states go on as if nothing had been drawn."""
    import torch

    numpy = sys.modules.get("numpy")
    states = random.getstate(), torch.default_generator.get_state(), numpy.random.get_state() if numpy else None
    seed_everything(seed, torch.device("cpu"))
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.default_generator.set_state(states[1])
        if numpy is not None and states[2] is not None:
            numpy.random.set_state(states[2])


def make_deterministic(device_type: str) -> None:
    """Only algorithms that give the same bits twice; torch raises, naming the operation, where it has none.

    TF32 is deterministic and the user's to choose; `fingerprint` records the choice.
    """
    import torch

    if device_type == "cuda":
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
    # Filling fresh memory with NaN finds reads of uninitialised memory; it changes no bit and costs a pass over each.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    if device_type == "cuda":
        with environment.cublas_workspace():
            some = torch.ones(8, 8, device=device_type)
            torch.mm(some, some)


def fingerprint(device: torch.device | None = None) -> dict[str, Fact]:
    """Everything two runs must share for their bits to agree, besides lanes and seed; compare as dicts."""
    import torch

    facts: dict[str, Fact] = {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "blas": _blas(torch.__config__.show()),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "device": "cpu",
    }
    if device is not None and device.type == "cuda":
        facts |= {
            "device": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda or "none",
            "cudnn": torch.backends.cudnn.version() or 0,  # type: ignore[no-untyped-call]
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "matmul_tf32": torch.backends.cuda.matmul.fp32_precision,
            "conv_tf32": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        }
    elif device is not None:
        facts["device"] = device.type
    return facts


def default_threads(lanes: int) -> int:
    """Threads per worker: cores // lanes, so that L workers of one lane each just fill the host."""
    return max(1, usable_cores() // lanes)


def _blas(config: str) -> str:
    """The BLAS torch was built with and, where it says so, its version."""
    kind = re.search(r"BLAS_INFO=(\w+)", config)
    version = re.search(r"Math Kernel Library Version (\S+)", config)
    return " ".join(match[1] for match in (kind, version) if match) or "unknown"
