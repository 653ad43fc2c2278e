"""Data × tensor parallel training against one process: the numbers, and the bits along dp."""

from __future__ import annotations

import numpy as np
import pytest

from paceline import Mesh
from tests.mesh.training import trained
from tests.workers import run_workers

pytestmark = pytest.mark.workers


def test_two_by_two_workers_train_what_one_process_trains() -> None:
    (alone,) = [r.value for r in run_workers(trained, 1)]
    results = run_workers(trained, 4, mesh=Mesh(dp=2, tp=2))
    assert [r.error for r in results] == [None] * 4, results[0].traceback
    assert len({r.value.hash for r in results}) == 1
    for name, whole in alone.weights.items():
        np.testing.assert_allclose(results[3].value.weights[name], whole, rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(results[3].value.losses, alone.losses, rtol=1e-6)
    np.testing.assert_allclose(results[3].value.norms, alone.norms, rtol=1e-6)
