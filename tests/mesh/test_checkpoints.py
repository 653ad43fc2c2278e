"""Checkpoints of one mesh go on upon another: full tensors in the files, unchanged, and the numbers after them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline import Mesh
from tests.mesh.training import runs

pytestmark = pytest.mark.workers


def test_a_checkpoint_of_one_mesh_goes_on_upon_others(tmp_path: Path) -> None:
    (straight,) = runs(1, steps=4)
    for strategy in ("ddp", "fsdp"):
        folder = tmp_path / strategy
        saved, *_ = runs(4, mesh=Mesh(dp=2, tp=2), strategy=strategy, steps=2, folder=folder, saves=True)
        for workers, mesh in ((4, Mesh(dp=4)), (4, Mesh(tp=4)), (1, None)):
            goes_on = runs(workers, mesh=mesh, strategy=strategy, steps=4, folder=folder, resumes=True)
            assert {one.hash for one in goes_on} == {saved.hash}, (strategy, mesh)  # as it was loaded
            np.testing.assert_allclose(goes_on[0].losses, straight.losses[2:], rtol=1e-5)
            for name, whole in straight.weights.items():
                np.testing.assert_allclose(goes_on[0].weights[name], whole, rtol=1e-5, atol=1e-5, err_msg=name)
