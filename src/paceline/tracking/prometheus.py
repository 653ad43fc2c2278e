"""Prometheus: the latest value of everything, as gauges with the run's name.

    paceline_train_loss{run="mnist"} 2.31        scraped at http://127.0.0.1:9464/metrics while the run lasts,
    paceline_step{run="mnist"} 120               or written to a file for node_exporter's textfile collector

`report_to="prometheus"` serves on the port above, `"prometheus:9500"` on that one, and `"prometheus:/var/lib/x.prom"`
writes that file. The port is on loopback: to scrape from elsewhere, put a proxy with authentication in front.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.tracking.reporter import RunInfo, in_section

ADDRESS = "127.0.0.1"
DEFAULT_PORT = 9464


class Prometheus:
    name = "prometheus"

    def __init__(self, *, port: int | None = DEFAULT_PORT, textfile: Path | None = None) -> None:
        self._wanted_port, self._textfile = port, textfile
        self._server: Any = None
        self._thread: Any = None
        self._gauges: dict[str, Any] = {}
        self._registry: Any = None
        self._run = ""

    @classmethod
    def parse(cls, where: str) -> Prometheus:
        """A port, or the path of a file."""
        if not where:
            return cls()
        if where.isdecimal() and int(where) < 2**16:
            return cls(port=int(where))
        if where.endswith(".prom"):
            return cls(port=None, textfile=Path(where))
        raise ConfigError(f"report_to='prometheus:{where}': after the colon comes a port or the path of a .prom file")

    @property
    def port(self) -> int | None:
        """Where it listens, now."""
        return None if self._server is None else int(self._server.server_port)

    def start(self, run: RunInfo) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._run, self._registry = run.name, CollectorRegistry()
        for step, values in run.taken_over or ():
            self.log(step, values)
        if self._wanted_port is None:
            return
        try:
            self._server, self._thread = start_http_server(self._wanted_port, ADDRESS, registry=self._registry)
        except OSError as error:
            raise ConfigError(
                f"report_to='prometheus': port {self._wanted_port} on {ADDRESS} can't be used ({error.strerror}); "
                "another run may report there: give another as 'prometheus:PORT'"
            ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._set("step", step)
        for name, value in values.items():
            self._set(in_section(name), value)
        if self._textfile is not None:
            from prometheus_client import write_to_textfile

            self._textfile.parent.mkdir(parents=True, exist_ok=True)
            write_to_textfile(str(self._textfile), self._registry)

    def close(self, *, ok: bool = True) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def _set(self, name: str, value: float) -> None:
        from prometheus_client import Gauge

        name = metric_name(name)
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, f"latest {name}", ["run"], registry=self._registry)
        self._gauges[name].labels(self._run).set(value)


def metric_name(name: str) -> str:
    return "paceline_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
