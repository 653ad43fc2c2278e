"""`import paceline.backend` makes shared memory a backend of torch.distributed: init_process_group("paceline").

Registered for CPU tensors. Other people's scripts get it too: torchrun, their own DDP, nothing else changed.
"""

from __future__ import annotations

import torch.distributed as dist

from paceline.collectives.shared_memory.group import NAME, create_group

if NAME.upper() not in dist.Backend._plugins:
    dist.Backend.register_backend(NAME, create_group, devices=["cpu"])
