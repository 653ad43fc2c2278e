"""The tools that a run reports to, a file for each: `report_to` names them, or says "all" (installed ones) or "none".

    reporters = choose(["tensorboard", "prometheus:9500"], main=engine.is_main_process)      or an error: pip install …
    reporters.start(run)
    reporters.log(step, {"loss": 2.31})
    reporters.close(ok=True)

Every worker may do all of this; only the main one reports. JSON lines are always written. A reporter that fails while
the run is under way is dropped with a warning: a dashboard that is away must not end the training. A new tool is a file
with a `Reporter` (`reporter.py`) and a row in `KNOWN`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from paceline.errors import ConfigError, PacelineError
from paceline.tracking.json_lines import JsonLines, rows
from paceline.tracking.kubeflow import Kubeflow
from paceline.tracking.mlflow import MLflow
from paceline.tracking.prometheus import Prometheus
from paceline.tracking.reporter import Reporter, RunInfo
from paceline.tracking.tensorboard import TensorBoard
from paceline.tracking.wandb import WeightsAndBiases
from paceline.world import messages
from paceline.world.environment import kubeflow_server

__all__ = ["Reporter", "Reporters", "RunInfo", "choose", "rows"]


@dataclass(frozen=True)
class Known:
    module: str
    package: str
    make: Callable[[str], Reporter]
    """From what follows the name after a colon."""


KNOWN = {
    "tensorboard": Known("tensorboard", "tensorboard", lambda where: TensorBoard()),
    "wandb": Known("wandb", "wandb", lambda where: WeightsAndBiases()),
    "mlflow": Known("mlflow", "mlflow", lambda where: MLflow()),
    "prometheus": Known("prometheus_client", "prometheus-client", Prometheus.parse),
    "kubeflow": Known("urllib", "", lambda where: Kubeflow.from_environment()),
}


def choose(report_to: str | Sequence[str] | None, *, main: bool = True, argument: str = "report_to") -> Reporters:
    """The reporters of a run, not started yet. Bad names and missing packages are errors on every worker."""
    names = [report_to] if isinstance(report_to, str) else list(report_to or ["none"])
    if names == ["all"]:
        there = [name for name, known in KNOWN.items() if _is_installed(known.module)]
        chosen = [KNOWN[name].make("") for name in there if name != "kubeflow" or kubeflow_server() is not None]
    else:
        chosen = [_named(name, argument) for name in names if name != "none"]
    return Reporters([JsonLines(), *chosen] if main else [], strict=names != ["all"])


def _named(name: str, argument: str) -> Reporter:
    base, colon, where = name.partition(":")
    known = KNOWN.get(base)
    if known is None or (colon and base != "prometheus"):
        near = get_close_matches(base, [*KNOWN, "all", "none"], n=1)
        hint = f"did you mean {near[0]!r}? It takes" if near and near[0] != base else "it takes"
        raise ConfigError(f"{argument}={name!r} is not known; {hint} {', '.join(KNOWN)}, or all or none alone")
    if not _is_installed(known.module):
        raise ConfigError(f"{argument}={name!r} needs a package that is not installed: pip install {known.package}")
    return known.make(where)


def _is_installed(module: str) -> bool:
    """Not a folder of that name: W&B leaves one called `wandb` wherever it has run."""
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # put into sys.modules without a spec
        return True
    return spec is not None and spec.origin is not None


class Reporters:
    """All reporters of a run as one."""

    def __init__(self, reporters: Sequence[Reporter], *, strict: bool = True) -> None:
        self._reporters = list(reporters)
        self._strict = strict

    @property
    def names(self) -> list[str]:
        return [reporter.name for reporter in self._reporters]

    def start(self, run: RunInfo) -> None:
        """One that was asked for by name and can't start is an error; of "all", or when it is taken over, left out."""
        for reporter in list(self._reporters):
            try:
                reporter.start(run)
            except Exception as error:
                if self._strict and run.taken_over is None:
                    self.close(ok=False)
                    if isinstance(error, PacelineError):
                        raise
                    raise ConfigError(f"{reporter.name} can't report: {type(error).__name__}: {error}") from error
                self._drop(reporter, error)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for reporter in list(self._reporters):
            try:
                reporter.log(step, values)
            except Exception as error:
                self._drop(reporter, error)

    def close(self, *, ok: bool = True) -> None:
        while self._reporters:
            reporter = self._reporters.pop(0)
            try:
                reporter.close(ok=ok)
            except Exception as error:
                self._drop(reporter, error)

    def _drop(self, reporter: Reporter, error: Exception) -> None:
        if reporter in self._reporters:
            self._reporters.remove(reporter)
        messages.warn(
            f"{reporter.name} stopped reporting: {type(error).__name__}: {error}; training continues without it"
        )
