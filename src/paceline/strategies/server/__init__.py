"""The worker's side of the parameter server, as a strategy; the servers themselves are in `paceline.parameter_server`.

parameter_server   what a user chooses, and what the strategies of one job share
assembly           how workers and servers of a job come together
rounds             one round on a worker: read weights, push gradients, end the round; three ways to do it
replay             the asynchronous strategy with servers that follow a log instead of arrivals
"""

from paceline.parameter_server.clock import BoundedDelay, BoundedStaleness
from paceline.parameter_server.staleness_policy import Treatment
from paceline.strategies.server.parameter_server import ParameterServer

__all__ = ["BoundedDelay", "BoundedStaleness", "ParameterServer", "Treatment"]
