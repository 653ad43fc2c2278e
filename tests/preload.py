"""What the parent of all test workers imports once, so that forking a worker costs milliseconds instead of seconds."""

import gc
import importlib
from contextlib import suppress

import torch

# A worker imports the module of its program, which is a module of tests; a supervisor imports the command line.
OURS = ("paceline.engine.engine", "paceline.trainer.trainer", "paceline.cli.run")
OF_TESTS = ("pytest", "hypothesis", "safetensors.torch", "tests.faults.jobs", "tests.faults.borrowed_fork_server")
for name in (*OURS, *OF_TESTS):
    importlib.import_module(name)
with suppress(ImportError):  # which the first call of a command line imports
    importlib.import_module("pydantic.type_adapter")

torch.set_num_threads(1)
# The first optimizer object pulls in torch._dynamo, seconds of imports that every worker would pay again.
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
# A collection walks over all that exists and copies its pages, in every worker that closes an engine and in every fork
# server that preloads: 0.2 s each. What exists now lives as long as they do.
gc.collect()
gc.freeze()
