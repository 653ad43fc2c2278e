"""The strategies: each file registers itself when it is imported. What a user takes from here, by name.

strategy          what a strategy is asked, in which order
registry          found by name or by a config; what it can do
buckets           gradients become lanes' sums and leave in buckets, under all but the local ones
ddp, star         everything on every worker; a bucket becomes its sum by all-reduce, or at one worker
zero/             optimizer state, gradients, weights in shards: zero1, zero2, zero3
fsdp/             weights gathered when a unit uses them: fsdp, hybrid, zero3 off shared memory
server/           the worker's side of the parameter server
local/            lanes that train apart: local_sgd, diloco
compressed/       buckets of compressed gradients, under ddp, zero1, zero2 and servers
master_weights    fp32 weights behind parameters in low precision
meta_device       models that were built without memory
"""

from paceline.parameter_server.clock import BoundedDelay, BoundedStaleness, parse_clock
from paceline.parameter_server.staleness_policy import StalenessPolicy
from paceline.strategies.ddp import DdpConfig
from paceline.strategies.fsdp.fsdp import FsdpConfig
from paceline.strategies.fsdp.hybrid import HybridConfig
from paceline.strategies.local.diloco import DilocoConfig
from paceline.strategies.local.local_sgd import LocalSgdConfig
from paceline.strategies.server import ParameterServer
from paceline.strategies.star import StarConfig
from paceline.strategies.zero.zero1 import Zero1Config
from paceline.strategies.zero.zero2 import Zero2Config
from paceline.strategies.zero.zero3 import Zero3Config

__all__ = [
    "BoundedDelay",
    "BoundedStaleness",
    "DdpConfig",
    "DilocoConfig",
    "FsdpConfig",
    "HybridConfig",
    "LocalSgdConfig",
    "ParameterServer",
    "StalenessPolicy",
    "StarConfig",
    "Zero1Config",
    "Zero2Config",
    "Zero3Config",
    "parse_clock",
]
