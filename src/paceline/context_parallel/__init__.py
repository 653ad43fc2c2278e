"""Context parallelism: several workers share each sequence, where one alone has not the memory for it.

    sequence_split.py    which tokens a worker has, their positions and labels, and its part of the loss
    group_attention.py   attention of a worker's queries to the keys of all workers, and its gradients
    routing.py           how the attention of a model comes there: torch's function, transformers' interface
    parallel.py          ContextParallel, which people and the engine call

It knows tensors and a process group of torch, and nothing of engines: docs/concepts/context_parallel.md.
"""

from __future__ import annotations

from paceline.context_parallel.group_attention import attention
from paceline.context_parallel.parallel import Checked, ContextParallel
from paceline.context_parallel.sequence_split import SequenceSplit, TargetCount, next_tokens, shard_batch

__all__ = ["Checked", "ContextParallel", "SequenceSplit", "TargetCount", "attention", "next_tokens", "shard_batch"]
