"""The folders of a job, on each of its hosts; both are gone when the job is.

    TMPDIR/paceline-XXXXXXXX/              run folder: the control socket; only this user can enter
    TMPDIR/paceline-XXXXXXXX/memory ─▶     so that the fork server finds it, should the supervisor be killed
    /dev/shm/paceline-<pid>-<token>/       memory folder of an elastic job: its in-memory checkpoint, which outlives
                                           the worker that wrote it
    /dev/shm/paceline-<pid>-<token>/run ─▶ so that the sweep of a later job finds the run folder

The memory folder is in /dev/shm where that has room, and part of the run folder otherwise. Its supervisor holds a lock
on it: one that is not held any more (host-wide kill, both killed at once) is swept away by the next elastic job, with
its run folder. Both places are open to every local user: what is removed there goes by the rules of `owned_folder`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.errors import LaunchError
from paceline.world.owned_folder import OwnedFolder, open_own_file

SHARED_MEMORY = Path("/dev/shm")
LEAST_FREE = 256 * 2**20
"""A container's default of 64 MiB is soon full, and a write to a full one is a SIGBUS."""
LONGEST_SOCKET_PATH = 100
MEMORY = "memory"
RUN = "run"
LOCK = "held-by-supervisor"

_NAME = re.compile(r"paceline-\d+-[0-9a-f]{8}")


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """A folder that only this user can enter, gone when the job is. Its name must fit a Unix socket address."""
    place = tempfile.gettempdir()
    if len(place) > LONGEST_SOCKET_PATH - len("/paceline-12345678/control.sock"):
        place = "/tmp"
    with open_run_folder(Path(tempfile.mkdtemp(prefix="paceline-", dir=place))) as folder:
        try:
            yield folder.path
        finally:
            remove_folders(folder)


def open_run_folder(path: Path) -> OwnedFolder:
    try:
        return OwnedFolder(path)
    except OSError as error:
        raise LaunchError(
            f"{path}, the run folder of this job, can't be used ({error.strerror}); another user has put something in "
            "its place, or the file system gives files to another user: set TMPDIR to a folder of your own on this host"
        ) from error


def remove_folders(run: OwnedFolder) -> None:
    """The run folder, and the memory folder it points to; the second of two that remove them finds nothing."""
    memory = run.link(MEMORY)
    if memory is not None and _NAME.fullmatch(memory.name):
        with contextlib.suppress(OSError), OwnedFolder(memory) as held:
            held.remove()
    run.remove()


@contextlib.contextmanager
def memory_folder(
    run: Path, shared_memory: Path = SHARED_MEMORY, log: Callable[[str], None] = lambda line: None
) -> Iterator[Path]:
    """Where workers of an elastic job keep what others need should they die; removed with the run folder."""
    sweep(shared_memory)
    if (reason := why_not_in(shared_memory)) is not None:
        log(
            f"paceline: elastic: {reason}; what workers keep for each other is in {run / MEMORY}, which a disk may slow"
        )
        (run / MEMORY).mkdir(mode=0o700)
        yield run / MEMORY
        return
    folder = shared_memory / f"paceline-{os.getpid()}-{secrets.token_hex(4)}"
    (run / MEMORY).symlink_to(folder)  # first, so that a folder never exists that the fork server does not know
    with OwnedFolder.make(folder) as memory:
        (memory.through / RUN).symlink_to(run)
        lock = os.open(memory.through / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
        finally:
            os.close(lock)
            with contextlib.suppress(OSError):
                memory.remove()


def why_not_in(shared_memory: Path) -> str | None:
    """What keeps a job from having its memory folder there; None: nothing does."""
    try:
        free = shutil.disk_usage(shared_memory).free
    except OSError as error:
        return f"{shared_memory} can't be used ({error.strerror})"
    if not os.access(shared_memory, os.W_OK | os.X_OK):
        return f"{shared_memory} can't be written to (mounted read-only, or another user's)"
    if free < LEAST_FREE:
        wanted = f"{LEAST_FREE >> 20} MiB are wanted (a container's --shm-size)"
        return f"{shared_memory} has {free >> 20} MiB free and {wanted}"
    return None


def elsewhere_than_asked(run: Path, asked: str | None) -> str | None:
    """A line for people where the run folder is not in TMPDIR, or in the current folder for want of a better place."""
    if asked is not None and run.parent != Path(asked).absolute():
        if len(asked) > LONGEST_SOCKET_PATH - len("/paceline-12345678/control.sock"):
            why = "is too long for the address of a socket"
        elif not os.path.isdir(asked) or not os.access(asked, os.W_OK | os.X_OK):
            why = "can't be written to"
        elif shutil.disk_usage(asked).free == 0:
            why = "is full"
        else:
            return None
        return f"paceline: TMPDIR={asked} {why}; the job's run folder is {run}"
    if asked is None and run.parent == Path.cwd() != Path("/tmp"):
        return f"paceline: no temporary folder can be written to (TMPDIR names another); the job's run folder is {run}"
    return None


def sweep(shared_memory: Path = SHARED_MEMORY) -> None:
    """Remove memory folders of this user that no supervisor holds, and the run folders of the jobs that left them."""
    for path in shared_memory.glob("paceline-*"):
        if not _NAME.fullmatch(path.name):
            continue
        # Another user's, or just gone, or held.
        with contextlib.suppress(OSError), OwnedFolder(path) as memory, open_own_file(memory.through / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_run_of(memory)
            memory.remove()


def _remove_run_of(memory: OwnedFolder) -> None:
    """Only where it points back: a name may have been given again since."""
    path = memory.link(RUN)
    if path is not None:
        with contextlib.suppress(OSError), OwnedFolder(path) as run:
            if run.link(MEMORY) == memory.path:
                run.remove()


def empty(memory: Path) -> None:
    """The workers whose state it is are gone."""
    with OwnedFolder(memory) as held:
        held.empty(keep=(LOCK, RUN))
