"""Whatever an argument of the Engine is given, it is taken or refused in one line by an error of ours."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.errors import ConfigError, PacelineError
from paceline.strategies.fsdp.hybrid import HybridConfig
from paceline.strategies.server import ParameterServer

NONSENSE = [math.nan, math.inf, -math.inf, -1, 10**20, 10**400, 1e300, "", "nonsense", "\0", "-1", [], {}, (), object(),
            b"x", 1 + 2j, True, torch.ones(3), np.ones(3)]  # fmt: skip
NAMES = [name for name in inspect.signature(Engine.__init__).parameters if name not in ("self", "world", "unknown")]
TAKEN = {
    "overlap": {True},
    "compile": {True},
    "activation_checkpointing": {"nonsense"},  # the name of a class, which is looked for in `prepare`
    "record_samples": {"nonsense", "-1"},
    "project_dir": {"nonsense", "-1"},
}


@pytest.mark.parametrize("name", NAMES)
def test_nonsense_is_refused_in_one_line_that_names_the_argument(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in NONSENSE:
        if isinstance(value, bool | str) and value in TAKEN.get(name, ()):
            Engine(world=World(), **{name: value}).close()
            continue
        with pytest.raises(ConfigError) as error:
            Engine(world=World(), **{name: value}).close()
        assert name in str(error.value), (value, error.value)
        assert len(str(error.value).splitlines()) == 1
        assert len(str(error.value)) < 1000
    assert capsys.readouterr().out == ""


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(NAMES),
    value=st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4) | st.none() | st.booleans()
    | st.lists(st.integers(), max_size=2) | st.fractions() | st.decimals(),
)  # fmt: skip
def test_any_value_is_taken_or_refused_by_an_error_of_ours(name: str, value: Any) -> None:
    if name in ("threads", "device") and value is not None:
        return  # thousands of threads would be started, and a device may be there
    try:
        Engine(world=World(), **{name: value}).close()
    except PacelineError as error:
        said = str(error)
    else:
        said = ""
    assert len(said.splitlines()) <= 1


def test_seeds_go_from_0_to_what_63_bits_hold() -> None:
    for seed in (0, 2**63 - 1, np.int64(7), torch.tensor(7)):
        Engine(world=World(), seed=seed).close()  # type: ignore[arg-type]
    for seed in (-1, 2**63):
        with pytest.raises(ConfigError, match=r"seed=.*(seeds are whole numbers from 0 to 2\*\*63 - 1|it is at most)"):
            Engine(world=World(), seed=seed)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0, -1, "x", [], True])
def test_options_of_strategies_are_held_to_their_kind(value: Any) -> None:
    with pytest.raises(ConfigError, match="ParameterServer: key_mib="):
        ParameterServer(key_mib=value)
    with pytest.raises(ConfigError, match="HybridConfig: shard_over="):
        HybridConfig(shard_over=value)


# -- calls in the loop -------------------------------------------------------------------------------------------------


def in_a_loop(call: Any) -> None:
    """One step, with the call between backward and step."""
    with Engine(world=World()) as engine:
        model = nn.Linear(4, 1)
        data = TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
        model, optimizer, loader = engine.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4)
        )
        for x, y in loader:
            call(engine, F.mse_loss(model(x), y))
            optimizer.step()
            break


@pytest.mark.parametrize("value", [math.nan, -1.0, "x", None, [], True])
def test_a_gradient_is_clipped_to_a_norm(value: Any) -> None:
    def call(engine: Engine, loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.clip_grad_norm_(value)

    with pytest.raises(PacelineError, match="max_norm"):
        in_a_loop(call)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, "x", [], True])
def test_a_micro_batch_weighs_a_finite_number_of_units(value: Any) -> None:
    with pytest.raises(PacelineError, match="weight"):
        in_a_loop(lambda engine, loss: engine.backward(loss, weight=value))


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": "x"}, {"keep": 1.5}, {"keep": True}, {"when_busy": 3}])
def test_checkpoints_are_asked_for_with_sense(tmp_path: Path, options: dict[str, Any]) -> None:
    with Engine(world=World()) as engine, pytest.raises(ConfigError, match=r"checkpoints: (keep|when_busy)="):
        engine.checkpoints(tmp_path, **options)


@pytest.mark.parametrize("folder", ["", "\0", 7, None, b"x"])
def test_a_folder_is_a_path(folder: Any) -> None:
    with Engine(world=World()) as engine:
        model = nn.Linear(4, 1)
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for call in (engine.checkpoints, engine.save_state, engine.load_state):
            with pytest.raises(ConfigError, match="folder="):
                call(folder)
