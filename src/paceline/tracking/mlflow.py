"""MLflow: a run in the tracking store that its own settings name (`MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`).

A resumed run continues the same run there; its id is in `mlflow_run.json` of the run's folder. Parameters are logged
by the first start alone, because MLflow refuses to change them.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from paceline.tracking.reporter import RunInfo, known_id

ID_FILE = "mlflow_run.json"
PARAMETERS_AT_ONCE = 100
LONGEST_PARAMETER = 500


class MLflow:
    name = "mlflow"

    def __init__(self) -> None:
        self._mlflow: Any = None

    def start(self, run: RunInfo) -> None:
        mlflow: Any = importlib.import_module("mlflow")  # not installed with paceline, so not known to a type checker
        file = run.folder / ID_FILE
        known = known_id(file) if run.resumed_at is not None else None
        begun = mlflow.start_run(run_id=known, run_name=None if known else run.name)
        self._mlflow = mlflow
        run.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"id": begun.info.run_id}) + "\n")
        if known is None:
            parameters = _flat({**run.config, "world": run.world})
            while some := dict(islice(parameters, PARAMETERS_AT_ONCE)):
                mlflow.log_params(some)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({name: float(value) for name, value in values.items()}, step=step)

    def close(self, *, ok: bool = True) -> None:
        if self._mlflow is not None:
            self._mlflow.end_run("FINISHED" if ok else "FAILED")
            self._mlflow = None


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", str(value)[:LONGEST_PARAMETER]
