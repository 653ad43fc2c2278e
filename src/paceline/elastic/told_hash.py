"""The weights' hash, told to whoever started the job: lines `slot hash` in the file that PACELINE_HASH_FILE names.

`engine.weights_hash()` calls `tell_hash` on every worker; `paceline chaos` reads what two runs of a job have told.
"""

from __future__ import annotations

from pathlib import Path

from paceline.world import environment


def tell_hash(slot: int, digest: str) -> None:
    file = environment.hash_file()
    if file is not None:
        with file.open("a", encoding="utf-8") as out:
            out.write(f"{slot} {digest}\n")


def last_hash(file: Path) -> str | None:
    """Of the last call in the job; None where no worker has made one."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    told = [words for line in lines if len(words := line.split()) == 2]
    return told[-1][1] if told else None
