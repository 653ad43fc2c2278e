"""The strategies: each file registers itself when it is imported. What a user takes from here, by name."""

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
