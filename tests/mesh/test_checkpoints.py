"""Checkpoints of one mesh go on upon another: full tensors in the files, unchanged, and the numbers after them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline import Mesh
from tests.mesh.training import runs

pytestmark = pytest.mark.workers

# With Adam's usual 1e-8 an element whose gradient is all rounding moves by lr times its sign: meshes then differ by
# more than 1e-5 after four steps, with a checkpoint and without one alike.
EPS = 1e-4


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_checkpoint_of_one_mesh_goes_on_upon_others(tmp_path: Path, strategy: str) -> None:
    (straight,) = runs(1, steps=4, eps=EPS)
    mine = Mesh(dp=2, tp=2)
    saved, *_ = runs(4, mesh=mine, strategy=strategy, steps=2, eps=EPS, folder=tmp_path / "saved", saves=True)
    for workers, mesh in ((4, Mesh(dp=4)), (4, Mesh(tp=4)), (1, None)):
        on = runs(workers, mesh=mesh, strategy=strategy, steps=4, eps=EPS, folder=tmp_path / "saved", resumes=True)
        assert {one.hash for one in on} == {saved.hash}, mesh  # as it was loaded
        np.testing.assert_allclose(on[0].losses, straight.losses[2:], rtol=1e-5)
        for name, whole in straight.weights.items():
            np.testing.assert_allclose(on[0].weights[name], whole, rtol=1e-5, atol=1e-5, err_msg=name)


def test_on_the_same_mesh_no_bit_is_lost(tmp_path: Path) -> None:
    mesh, folder = Mesh(dp=2, tp=2), tmp_path / "saved"
    straight, *_ = runs(4, mesh=mesh, strategy="zero2", steps=4)
    runs(4, mesh=mesh, strategy="zero2", steps=2, folder=folder, saves=True)
    on, *_ = runs(4, mesh=mesh, strategy="zero2", steps=4, folder=folder, resumes=True)
    for name, whole in straight.weights.items():
        np.testing.assert_array_equal(on.weights[name], whole, err_msg=name)
