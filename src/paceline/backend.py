"""Shared memory as a backend of torch.distributed, for CPU tensors: init_process_group("paceline").

torch calls `register` by itself when it is imported where paceline is installed (the entry point `torch.backends`);
`import paceline.backend` does it too. Other people's scripts get it as they are: torchrun, their own DDP. Nothing else
is imported before a group is made, since every `import torch` passes here.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

NAME = "paceline"


def register() -> None:
    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create_group, devices=["cpu"])


def create_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    from paceline.collectives.shared_memory.group import SharedMemoryGroup

    return SharedMemoryGroup(store, rank, size, timeout)


register()
