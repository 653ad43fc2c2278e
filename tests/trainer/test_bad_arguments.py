"""Whatever a training argument is given, by a script, a flag or a file: it is taken or refused in one line."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError, PacelineError
from paceline.trainer import TrainingArguments
from paceline.trainer.argument_fields import SupportedFields
from tests.trainer.jobs import make_trainer

FIELDS = {item.name: item for item in dataclasses.fields(SupportedFields)}
NUMBERS = [name for name, item in FIELDS.items() if str(item.type).startswith(("int", "float"))]
MAY_BE_TINY_OR_LARGE = {"max_steps": -1}
NOT_FINITE = [math.nan, math.inf, -math.inf, "nan", "inf", "-inf", "NaN", "1e999", "9" * 400, 10**400, 1e308 * 10]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_finite_and_in_its_range(name: str) -> None:
    wrong = [*NOT_FINITE, -1e300, "-3", -2, [1], {}, (), object(), b"1", True, 1j]
    for value in wrong:
        with pytest.raises(ConfigError, match=f"^{name}=") as error:
            TrainingArguments(**{name: value})
        assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("seed", -1, "seed=-1: it is at least 0"),
        ("seed", 2**63, "seed="),
        ("adam_beta1", 1.0, "adam_beta1=1.0: it is a number of at least 0 and below 1"),
        ("adam_beta2", -0.1, "adam_beta2=-0.1: it is a number of at least 0 and below 1"),
        ("save_steps", math.nan, "save_steps=nan: expected a finite number, got float"),
        ("save_steps", -5, "save_steps=-5: it is never negative"),
        ("logging_steps", 1.5, "a number of steps is whole"),
        ("lanes", 0, "lanes=0: it is at least 1"),
        ("lanes", 10**6, "lanes=1000000: it is at most 65,536"),
        ("ddp_timeout", 0, "ddp_timeout=0: it is at least 1"),
        ("strategy", "zero4", "strategy='zero4' is not known; choose auto, ddp, "),
        ("reduction", "slow", "reduction='slow' is not known; choose exact or fast"),
        ("ddp_backend", "mpi", "ddp_backend='mpi' is not known; choose paceline, gloo or nccl"),
        ("offload", "", "offload='' is not known; choose optimizer or parameters"),
        ("compression", "gzip", "compression='gzip' is not known; choose bf16, fp16, int8, sign, topk or powersgd"),
        ("on_nonfinite", "pray", "on_nonfinite='pray' is not known"),
        ("dataloader_multiprocessing_context", "thread", "is not known; choose fork, spawn or forkserver"),
        ("optim_args", "momentum", "optim_args='momentum': 'momentum' is no name=value"),
        ("optim_args", "momentum=NaN", "momentum must be a finite number"),
        ("optim_args", "betas=" + "[" * 5000, "betas"),
        ("lr_scheduler_kwargs", True, "lr_scheduler_kwargs=True: expected a mapping"),
        ("deepspeed", True, "deepspeed=True: expected a mapping"),
        ("output_dir", "", "output_dir='': that is no path"),
        ("output_dir", "a\0b", "that is no path"),
        ("output_dir", "~nobody-of-this-name/x", "output_dir='~nobody-of-this-name/x': "),
    ],
)
def test_what_is_out_of_range_is_told_with_the_range(name: str, value: Any, told: str) -> None:
    if name == "optim_args" and "[" in value:
        TrainingArguments(**{name: value})  # a text that is no JSON is a text; the optimizer refuses it
        return
    with pytest.raises(ConfigError) as error:
        TrainingArguments(**{name: value})
    assert told in str(error.value)
    assert len(str(error.value).splitlines()) == 1


values = (
    st.integers() | st.floats() | st.text(max_size=6) | st.binary(max_size=4) | st.none() | st.booleans()
    | st.lists(st.text(max_size=3) | st.integers(), max_size=2) | st.dictionaries(st.text(max_size=3), st.integers())
    | st.sampled_from(["true", "none", "auto", "steps", "[]", "{", '{"a": 1}', "fork", "1e-3", "٣"])
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(sorted(FIELDS)), value=values)
def test_any_value_is_taken_or_refused_by_an_error_of_ours(name: str, value: Any) -> None:
    try:
        TrainingArguments(**{name: value})
    except PacelineError as error:
        said = str(error)
    else:
        said = ""
    assert len(said.splitlines()) <= 1


@settings(max_examples=60, deadline=None)
@given(words=st.lists(st.sampled_from([*(f"--{name}" for name in sorted(FIELDS)), "nan", "-1", "", "x", "--", "="])
                      | st.text(max_size=5), max_size=4))  # fmt: skip
def test_any_command_line_is_taken_or_refused_by_an_error_of_ours(words: list[str]) -> None:
    if "-h" in words or "--help" in words:
        return
    try:
        TrainingArguments.from_command_line(words)
    except PacelineError as error:
        said = str(error)
    else:
        said = ""
    assert len(said.splitlines()) <= 1


@pytest.mark.parametrize("place", ["/proc/x", "/dev/null/x", "file/x"])
def test_a_folder_that_cannot_be_written_is_told_before_training(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PacelineError) as error:
        make_trainer(tmp_path / place if not place.startswith("/") else Path(place)).train()
    assert place.split("/")[-2] in str(error.value)
    assert len(str(error.value).splitlines()) == 1
