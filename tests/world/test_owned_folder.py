"""A folder or file of another user's making is not taken for one's own, by whatever name it goes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from paceline.world.owned_folder import OwnedFolder, open_own_file
from tests.other_user import NOBODY, as_nobody, needs_root, shared_folder


def test_it_is_emptied_and_removed_through_its_descriptor(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    with OwnedFolder.make(tmp_path / "folder") as folder:
        assert folder.path.stat().st_mode & 0o777 == 0o700
        (folder.path / "inner" / "deep").mkdir(parents=True)
        (folder.path / "inner" / "link").symlink_to(outside)
        (folder.path / "link").symlink_to(outside)
        (folder.path / "kept").touch()
        assert folder.link("link") == outside
        assert (folder.link("kept"), folder.link("nothing")) == (None, None)
        folder.empty(keep=["kept"])
        assert [entry.name for entry in folder.path.iterdir()] == ["kept"]
        moved = folder.path.rename(tmp_path / "moved")
        folder.path.mkdir()
        folder.remove()
        assert list(moved.iterdir()) == []
        assert folder.path.exists(), "another folder has its name by now"
        folder.path.rmdir()
        moved.rename(folder.path)
        folder.remove()
    assert [entry.name for entry in tmp_path.iterdir()] == ["outside"]
    assert (outside / "file").exists()


@pytest.mark.parametrize("kind", ["link", "file", "open"])
def test_what_is_no_folder_of_this_user_alone_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o770)
    with pytest.raises(OSError):
        OwnedFolder(tmp_path / kind)


def test_only_a_plain_file_is_opened_and_nothing_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "open").touch()
    (tmp_path / "open").chmod(0o622)
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    with open_own_file(tmp_path / "file") as file:
        assert file.read() == b"text"
    for name in ("link", "open", "fifo", "socket"):
        with pytest.raises(PermissionError, match="not this user's own"):
            open_own_file(tmp_path / name)


@needs_root
def test_another_user_s_are_refused() -> None:
    with shared_folder() as shared:
        as_nobody("mkdir -m 700 folder; touch file", shared)
        assert (shared / "file").stat().st_uid == NOBODY
        with pytest.raises(PermissionError, match="not this user's own"):
            OwnedFolder(shared / "folder")
        with pytest.raises(PermissionError, match="not this user's own"):
            open_own_file(shared / "file")
