"""Shared memory as a backend of torch.distributed, for CPU tensors: init_process_group("paceline").

torch calls `register` by itself when it is imported where paceline is installed (the entry point `torch.backends`);
`import paceline.backend` does it too. Other people's scripts get it as they are: torchrun, their own DDP.

A script that was started without `paceline run` keeps the memory that it frees from its first group on, as scripts
under `paceline run` do: what `zero_grad` frees is otherwise faulted in anew in every step, a sixth of a step of DDP.

Every `import torch` passes here, so nothing else is imported before a group is made, and nothing here raises: where
paceline can't be used, torch can. The first group that is asked for says what is wrong, and so does `paceline doctor`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

NAME = "paceline"

registration_error: Exception | None = None


def register() -> None:
    global registration_error
    try:
        import torch.distributed as dist

        if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(NAME, create_group, devices=["cpu"])
    except Exception as error:  # another torch than those that are known, half an installation: `import torch` goes on
        registration_error = error


def create_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    try:
        from paceline.collectives.shared_memory.group import SharedMemoryGroup
        from paceline.world.environment import may_keep_memory
        from paceline.world.process import keep_free_memory
    except Exception as error:
        from paceline.errors import CollectiveError

        raise CollectiveError(
            f'the backend "{NAME}" can\'t be used here: {type(error).__name__}: {error}; use backend="gloo", or '
            "install paceline again"
        ) from error
    if may_keep_memory():
        keep_free_memory()
    return SharedMemoryGroup(store, rank, size, timeout)


register()
