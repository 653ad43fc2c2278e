"""Every option of every verb, given what it can't mean: refused at once, in a line, without a traceback."""

from __future__ import annotations

import inspect
import os
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from paceline.bench import collectives as comparing
from paceline.bench import race
from paceline.cli import main as command_line
from paceline.cli import run as run_verb
from paceline.cli.checkpoint import app as checkpoint_app
from paceline.cli.data import app as data_app
from tests.damage import INSTEAD

pytestmark = pytest.mark.timeout(60)

HUGE = "99999999999999999999"


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A job that would start is a job that was accepted."""

    async def accepted(job: object, shows: object = None) -> int:
        return 111

    for starting in (run_verb, race, comparing):
        monkeypatch.setattr(starting, "supervise", accepted)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")


class Said(typing.NamedTuple):
    code: int
    lines: list[str]


@pytest.fixture
def paceline(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    def call(*words: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            command_line.main()
        return Said(int(end.value.code or 0), capfd.readouterr().err.splitlines())

    return call


def refused(said: Said) -> str:
    """The one line that says why; a usage error of the parser has two more above it."""
    assert said.code in (1, 2, 3), said
    told = [line for line in said.lines if line.startswith(("paceline: ", "Error: "))]
    assert len(told) == 1, said
    assert not [line for line in said.lines if "Traceback" in line], said
    assert len(said.lines) == 1 or said.lines[0].startswith("Usage: "), said
    return told[0]


# -- every option ------------------------------------------------------------------------------------------------------


def verbs() -> Iterator[tuple[tuple[str, ...], Callable[..., Any]]]:
    import importlib

    for verb, module_name in command_line.VERBS.items():
        module = importlib.import_module(module_name)
        if isinstance(getattr(module, "app", None), typer.Typer):
            for command in module.app.registered_commands:
                assert command.callback is not None
                yield (verb, command.name or command.callback.__name__), command.callback
        else:
            yield (verb,), getattr(module, verb)


def options() -> Iterator[tuple[tuple[str, ...], str, type]]:
    """(verb, option, type) of all that take a value."""
    for verb, function in verbs():
        function = inspect.unwrap(function)
        for name, hint in typing.get_type_hints(function, include_extras=True).items():
            if name == "return" or not hasattr(hint, "__metadata__"):
                continue
            about = hint.__metadata__[0]
            if type(about).__name__ != "OptionInfo":
                continue
            kinds = {kind for one in typing.get_args(hint)[:1] for kind in (typing.get_args(one) or (one,))}
            kinds |= {inner for kind in kinds for inner in typing.get_args(kind)}
            declared = [word for word in about.param_decls or () if word.startswith("--")]
            flag = declared[0] if declared else f"--{name.replace('_', '-')}"
            for kind in (int, float, str):
                if kind in kinds:
                    yield verb, flag, kind


WRONG = {int: ("nan", "-1", HUGE, "1e3", ""), float: ("nan", "inf", "-inf", "-1", "1e999", ""), str: ("",)}
COMPLETE = {
    ("run",): ["train.py"],
    ("verify",): ["train.py"],
    ("chaos",): ["--", "run", "train.py"],
    ("checkpoint", "export"): ["here", "there.safetensors"],
    ("checkpoint", "diff"): ["here", "there"],
    ("data", "tokenize"): ["out", "in"],
    ("data", "audit"): ["here"],
    ("top",): ["here"],
    ("trace",): ["here"],
    ("monitor",): ["here"],
}
CASES = [(verb, flag, value) for verb, flag, kind in options() for value in WRONG[kind]]


def test_all_verbs_are_looked_at() -> None:
    assert len(CASES) > 150
    assert {verb[0] for verb, _, _ in CASES} >= {"run", "chaos", "bench", "checkpoint", "data"}


@pytest.mark.parametrize(("verb", "flag", "value"), CASES, ids=lambda part: "_".join(part) if part else "empty")
def test_what_no_option_can_mean_is_refused(
    paceline: Callable[..., Said], verb: tuple[str, ...], flag: str, value: str
) -> None:
    told = refused(paceline(*verb, f"{flag}={value}", *COMPLETE.get(verb, [])))
    assert flag in told or "empty" in told or "number" in told


# -- run ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--workers", HUGE, "train.py"], f"paceline: --workers {HUGE}: no host can carry so many"),
        (["--workers", "100000", "train.py"], "processes a core are started; use "),
        (["--workers", "-3", "train.py"], "--workers -3; a job has at least one"),
        (["--workers", "0", "train.py"], "--workers 0; a job has at least one"),
        (["--workers", "٣x", "train.py"], "is neither a number nor auto"),
        (["--servers", HUGE, "train.py"], "no host can carry so many"),
        (["--hosts", HUGE, "train.py"], "no host can carry so many"),
        (["--hosts", "100000", "--coordinator", "a:1", "--secret-file", "train.py", "train.py"], "need"),
        ([""], "SCRIPT '': it is empty"),
        (["/"], "'/' is a folder without a __main__.py"),
        (["."], "'.' is a folder without a __main__.py"),
        (["/dev/zero"], "it is a device and not a regular file"),
        (["x" * 5000], "File name too long"),
        (["nowhere.py"], "no script 'nowhere.py' in "),
        (["-m", ".train"], "no module named ''"),
        (["--strategy", "zero4", "train.py"], "'zero4', which is not known; choose one of auto, ddp, "),
        (["--precision", "fp64", "train.py"], "'fp64', which is not known; choose one of fp32, bf16, fp16"),
        (["--backend", "tcp", "train.py"], "'tcp', which is not known; choose one of paceline, gloo, nccl"),
        (["--offload", "all", "train.py"], "'all', which is not known; choose one of optimizer, parameters"),
        (["--activation-checkpointing", "a+b", "train.py"], "'b' can't be kept"),
        (["--lanes", "100000", "train.py"], "it must be at most 65,536"),
        (["--threads", "100000", "train.py"], "it must be at most 1,024"),
        (["--servers", "1", "--strategy", "ddp", "train.py"], "which has no use for them"),
        (["--precision", "bf16", "--strategy", "parameter_server", "train.py"], "which trains in fp32 alone"),
        (["--offload", "optimizer", "--strategy", "ddp", "train.py"], "which updates weights where they are"),
        (["--elastic", "--heartbeat-timeout-s", "0", "train.py"], "it must be a number of seconds above 0"),
        (["--elastic", "--copies", "0", "train.py"], "there is at least one copy"),
        (["--hosts", "2", "--host-rank", "0", "--coordinator", "é" * 300 + ":1", "train.py"], "is not ADDRESS:PORT"),
        (["--hosts", "2", "--host-rank", "0", "--coordinator", "a:" + "9" * 5000, "train.py"], "is not ADDRESS:PORT"),
    ],
)  # fmt: skip
def test_run_says_what_is_wrong_before_anything_starts(
    paceline: Callable[..., Said], words: list[str], told: str
) -> None:
    assert told in refused(paceline("run", *words))


def test_a_setting_in_the_environment_is_checked_by_the_launcher_too(
    paceline: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_STRATEGY", "zero4")
    assert "PACELINE_STRATEGY) is 'zero4'" in refused(paceline("run", "train.py"))


def test_a_folder_that_has_been_removed_is_told(
    paceline: Callable[..., Said], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for words in (["run", tmp_path / "train.py"], ["doctor"], ["checkpoint", "list", "x"]):
        assert "the current folder has been removed" in refused(paceline(*words))


@pytest.mark.parametrize("instead", [name for name in INSTEAD if name not in ("an empty file", "not UTF-8")])
def test_a_secret_that_cannot_be_read_is_told(
    paceline: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instead: str
) -> None:
    monkeypatch.setattr(run_verb, "PATIENCE_S", 0.2)
    INSTEAD[instead](tmp_path / "secret")
    several = ["--hosts", "2", "--host-rank", "0", "--coordinator", "127.0.0.1:1", "--secret-file", tmp_path / "secret"]
    assert "secret" in refused(paceline("run", *several, "train.py"))


def test_a_secret_may_come_through_a_pipe(paceline: Callable[..., Said]) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"secret\n")
    os.close(writing)
    several = ["--hosts", "2", "--host-rank", "0", "--coordinator", "127.0.0.1:1"]
    said = paceline("run", *several, "--secret-file", f"/dev/fd/{reading}", "train.py")
    os.close(reading)
    assert said.code == 111, said


# -- the others --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["chaos", "--folder", "/proc/x", "--", "run", "train.py"], "--folder /proc/x can't be made: "),
        (["chaos", "--folder", "/dev/null/x", "--", "run", "train.py"], "--folder /dev/null/x can't be made: "),
        (["chaos", "--folder", ".", "--", "run", "train.py"], "--folder . exists"),
        (["chaos", "--minutes", "0", "--", "run", "train.py"], "--minutes 0: faults are made for some time"),
        (["chaos", "--", ""], "paceline chaos runs a job, not ''"),
        (["bench", "step", "--workers", "100000"], "--workers 100000: this host has"),
        (["bench", "collectives", "--workers", "100000"], "--workers 100000: this host has"),
        (["bench", "memory", "--workers", "100000"], "--workers 100000: this host has"),
        (["bench", "step", "--workers", "0"], "at least one worker"),
        (["bench", "step", "--json", "/proc/x/y"], "can't be written"),
        (["bench", "step", "--json", "/proc/x"], "can't be written"),
        (["replay", "/"], "no log"),
        (["replay", "/proc/x"], "/proc/x"),
        (["replay", "x" * 5000], "File name too long"),
        (["data", "audit", "/"], "/"),
        (["data", "audit", "x" * 5000], "File name too long"),
        (["data", "tokenize", "out", "/dev/zero"], "/dev/zero is not a regular file"),
        (["data", "tokenize", "/proc/x", "train.py"], "/proc/x"),
        (["data", "tokenize", "x" * 5000, "train.py"], "File name too long"),
        (["data", "tokenize", "out", "x" * 5000], "File name too long"),
        (["data", "tokenize", "out", "train.py", "--tokenizer", "/dev/zero"], "--tokenizer"),
        (["checkpoint", "list", ""], "a word of the command line is empty"),
        (["checkpoint", "list", "x" * 5000], "File name too long"),
        (["checkpoint", "show", "/dev/zero"], "/dev/zero has no checkpoint"),
        (["checkpoint", "diff", "/dev/zero", "/dev/zero"], "/dev/zero"),
        (["checkpoint", "export", "x", "--hf"], "Option '--hf' requires an argument"),
        (["checkpoint", "export", "--hf", "--dcp", "x", "y"], "--hf '--dcp': an option came where a path belongs"),
    ],
    ids=lambda part: " ".join(part)[:60] if isinstance(part, list) else "",
)  # fmt: skip
def test_paths_that_are_none_are_told(paceline: Callable[..., Said], words: list[str], told: str) -> None:
    assert told in refused(paceline(*words))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("instead", INSTEAD)
def test_weights_that_cannot_be_read_are_told(
    paceline: Callable[..., Said], tmp_path: Path, suffix: str, instead: str
) -> None:
    file = tmp_path / f"weights{suffix}"
    INSTEAD[instead](file)
    assert file.name in refused(paceline("checkpoint", "diff", "--weights", file, file))


def test_the_modules_own_apps_are_the_verbs() -> None:
    """So that what `main` wraps is what tests of the verbs call."""
    assert {command.callback.__name__ for command in checkpoint_app.registered_commands if command.callback} >= {"show"}
    assert {command.callback.__name__ for command in data_app.registered_commands if command.callback} >= {"check"}
