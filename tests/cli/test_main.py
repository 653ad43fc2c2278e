"""The command line itself: its version and help, wrong verbs and options in one line, launcher files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.cli import run as run_module
from paceline.cli.main import main

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs that would have been started."""
    seen: list[Any] = []

    async def supervise(job: Any, shows: Any = None) -> int:
        seen.append(job)
        return 0

    monkeypatch.setattr(run_module, "supervise", supervise)
    monkeypatch.setattr(run_module, "_check_host", lambda job: None)
    return seen


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text("pass\n")
    return str(tmp_path / "train.py")


def test_version(call: Call) -> None:
    assert call("--version") == (0, f"paceline {paceline.__version__}\n", "")


@pytest.mark.job
def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "paceline", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"paceline {paceline.__version__}\n")


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("verb", [(), ("run",), ("bench",), ("bench", "step"), ("doctor",)])
def test_help_has_two_names_everywhere(call: Call, verb: tuple[str, ...], flag: str) -> None:
    code, out, _ = call(*verb, flag)
    assert code == 0
    assert "-h, --help" in out


def test_help_tells_verbs_in_whole_sentences_and_options_in_groups(call: Call) -> None:
    _, out, _ = call("--help")
    assert "..." not in out.split("Commands:")[1]
    _, out, _ = call("run", "--help")
    for group in ("Options:", "How it trains:", "Elastic:", "Several hosts:"):
        assert f"\n{group}" in out
    _, checkpoint, _ = call("checkpoint", "--help")
    assert "..." not in checkpoint.split("Commands:")[1]
    for verb in ("export", "import"):
        _, told, _ = call("checkpoint", verb, "--help")
        assert all(f"\n{group}" in told for group in ("Arguments:", "Formats:", "Options:"))
    assert "nproc_per_node" not in out  # understood, and told in a sentence, not beside our own name


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["rnu", "x.py"], "paceline: 'rnu' is no verb of paceline; did you mean `paceline run`?"),
        (["train.py"], "paceline: 'train.py' is no verb of paceline; a script is started with `paceline run train.py`"),
        (["run", "--wokers", "2", "x.py"], "paceline: No such option: --wokers (Possible options: "),
        (["bench", "stp"], "paceline: No such command 'stp'. Did you mean 'step'?"),
        (["run"], "paceline: Missing argument 'script'; see `paceline run --help`"),
    ],
)
def test_a_wrong_word_is_one_line(call: Call, words: list[str], line: str) -> None:
    code, out, err = call(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(line)


@pytest.mark.parametrize(
    ("words", "workers"),
    [
        (["--workers", "3"], 3),
        (["--nproc_per_node", "3"], 3),
        (["--nproc-per-node=3", "--nnodes=1"], 3),
        (["--num-processes", "3"], 3),
        (["--num_processes", "3", "--num_machines", "1", "--mixed_precision", "no"], 3),
    ],
)
def test_names_of_other_launchers(call: Call, jobs: list[Any], script: str, words: list[str], workers: int) -> None:
    assert call("run", *words, script)[0] == 0
    assert jobs[0].workers == workers


@pytest.mark.parametrize(
    ("before", "behind", "told"),
    [
        ([], ["--workers", "3"], True),
        ([], ["--epochs", "3", "--servers=1"], True),
        ([], ["--lanes", "4"], False),
        (["--workers", "2"], ["--workers", "3"], False),
        (["--num-processes", "2"], ["--workers", "3"], False),
        ([], ["--strategy", "best"], False),
    ],
)
def test_an_option_behind_the_script_is_the_scripts_and_is_told_if_it_may_be_ours(
    call: Call, jobs: list[Any], script: str, before: list[str], behind: list[str], told: bool
) -> None:
    code, _, err = call("run", *before, script, *behind)
    assert (code, jobs[0].script.arguments) == (0, tuple(behind))
    assert ("is given to the script. For paceline write it before: paceline run --" in err) == told


def test_processes_of_all_hosts_are_divided_among_them(
    call: Call, jobs: list[Any], script: str, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("s")
    hosts = ["--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "10.0.0.1"]
    hosts += ["--main_process_port", "4000", "--secret-file", str(tmp_path / "secret")]
    assert call("run", "--num_processes", "6", *hosts, script)[0] == 0
    assert (jobs[0].workers, jobs[0].hosts.count, jobs[0].hosts.rank) == (3, 2, 1)
    assert call("run", "--num_processes", "5", *hosts, script)[0] == 2
    assert "of which there are 2" in call("run", "--num_processes", "5", *hosts, script)[2]


def test_a_launcher_file_gives_defaults(call: Call, jobs: list[Any], script: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("workers: 4\nlanes: 8\nstrategy: zero2\nelastic: true\nheartbeat-timeout-s: 2.5\n")
    assert call("run", "--config", str(file), "--strategy", "ddp", script, "--config", "the script's")[0] == 0
    job = jobs[0]
    assert (job.workers, job.settings.lanes, job.settings.strategy) == (4, 8, "ddp")
    assert job.elastic.heartbeat_timeout_s == 2.5
    assert job.script.arguments == ("--config", "the script's")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("wokers: 4", "'wokers' is no option of `paceline run`; did you mean workers?"),
        ("config: x", "'config' is no option"),
        ("- workers", "expected options and their values"),
        ("workers: [1, 2]", "workers: expected one value"),
        ("workers: many", "--workers 'many' is neither a number nor auto"),
        ("a: b: c", "is no YAML"),
        ("lanes: x", "--lanes"),
    ],
)
def test_a_wrong_launcher_file_is_one_line(call: Call, script: str, tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    code, _, err = call("run", "--config", str(file), script)
    assert (code, err.count("\n")) == (2, 1)
    assert words in err
    assert call("run", "--config", str(tmp_path / "none.yaml"), script)[2].startswith("paceline: --config")


def test_doctor_for_programs(call: Call) -> None:
    code, out, _ = call("doctor", "--json")
    findings = {finding["about"]: finding for finding in json.loads(out)}
    assert code == 0
    assert findings["paceline"]["text"].startswith(paceline.__version__)
    assert {"kernels", "packages", "port", "torch", "world"} <= set(findings)
