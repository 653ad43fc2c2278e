"""The page of docs/accuracy.md says what the numbers say, misses included."""

from __future__ import annotations

import json
from typing import Any

from tests.benchmarks import script

accuracy = script("accuracy")


def row(strategy: str, predicted_ms: float, measured_ms: float, *, sent: int = 100) -> dict[str, Any]:
    sizes = {"model_state": 1e8, "peak": 2e8}
    predicted = sizes | {"step_s": predicted_ms / 1e3, "sent_bytes": 100, "counted": True}
    measured = sizes | {"step_s": measured_ms / 1e3, "sent_bytes": sent, "busy_elsewhere": 0.0}
    return {"workload": "mlp", "workers": 2, "strategy": strategy, "predicted": predicted, "measured": measured}


def result(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"rows": list(rows), "machine": {"torch": "2", "cpu": "cpu", "cores": 2}}


def test_the_page_in_the_docs_is_the_one_that_the_numbers_make() -> None:
    """Make it anew with `python benchmarks/accuracy.py --show benchmarks/results/accuracy.json`, never by hand."""
    assert accuracy.PAGE.read_text() == accuracy.page(json.loads(accuracy.RESULTS.read_text()))


def test_errors_and_choices_are_told() -> None:
    rows = [row("ddp", 10, 10.5), row("zero2", 8, 12)]
    page = accuracy.page(result(*rows))
    assert (
        "| step time (2 settings) | 19.0% | 33.3% (mlp, 2 workers, zero2) | 15% median, 30% worst | **missed** |"
        in page
    )
    assert "| bytes sent (2 settings) | 0.0% | 0.0% " in page
    assert "| mlp, 2 workers | zero2 | ddp | 14.3% |" in page


def test_bytes_that_differ_by_one_are_a_miss() -> None:
    (bytes_sent,) = [one for one in accuracy.summary([row("ddp", 1, 1, sent=101)]) if one["quantity"] == "sent_bytes"]
    assert not bytes_sent["reached"]


def test_the_sweep_is_what_the_issue_asks_for() -> None:
    assert len(accuracy.WORKERS) * len(accuracy.STRATEGIES) * len(accuracy.WORKLOADS) == 30
