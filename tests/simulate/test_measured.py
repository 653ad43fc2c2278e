"""The simulator beside what was measured here: stored tables of benchmarks/results, within 15 %."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.simulate.scenario import Scenario
from tests.benchmarks import script

simulated = script("simulated")
SHAPED, RECOVERY = simulated.SHAPED, simulated.RECOVERY
WITHIN = 0.15


@pytest.mark.parametrize("way", ["star", "unsplit-ring", "ring", "1 server", "N servers"])
@pytest.mark.parametrize("place", range(len(SHAPED["hosts"])))
def test_the_shaped_network_is_reproduced(way: str, place: int) -> None:
    measured, found = SHAPED["seconds"][way][place], simulated.shaped_seconds(way, SHAPED["hosts"][place])
    assert found == pytest.approx(measured, rel=WITHIN), f"{way}: measured {measured} s, simulated {found:.3f} s"


def test_a_star_is_linear_in_the_workers_and_a_ring_is_flat() -> None:
    seconds = simulated.shaped_seconds
    assert seconds("star", 8) / seconds("star", 2) == pytest.approx(7, rel=0.01)
    assert seconds("ring", 8) / seconds("ring", 2) == pytest.approx(1.75, rel=0.01)


@pytest.mark.parametrize("row", RECOVERY["elastic"], ids=[row["from"] for row in RECOVERY["elastic"]])
def test_the_recovery_from_a_hang_follows_from_that_of_a_kill(row: dict[str, Any]) -> None:
    assert 0.05 < simulated.regroup_of(row) < 0.25
    found = simulated.hang_seconds(row)
    assert found == pytest.approx(row["stop"], rel=WITHIN), f"measured {row['stop']} s, simulated {found:.2f} s"


def test_the_default_recovery_is_the_one_that_was_measured() -> None:
    row = RECOVERY["elastic"][0]
    found = simulated.recovery_seconds(row, detect_s=Scenario.detect_s, regroup_s=Scenario.regroup_s)
    assert found == pytest.approx(row["kill"], rel=WITHIN)


def test_a_restart_from_a_checkpoint_takes_what_torchruns_took() -> None:
    row = RECOVERY["restart"]
    assert simulated.restart_seconds() == pytest.approx(row["regained"], rel=WITHIN)
    most = row["first_new_step"] + row["lost_steps"][1] * row["step_ms"] / 1e3
    assert most == pytest.approx(row["regained_most"], rel=WITHIN)
