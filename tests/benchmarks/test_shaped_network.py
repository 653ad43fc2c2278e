"""The slow network: two small hosts measured for real, and nothing of them left on any way out."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.benchmarks import script

shaped_network = script("shaped_network")
needs_network = pytest.mark.skipif(
    shaped_network.why_not() is not None, reason=f"a shaped network {shaped_network.why_not()}"
)


def namespaces_of(process: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=10, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"paceline-{process}-")]


@pytest.mark.job
@needs_network
def test_two_hosts_move_the_bytes_of_the_formula_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"--json": tmp_path / "shaped.json", "--png": tmp_path / "shaped.png"}
    options = [str(word) for pair in files.items() for word in pair]
    shaped_network.main(["--hosts", "2", "--mib", "0.1", "--rounds", "1", *options])
    result = json.loads(files["--json"].read_text())
    assert [row["algorithm"] for row in result["rows"]] == ["star", "unsplit-ring", "ring", "1 server", "N servers"]
    for row in result["rows"]:
        tensors = 2 if row["algorithm"] == "1 server" else 1
        assert row["busiest_bytes"] == row["bytes_by_theory"] == tensors * result["tensor_bytes"]
        assert row["wire_bytes"] > row["busiest_bytes"]
    assert files["--png"].read_bytes().startswith(b"\x89PNG")
    assert "0 of 5 ratios more than 25% from the theory's" in capsys.readouterr().out
    assert namespaces_of(os.getpid()) == []


@pytest.mark.job
@needs_network
def test_an_interrupt_leaves_no_namespace() -> None:
    with pytest.raises(KeyboardInterrupt), shaped_network.network(2, 100) as names:
        assert namespaces_of(os.getpid())
        assert len(names) == 2
        raise KeyboardInterrupt
    assert namespaces_of(os.getpid()) == []


@pytest.mark.job
@needs_network
def test_a_link_that_cannot_be_made_is_one_line_and_leaves_no_namespace() -> None:
    with pytest.raises(SystemExit, match=r"`tc -n .* failed: .+"), shaped_network.network(2, 0):
        pass
    assert namespaces_of(os.getpid()) == []


def test_without_root_it_ends_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="shaped_network: needs root, to make network namespaces"):
        shaped_network.main(["--hosts", "2"])


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--hosts", "1,2"], "--hosts 1,2"), (["--hosts", "two"], "a list of numbers"), (["--mib", "0"], "above zero")],
)
def test_bad_input_is_one_line(options: list[str], words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        shaped_network.main(options)


@pytest.mark.parametrize(("name", "ratio"), [("star", 7.0), ("unsplit-ring", 7.0), ("ring", 1.75), ("N servers", 1.75)])
def test_by_theory_eight_hosts_take_this_many_times_as_long_as_two(name: str, ratio: float) -> None:
    trial = shaped_network.Trial(hosts=(2, 8), rounds=1)
    found = [
        {"algorithm": each, "hosts": hosts, "seconds": float(hosts), "busiest_bytes": 1, "wire_bytes": 2}
        for each in shaped_network.WAYS
        for hosts in trial.hosts
    ]
    rows = shaped_network.summarise(trial, found)["rows"]
    (of_eight,) = [row for row in rows if (row["algorithm"], row["hosts"]) == (name, 8)]
    assert of_eight["ratio_by_theory"] == ratio
    assert of_eight["ratio"] == 4.0
    assert not of_eight["within"]


def test_at_a_single_server_everything_comes_in_before_it_goes_out() -> None:
    trial = shaped_network.Trial(hosts=(2, 8), rounds=1)
    found = [
        {"algorithm": each, "hosts": hosts, "seconds": float(hosts), "busiest_bytes": 1, "wire_bytes": 2}
        for each in shaped_network.WAYS
        for hosts in trial.hosts
    ]
    (_, row) = [row for row in shaped_network.summarise(trial, found)["rows"] if row["algorithm"] == "1 server"]
    assert row["bytes_by_theory"] == 8 * trial.bytes
    assert row["seconds_by_theory"] == 2 * 8 * trial.bytes / trial.bytes_per_s
    assert (row["ratio_by_theory"], row["ratio"], row["within"]) == (4.0, 4.0, True)
