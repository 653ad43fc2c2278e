"""`paceline verify` as it is called: exit codes, JSON, and one line for whatever can't be run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli import chaos
from paceline.cli.main import main
from tests.examples.running import EXAMPLES
from tests.faults.jobs import BorrowedPopen
from tests.verify.running import PLANTED

pytestmark = pytest.mark.beside

Call = Callable[..., tuple[int, str, str]]

LOOP = """
import torch, paceline
engine = paceline.Engine({engine})
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = engine.prepare(model, optimizer, loader)
for number, (x, y) in enumerate(loader):
    {first}
    engine.backward((model(x) - y).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    {last}
"""


def loop(*, engine: str = "", first: str = "pass", last: str = "pass") -> str:
    return LOOP.format(engine=engine, first=first, last=last)


ASYNCHRONOUS = "from paceline.strategies import BoundedStaleness, ParameterServer" + loop(
    engine="strategy=ParameterServer(clock=BoundedStaleness(steps=2))"
)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """In the test's folder; jobs are forked from a process that has torch."""
    monkeypatch.setattr(chaos, "start", BorrowedPopen)
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", "verify", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workers", "1,two"], "--workers '1,two': 'two' is no number of workers"),
        (["--workers", "1,,2"], "'' is no number of workers"),
        (["--workers", "0,1"], "'0' is no number of workers"),
        (["--workers", "-1"], "'-1' is no number of workers"),
        (["--workers", "2,1,2"], "2 is there twice"),
        (["--workers", "2"], "one setting has nothing to be compared with"),
        (["--strategies", "ddp,zero9"], "'zero9' is no strategy; choose of ddp"),
        (["--strategies", "ddp,ddp"], "ddp is there twice"),
        (["--workers", "1,3", "--lanes", "2"], "--lanes 2 with 3 workers"),
        (["--tolerance", "0"], "--tolerance 0"),
        (["--steps", "0"], "--steps"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line_before_anything_runs(
    words: list[str], said: str, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(chaos, "start", lambda *job: pytest.fail(f"started {job}"))
    (tmp_path / "train.py").write_text("pass")
    code, out, err = call("train.py", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_a_script_that_is_not_there_is_named(call: Call) -> None:
    code, _, err = call("nothing.py")
    assert code == 2
    assert "no script 'nothing.py'" in err


@pytest.mark.job
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("print('hello')", "train.py ran to its end and trained nothing with paceline"),
        ("import paceline\npaceline.Engine()", "train.py ran to its end and trained nothing with paceline"),
        (loop(first="break"), "train.py prepared its training and ended before the first step"),
        (loop(first="raise ValueError('bad day')"), "train.py fails with 1 worker, ddp, the first setting"),
        (loop(engine="lanes=1"), "2 workers: the script's job has 1 lane"),
        (ASYNCHRONOUS, "whose workers don't wait for each other"),
    ],
)
def test_what_could_not_be_run_is_one_line_and_code_2(script: str, said: str, call: Call, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    code, out, err = call("train.py")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert said in err


@pytest.mark.job
@pytest.mark.timeout(300)
def test_lanes_that_the_script_contradicts_are_told(call: Call, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(loop(engine="lanes=4"))
    code, _, err = call("train.py", "--lanes", "3")
    assert (code, err.count("\n")) == (2, 1)
    assert "the script says lanes=4 and the launcher says --lanes 3" in err


@pytest.mark.job
@pytest.mark.timeout(300)
def test_a_script_that_fails_at_one_setting_is_code_1_with_its_error(call: Call, tmp_path: Path) -> None:
    bug = "if engine.world.rank == 1 and engine.step == 2: raise ValueError('bad day')"
    (tmp_path / "train.py").write_text(loop(first=bug))
    code, out, err = call("train.py", "--steps", "4")
    assert (code, err) == (1, "")
    assert "✗ failed in step 3" in out
    assert "bad day" in out


@pytest.mark.job
@pytest.mark.timeout(300)
def test_other_numbers_of_steps_are_a_difference(call: Call, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(loop(last="if number == 3: break"))
    code, out, _ = call("train.py", "--json")
    result = json.loads(out)
    assert code == 1
    assert [one["steps"] for one in result["settings"]] == [2, 4]
    assert (result["finding"]["kind"], result["finding"]["step"]) == ("steps", 3)
    assert result["finding"]["cause"]["name"] == "another number of steps"


@pytest.mark.job
@pytest.mark.timeout(300)
def test_words_after_two_dashes_are_the_scripts_and_folder_is_its_own(call: Call, tmp_path: Path) -> None:
    text = "import sys\nfrom pathlib import Path\nassert sys.argv[1:2] == ['--steps'], sys.argv\n"
    text += "assert not list(Path(sys.argv[2]).iterdir())\n"
    (tmp_path / "train.py").write_text(text + loop(last="(Path(sys.argv[2]) / 'mine').touch()"))
    code, out, err = call("train.py", "--steps", "2", "--json", "--", "--steps", "{folder}")
    assert code == 0, err
    assert json.loads(out)["same"] is True


@pytest.mark.job
@pytest.mark.timeout(300)
def test_a_difference_is_code_1_and_json_says_where(call: Call) -> None:
    code, out, _ = call(str(PLANTED), "--steps", "2", "--lanes", "3", "--json", "--", "rank_dependent_branch")
    finding = json.loads(out)["finding"]
    assert code == 1
    assert (finding["step"], finding["item"]["lane"], finding["element"]["name"]) == (1, 1, "0.weight")
    assert finding["operators"][1].startswith("aten.mul at planted.py:")
    assert finding["repeats"] is True


@pytest.mark.job
@pytest.mark.timeout(300)
def test_the_hello_world_keeps_the_promise_as_a_person_asks_for_it() -> None:
    words = [sys.executable, "-m", "paceline", "verify", str(EXAMPLES / "hello.py"), "--steps", "3"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stderr) == (0, "")
    assert "✓ 2 settings, 3 steps, 2 tensors: every bit is the same." in done.stdout


@pytest.mark.job
def test_the_folder_of_a_run_is_left_alone(call: Call, tmp_path: Path) -> None:
    save = "checkpoints.save(); engine.log({'loss': 1.0})"
    source = loop(engine="project_dir='.'", last=f"if engine.stepped: {save}").replace(
        "for number", "engine.init_trackers('run')\ncheckpoints = engine.checkpoints('run')\nfor number"
    )
    Path("train.py").write_text(source)
    folder = tmp_path / "run"
    (folder / "checkpoint-5").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 5, "loss": 1.0}\n')
    code, out, err = call("train.py", "--steps", "2", "--workers", "1,2", "--strategies", "ddp")
    assert code == 0, err
    assert "every bit is the same" in out
    assert sorted(file.name for file in folder.rglob("*")) == ["checkpoint-5", "metrics.jsonl"]
    assert (folder / "metrics.jsonl").read_text() == '{"step": 5, "loss": 1.0}\n'
