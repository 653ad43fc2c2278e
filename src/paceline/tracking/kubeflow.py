"""Kubeflow Trainer: the progress of a TrainJob and its latest values, told to the job's controller.

    POST KUBEFLOW_TRAINER_SERVER_URL
    {"trainerStatus": {"progressPercentage": 40, "estimatedRemainingSeconds": 90, "metrics": [{"name": "loss", …}], …}}

The controller puts three variables into a worker's environment: the address, a file with its certificate and one with a
token, which is renewed from time to time. Where the first is there the Trainer reports without being asked to. An
update that does not arrive is left out, with one warning: the next one says all that it would have said.
"""

from __future__ import annotations

import json
import ssl
import time
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.tracking.reporter import RunInfo
from paceline.world import environment, messages
from paceline.world.environment import KubeflowServer

AT_MOST_EVERY_S = 5.0
TIMEOUT_S = 5.0


class Kubeflow:
    name = "kubeflow"

    def __init__(self, server: KubeflowServer, clock: Callable[[], float] = time.monotonic) -> None:
        self._server, self._clock = server, clock
        self._values: dict[str, float] = {}
        self._begun = self._told = 0.0
        self._from = self._done = 0.0  # parts of the run that are done
        self._steps, self._epochs = 0, 0.0
        self._has_warned = False

    @classmethod
    def from_environment(cls) -> Kubeflow:
        server = environment.kubeflow_server()
        if server is None:
            raise ConfigError(
                "report_to='kubeflow' needs KUBEFLOW_TRAINER_SERVER_URL, which Kubeflow Trainer sets in a TrainJob; "
                "leave it out elsewhere"
            )
        return cls(server)

    def start(self, run: RunInfo) -> None:
        self._steps, self._epochs = int(run.config.get("max_steps", 0)), float(run.config.get("num_train_epochs", 0))
        self._begun = self._clock()
        if run.resumed_at is not None and self._steps > 0:
            self._from = self._done = run.resumed_at / self._steps
        for _, values in run.taken_over or ():
            self._values.update(values)
        self._tell(self._done)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._values |= {**values, "current_step": step}
        if self._steps > 0:
            self._done = step / self._steps
        elif self._epochs > 0:
            self._done = values.get("epoch", 0.0) / self._epochs
        if self._clock() - self._told >= AT_MOST_EVERY_S:
            self._tell(min(0.99, self._done))  # all of it: when it has ended

    def close(self, *, ok: bool = True) -> None:
        self._tell(1.0 if ok else min(0.99, self._done))

    def _tell(self, done: float) -> None:
        self._told = self._clock()
        status: dict[str, Any] = {
            "lastUpdatedTime": datetime.now(UTC).isoformat(),
            "progressPercentage": round(100 * done),
            "metrics": [{"name": name, "value": str(value)} for name, value in self._values.items()],
        }
        if done > self._from:
            left = (self._told - self._begun) * (1 - done) / (done - self._from)
            status["estimatedRemainingSeconds"] = round(left)
        try:
            self._post(json.dumps({"trainerStatus": status}).encode())
        except (OSError, ValueError) as error:
            if not self._has_warned:
                messages.warn(f"kubeflow's controller does not take an update: {error}; training continues")
            self._has_warned = True

    def _post(self, body: bytes) -> None:
        server, headers = self._server, {"Content-Type": "application/json"}
        if server.token_file is not None:
            headers["Authorization"] = f"Bearer {Path(server.token_file).read_text().strip()}"
        trusted = ssl.create_default_context(cafile=server.ca_file) if server.ca_file is not None else None
        request = urllib.request.Request(server.url, data=body, headers=headers, method="POST")
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=trusted):
            pass
