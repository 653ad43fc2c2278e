"""Checkpoints of one mesh go on upon another: full tensors in the files, unchanged, and the numbers after them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline import Mesh
from tests.mesh.training import Trained, runs

pytestmark = pytest.mark.workers

# With Adam's usual 1e-8 an element whose gradient is all rounding moves by lr times its sign: meshes then differ by
# more than 1e-5 after four steps, with a checkpoint and without one alike.
EPS = 1e-4


@pytest.fixture(scope="module")
def straight() -> Trained:
    (found,) = runs(1, steps=4, eps=EPS)
    return found


@pytest.mark.parametrize(
    ("strategy", "meshes"),
    [("fsdp", ((4, Mesh(dp=4)), (1, None))), ("zero2", ((4, Mesh(tp=4)), (4, Mesh(dp=2, tp=2))))],
    ids=["fsdp", "zero2"],
)
def test_a_checkpoint_of_one_mesh_goes_on_upon_others(
    tmp_path: Path, straight: Trained, strategy: str, meshes: tuple[tuple[int, Mesh | None], ...]
) -> None:
    mine = Mesh(dp=2, tp=2)
    saved, *_ = runs(4, mesh=mine, strategy=strategy, steps=2, eps=EPS, folder=tmp_path / "saved", saves=True)
    for workers, mesh in meshes:
        on = runs(workers, mesh=mesh, strategy=strategy, steps=4, eps=EPS, folder=tmp_path / "saved", resumes=True)
        assert {one.hash for one in on} == {saved.hash}, mesh  # as it was loaded
        np.testing.assert_allclose(on[0].losses, straight.losses[2:], rtol=1e-5)
        for name, whole in straight.weights.items():
            np.testing.assert_allclose(on[0].weights[name], whole, rtol=1e-5, atol=1e-5, err_msg=name)
        if mesh == mine:  # no bit is lost, and dp changes none
            never_stopped, *_ = runs(2, mesh=Mesh(tp=2), steps=4, eps=EPS)
            for name, whole in never_stopped.weights.items():
                np.testing.assert_array_equal(on[0].weights[name], whole, err_msg=name)
