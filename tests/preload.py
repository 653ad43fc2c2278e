"""What the parent of all test workers imports once, so that forking a worker costs milliseconds instead of seconds."""

import torch

import paceline.engine.engine  # noqa: F401

torch.set_num_threads(1)
# The first optimizer object pulls in torch._dynamo, seconds of imports that every worker would pay again.
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
