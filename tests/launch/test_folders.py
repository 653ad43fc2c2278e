"""What is swept and removed is this user's own, whatever other users have planted under the names that we look for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.launch.folders import LOCK, MEMORY, RUN, empty, memory_folder, run_folder, sweep
from tests.other_user import NOBODY, as_nobody, needs_root, shared_folder

PLANTED = "paceline-1-0123abcd"


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


@pytest.fixture
def memory(shared: Path) -> Path:
    folder = shared / "shm"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def victim(shared: Path) -> Path:
    """Somebody's folder with something in it, to which others may write."""
    folder = shared / "victim"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "precious").write_text("not to be lost")
    return folder


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A TMPDIR that belongs to the other user, who can rename what is in it."""
    with shared_folder() as folder:
        os.chown(folder, NOBODY, NOBODY)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        yield folder


# -- the sweep ---------------------------------------------------------------------------------------------------------


@needs_root
def test_a_planted_memory_folder_that_points_to_another_folder_removes_nothing(memory: Path, victim: Path) -> None:
    back = f"ln -s {memory / PLANTED} {victim / MEMORY}"
    as_nobody(f"mkdir {PLANTED}; : > {PLANTED}/{LOCK}; ln -s {victim} {PLANTED}/{RUN}; {back}", memory)
    sweep(memory)
    assert (victim / "precious").exists()
    assert (memory / PLANTED).exists(), "it is not ours to remove"


@needs_root
def test_a_link_in_the_place_of_a_memory_folder_is_not_followed(memory: Path, victim: Path) -> None:
    victim.chmod(0o755)
    (victim / LOCK).touch()
    (victim / RUN).symlink_to(victim)
    (victim / MEMORY).symlink_to(memory / PLANTED)
    as_nobody(f"ln -s {victim} {PLANTED}", memory)
    sweep(memory)
    assert (victim / "precious").exists()
    assert (memory / PLANTED).is_symlink()


@needs_root
def test_a_memory_folder_of_ours_to_which_others_may_write_is_left_alone(memory: Path, victim: Path) -> None:
    left = memory / PLANTED
    left.mkdir()
    left.chmod(0o777)
    (left / LOCK).touch()
    as_nobody(f"ln -s {victim} {left / RUN}; ln -s {left} {victim / MEMORY}", memory)
    sweep(memory)
    assert (victim / "precious").exists()


@needs_root
def test_a_run_folder_that_another_user_made_is_not_swept_with_our_memory_folder(memory: Path, shared: Path) -> None:
    left = memory / PLANTED
    left.mkdir(mode=0o700)
    (left / LOCK).touch()
    (left / RUN).symlink_to(shared / "run")
    as_nobody(f"mkdir run; echo theirs > run/file; ln -s {left} run/{MEMORY}", shared)
    sweep(memory)
    assert not left.exists()
    assert (shared / "run" / "file").exists()


def test_links_in_a_memory_folder_lead_the_sweep_nowhere(memory: Path, victim: Path) -> None:
    left = memory / PLANTED
    (left / "folder").mkdir(mode=0o700, parents=True)
    left.chmod(0o700)
    (left / LOCK).touch()
    for place in (left / "link", left / "folder" / "link"):
        place.symlink_to(victim)
    sweep(memory)
    assert not left.exists()
    assert (victim / "precious").exists()


# -- run folders -------------------------------------------------------------------------------------------------------


@needs_root
def test_a_run_folder_that_was_renamed_is_removed_and_what_has_its_name_is_not(place: Path, victim: Path) -> None:
    with run_folder() as run:
        as_nobody(f"mv {run.name} elsewhere; ln -s {victim} {run.name}", place)
        (place / "elsewhere" / "file").touch()
    assert (victim / "precious").exists()
    assert list((place / "elsewhere").iterdir()) == [], "its own is empty, wherever it is"


@needs_root
def test_a_folder_of_ours_that_took_the_run_folder_s_name_is_not_removed(place: Path) -> None:
    (place / "ours").mkdir(mode=0o700)
    (place / "ours" / "precious").touch()
    with run_folder() as run:
        as_nobody(f"mv {run.name} elsewhere; mv ours {run.name}", place)
    assert (run / "precious").exists()


@needs_root
def test_a_run_folder_that_was_swapped_before_it_was_opened_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tempfile.mkdtemp

    def swapped(**named: str) -> str:
        made = make(**named)
        as_nobody(f"mv {made} elsewhere; mkdir {made}", place)
        return made

    monkeypatch.setattr(tempfile, "mkdtemp", swapped)
    with pytest.raises(LaunchError, match=r"another user has put something in its place.*set TMPDIR"), run_folder():
        pass


# -- the memory folder -------------------------------------------------------------------------------------------------


def test_an_emptied_vault_keeps_its_lock_and_follows_no_link(memory: Path, victim: Path) -> None:
    with run_folder() as run, memory_folder(run, memory) as kept:
        (kept / "slot-0-0").touch()
        (kept / "link").symlink_to(victim)
        empty(kept)
        assert sorted(entry.name for entry in kept.iterdir()) == [LOCK, RUN]
        assert (victim / "precious").exists()
    assert list(memory.iterdir()) == []


@needs_root
def test_what_another_user_put_in_the_place_of_a_memory_folder_is_not_removed(shared: Path, victim: Path) -> None:
    memory = shared / "shm"
    memory.mkdir()
    os.chown(memory, NOBODY, NOBODY)
    with run_folder() as run, memory_folder(run, memory) as kept:
        as_nobody(f"mv {kept.name} elsewhere; ln -s {victim} {kept.name}", memory)
        with pytest.raises(OSError):
            empty(kept)
    assert (victim / "precious").exists()
