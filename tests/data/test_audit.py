"""The audit says 0 lost, 0 repeated of every honest record, and finds whatever is done to one, by name."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.audit import Report, Where, audit
from paceline.data.sample_log import LogHeader, MicroBatch, SampleLog, file_name
from paceline.errors import ConfigError
from tests.data.logged_runs import RecordedRun, cut_last_line, lines_of, write_lines

Line = tuple[Path, int]


@contextmanager
def new_run(*shape: Any, **options: Any) -> Iterator[RecordedRun]:
    with tempfile.TemporaryDirectory() as folder:
        yield RecordedRun(Path(folder), *shape, **options)


@contextmanager
def a_run_of(chance: random.Random, *, honest_end: bool = False) -> Iterator[RecordedRun]:
    """Starts, stops and kills with changing workers and batch sizes, and with states older than what was trained."""
    lanes, accumulate, batch = chance.randint(1, 6), chance.randint(1, 3), chance.randint(1, 4)
    drop_last = chance.random() < 0.4
    samples = chance.randint(1, 60) + (lanes * accumulate * batch if drop_last else 0)
    with new_run(samples, batch, lanes, accumulate, drop_last) as run:
        attempts = chance.randint(1, 5)
        for number in range(attempts):
            workers = chance.randint(1, lanes)
            killed = [worker for worker in range(workers) if chance.random() < 0.25]
            if honest_end and number + 1 == attempts:
                killed = []
            cut = chance.randint(0, len(killed))
            other_batch = chance.randint(1, batch) if chance.random() < 0.3 and not drop_last else None
            run.attempt(
                workers,
                steps=chance.randint(0, 12) if number else chance.randint(2, 12),
                back=min(len(run.saved) - 1, chance.choice([0, 0, 1, 3, 50])),
                batch_size=other_batch,
                behind=tuple(killed[:cut]),
                torn=tuple(killed[cut:]),
            )
        yield run


def standing_lines(run: RecordedRun) -> list[Line]:
    """(file, line number from 0) of every micro-batch that a state contains, those of the last step excepted."""
    lines = []
    attempts: dict[int, list[Path]] = {}
    for path in sorted((run.folder / "samples").iterdir()):
        attempts.setdefault(int(path.name[8:12]), []).append(path)
    cut = (1 << 30, 0)
    for paths in reversed(list(attempts.values())):
        for path in paths:
            whole = path.read_text().rpartition("\n")[0].splitlines()
            for number, line in list(enumerate(map(json.loads, whole)))[1:]:
                if "step" in line and (line["epoch"], line["position"]) < cut and line["step"] < run.saved[-1].step:
                    lines.append((path, number))
        header = json.loads(paths[0].read_text().splitlines()[0])
        cut = min(cut, (header["epoch"], header["position"]))
    return lines


def show(report: Report) -> str:
    return f"{report.verdict}\n{report}"


# ---- honest records ----------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False))
def test_any_sequence_of_starts_and_kills_has_0_lost_and_0_repeated(chance: random.Random) -> None:
    with a_run_of(chance) as run:
        report = audit(run.folder)
        assert report.clean, show(report)
        assert report.verdict == "0 lost, 0 repeated"
        assert sum(epoch.samples for epoch in report.epochs) == run.saved[-1].used, show(report)
        assert sum(epoch.steps for epoch in report.epochs) == run.saved[-1].step


def test_a_report_tells_the_attempts_and_the_epochs(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=100, batch_size=4, lanes=4)
    run.attempt(workers=4, steps=5)
    run.attempt(workers=2, steps=6, back=2)
    report = audit(tmp_path)
    first, second = report.attempts
    assert (first.workers, first.epoch, first.position, first.steps, first.samples) == (4, 0, 0, 5, 80)
    assert (first.rolled_back_steps, first.rolled_back_samples) == (2, 32)
    assert (second.workers, second.epoch, second.position, second.steps, second.samples) == (2, 0, 48, 6, 84)
    assert (second.rolled_back_steps, second.rolled_back_samples) == (0, 0)
    assert [(e.first, e.steps, e.samples, e.of, e.finished) for e in report.epochs] == [
        (0, 7, 100, 100, True),
        (1, 2, 32, 100, False),
    ]


def test_a_state_older_than_another_old_state_rolls_back_both(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=100, batch_size=2, lanes=2)
    run.attempt(workers=2, steps=10)
    run.attempt(workers=1, steps=5, back=2)
    run.attempt(workers=2, steps=9, back=9)
    report = audit(tmp_path)
    assert report.clean, show(report)
    assert [attempt.rolled_back_samples for attempt in report.attempts] == [24, 20, 0]


def test_dropped_samples_are_dropped_and_not_lost(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=27, batch_size=3, lanes=2, drop_last=True)
    run.attempt(workers=2, steps=9)
    report = audit(tmp_path)
    assert report.clean, show(report)
    assert [(e.samples, e.dropped) for e in report.epochs] == [(24, 3), (24, 3), (6, 0)]


def test_a_dataset_that_grows_is_followed(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=20, batch_size=2, lanes=2)
    run.attempt(workers=2, steps=7)
    assert run.saved[-1].epoch == 1
    run.samples = 30  # the epoch in progress is finished as it was begun; this run begins it again instead
    run.attempt(workers=1, steps=9, back=2)
    report = audit(tmp_path)
    assert report.clean, show(report)
    assert [(e.samples, e.of) for e in report.epochs] == [(20, 20), (30, 30), (4, 30)]


def test_left_out_micro_batches_are_counted_apart(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=40, batch_size=2, lanes=2)
    run.attempt(workers=2, steps=12, used=lambda entry: entry.step not in (3, 12))
    report = audit(tmp_path)
    assert report.clean, show(report)
    assert report.verdict == "0 lost, 0 repeated, 8 left out by the loop"
    assert [epoch.left_out for epoch in report.epochs] == [4, 4]


@pytest.mark.parametrize("inner", [False, True])
def test_the_run_folder_and_its_samples_folder_are_the_same(tmp_path: Path, inner: bool) -> None:
    RecordedRun(tmp_path, 40, 2, 2).attempt(workers=2, steps=3)
    assert audit(tmp_path / "samples" if inner else tmp_path).verdict == "0 lost, 0 repeated"


def test_an_attempt_without_steps_changes_nothing(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, 40, 2, 2)
    run.attempt(workers=2, steps=3)
    run.attempt(workers=2, steps=0)
    run.attempt(workers=2, steps=12)
    assert audit(tmp_path).clean


@pytest.mark.job
def test_reading_a_record_needs_no_torch() -> None:
    ask = "import sys, paceline.data.audit, paceline.data.sample_log; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", ask], check=False).returncode == 0


# ---- kills while writing -----------------------------------------------------------------------------------


def test_a_step_that_one_worker_had_not_written_is_set_aside_with_a_note(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=100, batch_size=2, lanes=4)
    run.attempt(workers=4, steps=5, behind=(2,))
    report = audit(tmp_path)
    assert report.clean, show(report)
    assert report.epochs[0].samples == 32
    assert any("ended while step 5 was being recorded: worker 2 had not written it" in note for note in report.notes)


def test_the_last_step_of_an_epoch_is_set_aside_like_any_other(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=20, batch_size=2, lanes=4)
    run.attempt(workers=4, steps=3, behind=(0,))
    report = audit(tmp_path)
    assert report.clean, show(report)
    assert report.epochs[0].samples == 16


def test_a_torn_last_line_is_left_out_with_a_note(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=100, batch_size=2, lanes=4)
    run.attempt(workers=2, steps=5, torn=(1,))
    report = audit(tmp_path)
    assert report.clean, show(report)
    assert report.notes[0] == (
        "attempt-0001-worker-00001.jsonl ends inside a line (killed while writing); line 11 is left out"
    )


def test_a_torn_line_that_a_saved_state_contains_is_lost(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=100, batch_size=2, lanes=4)
    run.attempt(workers=2, steps=5)
    run.attempt(workers=2, steps=5)
    cut_last_line(tmp_path / "samples" / file_name(1, 1))
    report = audit(tmp_path)
    assert report.verdict == "2 lost, 0 repeated"
    assert report.first_lost[0].where == Where(epoch=0, step=5, lane=3, attempt=1, worker=1)


def test_a_file_killed_at_birth_is_missed_only_when_the_attempt_counts(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=100, batch_size=2, lanes=4)
    run.attempt(workers=2, steps=0)
    (tmp_path / "samples" / file_name(1, 1)).write_text('{"paceline": "sam')
    assert audit(tmp_path).clean
    run.attempt(workers=2, steps=2)
    assert audit(tmp_path).clean
    (tmp_path / "samples" / file_name(2, 1)).write_text('{"paceline": "sam')
    assert not audit(tmp_path).clean


# ---- what is done to a record is found ---------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_line_taken_away_is_lost(chance: random.Random) -> None:
    with a_run_of(chance) as run:
        if not (lines := standing_lines(run)):
            return
        path, number = chance.choice(lines)
        text = path.read_text().splitlines(keepends=True)
        line = json.loads(text.pop(number))
        path.write_text("".join(text))
        report = audit(run.folder)
        assert (report.lost, report.repeated) == (len(line["ids"]), 0), (line, show(report))
        first = report.first_lost[0]
        assert first.position == line["position"]
        attempt, worker = int(path.name[8:12]), int(path.name[20:25])
        where = Where(line["epoch"], line["step"], line["lane"], attempt, worker)
        left = (row for file in path.parent.glob(f"{path.name[:12]}*") for row in lines_of_whole(file)[1:])
        if run.accumulate - 1 in (
            row.get("micro_batch") for row in left
        ):  # otherwise nobody can tell how many there are
            assert first.where in (where, Where(line["epoch"], attempt=attempt)), (line, show(report))


@settings(max_examples=80, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_line_written_twice_is_repeated(chance: random.Random) -> None:
    with a_run_of(chance) as run:
        if not (lines := standing_lines(run)):
            return
        path, number = chance.choice(lines)
        text = path.read_text().splitlines(keepends=True)
        line = json.loads(text[number])
        text.insert(chance.randint(1, number + 1), text[number])
        path.write_text("".join(text))
        report = audit(run.folder)
        assert (report.lost, report.repeated) == (0, len(line["ids"])), (line, show(report))
        again = report.first_repeated[0]
        where = Where(line["epoch"], line["step"], line["lane"], int(path.name[8:12]), int(path.name[20:25]))
        assert (again.position, again.id, again.where) == (line["position"], line["ids"][0], (where, where))


@settings(max_examples=80, deadline=None)
@given(st.randoms(use_true_random=False))
def test_an_id_in_the_place_of_another_is_repeated_and_the_other_lost(chance: random.Random) -> None:
    with a_run_of(chance) as run:
        lines = [(path, number, lines_of_whole(path)[number]) for path, number in standing_lines(run)]
        chance.shuffle(lines)
        pairs = ((a, b) for a, b in pairwise(lines) if a[2]["epoch"] == b[2]["epoch"])
        if (pair := next(pairs, None)) is None:
            return
        (path, number, line), (_, _, other) = pair
        was, now = line["ids"][0], other["ids"][0]
        text = path.read_text().splitlines(keepends=True)
        text[number] = json.dumps({**line, "ids": [now, *line["ids"][1:]]}) + "\n"
        path.write_text("".join(text))
        report = audit(run.folder)
        epoch = next(epoch for epoch in report.epochs if epoch.first == line["epoch"])
        assert report.repeated == 1, show(report)
        assert report.first_repeated[0].id == now
        assert {where.step for where in report.first_repeated[0].where} >= {line["step"], other["step"]}
        assert report.lost == epoch.lost == epoch.finished
        assert not epoch.finished or epoch.dropped or epoch.unused_ids == (was,)


def lines_of_whole(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_file_taken_away_is_named_and_what_it_had_is_lost(chance: random.Random) -> None:
    with a_run_of(chance) as run:
        lines = standing_lines(run)
        last = max(int(path.name[8:12]) for path in (run.folder / "samples").iterdir())
        several = [path for path, _ in lines if lines_of_whole(path)[0]["workers"] > 1]
        if not several:
            return
        path = chance.choice(several)
        had = sum(len(lines_of_whole(path)[number]["ids"]) for where, number in lines if where == path)
        path.unlink()
        report = audit(run.folder)
        attempt, worker = int(path.name[8:12]), int(path.name[20:25])
        others = any(where != path and int(where.name[8:12]) == attempt for where, _ in lines)
        named = f"attempt {attempt}: no file of worker {worker}, of "
        if others or attempt < last:
            assert report.lost >= had, show(report)
        if others:
            assert any(named in text for text in report.problems), show(report)
        else:  # nothing is left of the attempt: as if it had been killed before its first step
            assert any(named in text for text in report.notes), show(report)


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_a_skip_between_attempts_is_named_and_lost(chance: random.Random, skip: int) -> None:
    with a_run_of(chance, honest_end=True) as run:
        before = run.saved[-1].used
        number = run.attempt(1, steps=2, skip=skip)
        report = audit(run.folder)
        skipped = lines_of(run.folder / "samples" / file_name(number, 0))[0]
        text = f"attempt {number} begins at epoch {skipped['epoch']}, position {skipped['position']:,}, but the log"
        assert any(text in problem for problem in report.problems), show(report)
        assert report.repeated == 0
        assert report.lost > 0
        assert sum(epoch.samples for epoch in report.epochs) + report.lost == run.saved[-1].used, (before, show(report))


def test_a_skip_is_lost_before_anything_follows_it(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=100, batch_size=5, lanes=2)
    run.attempt(workers=2, steps=3)
    run.attempt(workers=2, steps=0, skip=2)
    report = audit(tmp_path)
    assert report.verdict == "20 lost, 0 repeated"
    assert [lost.position for lost in report.first_lost] == list(range(30, 40))


def test_a_whole_epoch_that_was_skipped_is_lost(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=20, batch_size=5, lanes=2)
    run.attempt(workers=2, steps=2)
    run.attempt(workers=2, steps=3, skip=4)
    report = audit(tmp_path)
    assert report.verdict == "40 lost, 0 repeated"
    assert "epochs 1 to 2 have no line in the log" in report.problems
    assert [(epoch.first, epoch.last, epoch.lost) for epoch in report.epochs] == [
        (0, 0, 0),
        (1, 2, 40),
        (3, 3, 0),
        (4, 4, 0),
    ]


def test_the_first_attempt_of_several_taken_away_is_lost(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=100, batch_size=5, lanes=2)
    run.attempt(workers=1, steps=3)
    run.attempt(workers=1, steps=3)
    (tmp_path / "samples" / file_name(1, 0)).unlink()
    report = audit(tmp_path)
    assert report.verdict == "30 lost, 0 repeated"
    assert "attempt 1 has no readable file" in report.notes


def test_a_record_that_begins_in_the_middle_proves_nothing_about_what_was_before(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=100, batch_size=5, lanes=2)
    run.attempt(workers=2, steps=12, skip=3)
    report = audit(tmp_path)
    assert report.verdict == "0 lost, 0 repeated"
    assert not report.clean
    assert report.problems == (
        "attempt 1 begins at epoch 0, position 30, but what was used before it was not recorded",
    )


def test_a_line_missing_at_the_very_end_is_lost_when_every_worker_wrote(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=100, batch_size=2, lanes=4)
    run.attempt(workers=2, steps=5)
    path = tmp_path / "samples" / file_name(1, 1)
    write_lines(path, lines_of(path)[:-1])
    report = audit(tmp_path)
    assert report.verdict == "2 lost, 0 repeated"
    assert "step 5, the last, was recorded without lane 3 micro-batch 0" in report.problems
    assert report.first_lost[0].where == Where(epoch=0, step=5, lane=3, attempt=1, worker=1)


def test_a_kill_while_writing_hides_nothing_of_the_step_before(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=100, batch_size=2, lanes=4)
    run.attempt(workers=4, steps=5, behind=(3,))
    path = tmp_path / "samples" / file_name(1, 3)
    write_lines(path, lines_of(path)[:-1])
    report = audit(tmp_path)
    assert report.lost >= 2, show(report)


def test_a_lane_recorded_by_two_workers_is_named(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=100, batch_size=2, lanes=4)
    run.attempt(workers=2, steps=5)
    first, second = (tmp_path / "samples" / file_name(1, worker) for worker in (0, 1))
    write_lines(first, [*lines_of(first), lines_of(second)[4]])
    report = audit(tmp_path)
    assert report.verdict == "0 lost, 2 repeated"
    assert report.problems == ("attempt 1, step 2: lane 3 was recorded by workers 0, 1",)
    assert [where.worker for where in report.first_repeated[0].where] == [0, 1]
    write_lines(second, [line for line in lines_of(second) if (line.get("step"), line.get("lane")) != (3, 3)])
    assert audit(tmp_path).first_lost[0].where == Where(epoch=0, step=3, lane=3, attempt=1, worker=1)


WHOLE = {"step": 2, "epoch": 0, "epoch_step": 1, "lane": 0, "micro_batch": 0, "position": 8, "ids": [1, 2]}
DAMAGED: dict[str, tuple[bytes, str]] = {
    "half": (b'{"step": 2, "epoch":', "Expecting value"),
    "zeros": (b"\x00\x00\x00\x00", "Expecting value"),
    "empty": (b"", "Expecting value"),
    "not text": (b"\xff\xfe", "not UTF-8 text"),
    "a list": (b"[1, 2]", "indices must be integers"),
    "no ids": (json.dumps({**WHOLE, "ids": None}).encode(), "NoneType"),
    "no lane": (json.dumps({name: value for name, value in WHOLE.items() if name != "lane"}).encode(), "no 'lane'"),
    "other lane": (json.dumps({**WHOLE, "lane": 7}).encode(), "lane 7 of 4 lanes"),
    "negative": (json.dumps({**WHOLE, "position": -8}).encode(), "position is negative"),
    "no samples": (json.dumps({**WHOLE, "ids": []}).encode(), "it has no samples"),
    "half a sample": (json.dumps({**WHOLE, "ids": [1.5]}).encode(), "float"),
    "too large": (json.dumps({**WHOLE, "step": 1 << 40}).encode(), "greater than maximum"),
    "too far": (json.dumps({**WHOLE, "position": 1 << 62}).encode(), "position 4611686018427387904"),
}


@pytest.mark.parametrize(("damage", "why"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_line_is_named_and_its_samples_are_lost(tmp_path: Path, damage: bytes, why: str) -> None:
    run = RecordedRun(tmp_path, samples=100, batch_size=2, lanes=4)
    run.attempt(workers=2, steps=5)
    path = tmp_path / "samples" / file_name(1, 0)
    lines = path.read_bytes().split(b"\n")
    lines[3] = damage
    path.write_bytes(b"\n".join(lines))
    report = audit(tmp_path)
    assert report.verdict == "2 lost, 0 repeated"
    assert len(report.problems) == 1
    assert report.problems[0].startswith("attempt-0001-worker-00000.jsonl, line 4 is damaged (")
    assert why in report.problems[0]


@pytest.mark.parametrize(("was", "now", "lost"), [(b",", b"\n", 4), (b"}\n", b"},", 8)])
def test_lines_that_are_json_only_together_are_damaged(tmp_path: Path, was: bytes, now: bytes, lost: int) -> None:
    run = RecordedRun(tmp_path, samples=100, batch_size=4, lanes=4)
    run.attempt(workers=2, steps=5)
    path = tmp_path / "samples" / file_name(1, 0)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = now.join(lines[3].rsplit(was, 1))
    path.write_bytes(b"".join(lines))
    report = audit(tmp_path)
    assert report.verdict == f"{lost} lost, 0 repeated"
    assert report.problems[0].startswith("attempt-0001-worker-00000.jsonl, line 4 is damaged (")


def test_a_position_beyond_the_epoch_is_named(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=100, batch_size=2, lanes=4)
    run.attempt(workers=2, steps=5)
    path = tmp_path / "samples" / file_name(1, 0)
    lines = lines_of(path)
    lines[3]["position"] = 99
    write_lines(path, lines)
    report = audit(tmp_path)
    assert report.verdict == "2 lost, 0 repeated"
    assert "attempt 1, step 2: lane 0 has position 99, beyond the 100 samples of epoch 0" in report.problems


def test_an_id_that_the_dataset_does_not_have_is_a_problem(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=100, batch_size=2, lanes=4)
    run.attempt(workers=2, steps=5)
    path = tmp_path / "samples" / file_name(1, 0)
    lines = lines_of(path)
    lines[3]["ids"][0] = 100
    write_lines(path, lines)
    assert audit(tmp_path).problems == ("epoch 0: 1 ids are not of the dataset",)


HEADERS: dict[str, tuple[dict[str, Any], str]] = {
    "other position": ({"position": 16}, "attempt-0001-worker-00001.jsonl says position: 16, worker 0 says 0"),
    "other workers": ({"workers": 3}, "attempt-0001-worker-00001.jsonl says workers: 3, worker 0 says 2"),
    "renamed": ({"worker": 0}, "says in its first line that it is attempt-0001-worker-00000.jsonl: it was copied"),
    "no number": ({"lanes": "four"}, "attempt-0001-worker-00001.jsonl, line 1 is damaged, so nothing of the file"),
    "impossible": ({"position": 101}, "attempt-0001-worker-00001.jsonl, line 1 is damaged, so nothing of the file"),
    "not ours": ({"paceline": "tokens"}, "attempt-0001-worker-00001.jsonl, line 1 is damaged, so nothing of the"),
}


@pytest.mark.parametrize(("changed", "text"), HEADERS.values(), ids=HEADERS.keys())
def test_a_header_that_does_not_fit_is_named(tmp_path: Path, changed: dict[str, Any], text: str) -> None:
    RecordedRun(tmp_path, samples=100, batch_size=2, lanes=4).attempt(workers=2, steps=5)
    path = tmp_path / "samples" / file_name(1, 1)
    header, *lines = lines_of(path)
    write_lines(path, [{**header, **changed}, *lines])
    report = audit(tmp_path)
    assert not report.clean
    assert any(text in problem for problem in report.problems), show(report)


def test_a_file_of_a_worker_that_the_attempt_does_not_have_is_named(tmp_path: Path) -> None:
    RecordedRun(tmp_path, samples=100, batch_size=2, lanes=4).attempt(workers=2, steps=5)
    header, *_ = lines_of(tmp_path / "samples" / file_name(1, 1))
    write_lines(tmp_path / "samples" / file_name(1, 2), [{**header, "worker": 2, "workers": 3}])
    problems = audit(tmp_path).problems
    assert "attempt 1 has 2 workers but also a file of worker 2: two runs share the folder" in problems


def test_another_version_is_refused(tmp_path: Path) -> None:
    RecordedRun(tmp_path, samples=100, batch_size=2, lanes=4).attempt(workers=1, steps=5)
    path = tmp_path / "samples" / file_name(1, 0)
    header, *lines = lines_of(path)
    write_lines(path, [{**header, "version": 2}, *lines])
    with pytest.raises(ConfigError, match=r"worker-00000.jsonl is version 2 of the sample log; this paceline reads"):
        audit(tmp_path)


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_without_a_record_says_how_one_is_made(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "run"
    if exists:
        (folder / "samples").mkdir(parents=True)
    text = rf"no sample log in {folder}: .* started with --record-samples or Engine\(record_samples=…\)"
    with pytest.raises(ConfigError, match=text):
        audit(folder)


def test_a_record_of_empty_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / file_name(1, 0)).write_text("")
    with pytest.raises(ConfigError, match=r"no file in .* has a readable first line"):
        audit(tmp_path)


# ---- samplers and streams ----------------------------------------------------------------------------------


def test_with_replacement_positions_are_proved_and_ids_are_not(tmp_path: Path) -> None:
    header = LogHeader(worker=0, workers=1, lanes=1, epoch=0, samples=8, samples_per_epoch=8)
    record = SampleLog.start(tmp_path, 1, header)
    for step in range(4):
        record.add(MicroBatch(step + 1, 0, step, 0, 0, 2 * step, ids=[7, 70]))
        record.commit()
    record.close()
    report = audit(tmp_path)
    assert report.clean, show(report)
    assert not report.ids_proved
    path = tmp_path / "samples" / file_name(1, 0)
    write_lines(path, [line for line in lines_of(path) if line.get("step") != 2])
    assert audit(tmp_path).verdict == "2 lost, 0 repeated"


def streamed(folder: Path, number: int, workers: int, places: dict[int, int], steps: int, first_step: int = 0) -> None:
    """Two lanes, the second with smaller micro-batches."""
    for worker in range(workers):
        lanes = [lane for lane in places if workers == 1 or lane == worker]
        own = {lane: places[lane] for lane in lanes}
        header = LogHeader(worker=worker, workers=workers, lanes=2, epoch=0, stream=True, lane_positions=own)
        record = SampleLog.start(folder, number, header)
        for step in range(first_step, first_step + steps):
            for lane in lanes:
                size = 3 - lane
                position = places[lane] + size * (step - first_step)
                record.add(MicroBatch(step + 1, 0, step, lane, 0, position, count=size))
            record.commit()
        record.close()


def test_a_stream_is_proved_lane_by_lane_through_a_roll_back(tmp_path: Path) -> None:
    streamed(tmp_path, 1, workers=2, places={0: 0, 1: 0}, steps=6)
    streamed(tmp_path, 2, workers=1, places={0: 12, 1: 8}, steps=3, first_step=4)
    report = audit(tmp_path)
    assert report.clean, show(report)
    assert report.stream
    assert report.attempts[0].rolled_back_samples == 10
    assert report.attempts[1].position == 20
    assert [(epoch.samples, epoch.of, epoch.steps) for epoch in report.epochs] == [(35, None, 7)]


@pytest.mark.parametrize(("change", "verdict"), [("delete", "2 lost, 0 repeated"), ("double", "0 lost, 2 repeated")])
def test_a_lane_of_a_stream_that_misses_or_doubles_a_line_is_found(tmp_path: Path, change: str, verdict: str) -> None:
    streamed(tmp_path, 1, workers=2, places={0: 0, 1: 0}, steps=6)
    path = tmp_path / "samples" / file_name(1, 1)
    lines = lines_of(path)
    write_lines(path, lines[:3] + (lines[2:3] if change == "double" else []) + lines[3 + (change == "delete") :])
    report = audit(tmp_path)
    assert report.verdict == verdict
    where = report.first_lost[0].where if change == "delete" else report.first_repeated[0].where[0]
    assert where == Where(epoch=0, step=3 if change == "delete" else 2, lane=1, attempt=1, worker=1)


def test_a_lane_of_a_stream_that_begins_behind_its_record_is_named(tmp_path: Path) -> None:
    streamed(tmp_path, 1, workers=2, places={0: 0, 1: 0}, steps=6)
    streamed(tmp_path, 2, workers=2, places={0: 18, 1: 14}, steps=2, first_step=6)
    report = audit(tmp_path)
    assert report.verdict == "2 lost, 0 repeated"
    assert report.problems == (
        "attempt 2 begins at epoch 0, position 14 of lane 1, but the log before it ends at epoch 0, position 12",
    )


def test_a_stream_and_a_dataset_in_one_record_are_a_problem(tmp_path: Path) -> None:
    streamed(tmp_path, 1, workers=1, places={0: 0, 1: 0}, steps=2)
    header = LogHeader(worker=0, workers=1, lanes=2, epoch=0, samples=8, samples_per_epoch=8)
    SampleLog.start(tmp_path, 2, replace(header, epoch=0)).close()
    assert "some attempts trained on a stream and some did not" in audit(tmp_path).problems[0]
