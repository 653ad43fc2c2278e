"""Files that somebody may have damaged: whoever reads one gets its content, or one line, and never waits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data import TokenFile
from paceline.data.audit import audit
from paceline.elastic.decisions import Commit
from paceline.elastic.step_log import StepLog, line_of, read_step_log
from paceline.errors import CheckpointError, ConfigError, DataError, PacelineError, WorldError
from paceline.input_file import cause_of, one_line, open_output, parse_json, read_json, read_short
from paceline.parameter_server.update_log import read_log
from paceline.tracking import json_lines
from paceline.tracking.reporter import known_id
from paceline.trainer import TrainingArguments
from paceline.trainer.callbacks import TrainerState
from paceline.trainer.run_folder import recorded_lanes
from tests.damage import INSTEAD, NESTED

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("instead", INSTEAD)
def test_what_is_no_json_file_is_an_error_of_one_line(tmp_path: Path, instead: str) -> None:
    INSTEAD[instead](tmp_path / "file")
    with pytest.raises((OSError, ValueError)) as error:
        read_json(tmp_path / "file")
    assert len(cause_of(error.value).splitlines()) == 1


@given(st.binary(max_size=40) | st.text(max_size=40))
def test_any_bytes_are_json_or_a_value_error(data: bytes | str) -> None:
    with suppress(ValueError):
        json.dumps(parse_json(data))


def test_json_that_is_nested_too_deeply_or_no_object_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it is nested too deeply"):
        parse_json(NESTED)
    with pytest.raises(ValueError, match="it is not UTF-8 text"):
        parse_json(b"\xff\xff")
    (tmp_path / "list").write_text("[1]")
    with pytest.raises(ValueError, match="it holds a list and not an object"):
        read_json(tmp_path / "list")


def test_a_cause_has_one_line_of_bounded_length_without_control_characters() -> None:
    assert one_line("a\nb\x1b[31m") == r"a\nb\x1b[31m"
    assert len(one_line("x" * 10_000)) == 300
    assert cause_of(KeyError("step")) == "there is no 'step'"


def test_a_fifo_is_neither_read_nor_written_where_nobody_is_at_its_other_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="it is a fifo that nobody reads"):
        open_output(tmp_path / "fifo")
    with pytest.raises(OSError, match="nobody ended writing within"):
        read_short(tmp_path / "fifo", 100, 0.1)
    writing = os.open(tmp_path / "fifo", os.O_RDWR)
    with pytest.raises(OSError, match="nobody ended writing within"):
        read_short(tmp_path / "fifo", 100, 0.1)
    os.close(writing)


# -- everybody who reads -----------------------------------------------------------------------------------------------


def _from_yaml(path: Path) -> Any:
    return TrainingArguments.from_yaml(path)


def _from_json(path: Path) -> Any:
    return TrainingArguments(output_dir=str(path.parent), optim_args=str(path), lr_scheduler_kwargs=str(path))  # type: ignore[arg-type]


def _samples(path: Path) -> Any:
    report = audit(path.parent)
    assert report.problems
    raise ConfigError(report.problems[0])


READERS: dict[str, tuple[Callable[[Path], Any], type[PacelineError]]] = {
    "train.tokens": (TokenFile, DataError),
    "trainer_state.json": (TrainerState.load_from_json, CheckpointError),
    "arguments.yaml": (_from_yaml, ConfigError),
    "arguments.json": (_from_json, ConfigError),
    "parameter_server/attempt-0001-worker-00000.jsonl": (lambda path: read_log(path.parent.parent), CheckpointError),
    "samples/attempt-0001-worker-00000.jsonl": (lambda path: _samples(path.parent), ConfigError),
}
FINE = {("arguments.yaml", "an empty file")}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("instead", INSTEAD)
def test_readers_raise_our_own_error_in_one_line(tmp_path: Path, name: str, instead: str) -> None:
    path, (read, error_type) = tmp_path / name, READERS[name]
    path.parent.mkdir(exist_ok=True)
    INSTEAD[instead](path)
    if (name, instead) in FINE:
        read(path)
        return
    with pytest.raises(error_type) as error:
        read(path)
    assert len(str(error.value).splitlines()) == 1, error.value
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("instead", INSTEAD)
def test_what_may_be_missing_is_missing_or_a_warning(tmp_path: Path, instead: str) -> None:
    INSTEAD[instead](tmp_path / "training_arguments.json")
    assert recorded_lanes(tmp_path) is None
    INSTEAD[instead](tmp_path / "wandb_run.json")
    if (tmp_path / "wandb_run.json").exists() or instead == "a link to itself":
        with pytest.warns(UserWarning, match="so a new run is started there"):
            assert known_id(tmp_path / "wandb_run.json") is None
    else:
        assert known_id(tmp_path / "wandb_run.json") is None


@pytest.mark.parametrize(
    "lines",
    ['["step"]', "7", '{"step": "x", "update": 0, "generation": 0, "members": []}', '{"step": 1}',
     '{"rewound_to": []}', '{"step": 1, "update": 0, "generation": 0, "members": 4}', "\ufffd nonsense"],
)  # fmt: skip
def test_a_ledger_with_a_row_that_is_none_is_told_with_its_line(tmp_path: Path, lines: str) -> None:
    good = line_of(Commit(1, 0, 1, (0,)))
    (tmp_path / "ledger").write_text(good + lines + "\n")
    with pytest.raises(WorldError, match="line 2: not a row of a step log"):
        read_step_log(tmp_path / "ledger")
    with pytest.raises(WorldError, match="line 2: not a row of a step log"):
        StepLog(tmp_path / "ledger")


@pytest.mark.parametrize("instead", ["a folder", "a fifo", "a socket", "a link to itself"])
def test_a_ledger_that_cannot_be_written_is_told(tmp_path: Path, instead: str) -> None:
    INSTEAD[instead](tmp_path / "ledger")
    with pytest.raises(WorldError, match="can't be written"):
        StepLog(tmp_path / "ledger")


LINES = st.binary(max_size=30) | st.sampled_from(
    [b'{"step": 1, "loss": 2.0}', b'{"event": "resume"}', b'{"event": "resume", "step": "x"}', b"[" * 3000, b"7",
     b'{"step": 1, "nonfinite": ["loss"]}', b'{"step": 1, "nonfinite": 3}', b'{"step": "1"}', b'{"event": "start"}']
)  # fmt: skip


@given(st.lists(LINES, max_size=6))
def test_any_lines_of_metrics_are_read_or_left_out(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "metrics.jsonl"
    path.write_bytes(b"\n".join(lines))
    for row in json_lines.rows(path):
        assert type(row["step"]) is int
