"""The worker's side of the parameter server, as a strategy; the servers themselves are in `paceline.parameter_server`.

parameter_server   what a user chooses, and how workers and servers of a job come together
space              parameters that are updated together, cut into keys
compressed         lanes' gradients in fewer bytes, on their way to the servers
rounds             one round on a worker: read weights, push gradients, end the round; three ways to do it
replay             the asynchronous way again, with servers that follow a log instead of arrivals
"""

from paceline.strategies.registry import Job, Maker, Registered, register
from paceline.strategies.server.parameter_server import (
    Assembly,
    ParameterServer,
    ParameterServerMaker,
    check_compression,
    serve,
)
from paceline.strategies.server.replay import ReplayedMaker

__all__ = ["ParameterServer"]


def _open(config: ParameterServer, job: Job) -> Maker:
    check_compression(config, job)
    if job.replay is not None:
        return ReplayedMaker(config, job, job.replay)
    if job.world.is_server:
        serve(config, job)
        raise SystemExit(0)
    return ParameterServerMaker(Assembly(config, job))


register(
    Registered(
        "parameter_server",
        ParameterServer,
        _open,
        bits_of_one_process=lambda config: config.clock.synchronous,
        examples=(ParameterServer(mode="aggregate"),),
        uses_servers=True,
        takes_compression=True,
    )
)
