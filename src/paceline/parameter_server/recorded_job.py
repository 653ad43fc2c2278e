"""What a recorded run says about itself, so that one process can be started to do it again.

    script      target, arguments, module or not, the folder it ran in, a digest of the file
    engine      lanes, seed, threads, accumulate, the torch build, …
    keys        a digest of the key table: another model has another
    weights     a digest of those that training began with

Worker 0's word counts: a server has no accelerator, say, and need not know what the workers compute on.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def facts_of(engine: Mapping[str, Any]) -> dict[str, Any]:
    return {"script": started_script(), "engine": dict(engine)}


def started_script() -> dict[str, Any]:
    """How this process was started, so that it can be started again."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return {
        "target": sys.argv[0] if spec is None else spec.name.removesuffix(".__main__"),
        "arguments": sys.argv[1:],
        "is_module": spec is not None,
        "folder": os.getcwd(),
        "digest": script_digest(getattr(main, "__file__", None)),
    }


def script_digest(file: str | None) -> str | None:
    try:
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None
