"""Code in a guide or recipe is a file: a comment above the block names it, and the block is that file, verbatim.

<!-- diff examples/guides/before/with_ddp.py examples/guides/from_ddp.py -->      both whole, as one diff
<!-- file examples/cookbook/ema.py -->                                            one whole

python -m tests.examples.pages        writes every such block again, after a file has changed
"""

from __future__ import annotations

import re
from difflib import unified_diff
from pathlib import Path

from tests.examples.running import ROOT

PAGES = sorted([*(ROOT / "docs" / "guides").glob("*.md"), *(ROOT / "docs" / "cookbook").glob("*.md")])
_BLOCK = re.compile(r"(<!-- (diff|file) ([^>]+) -->\n)```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def diff_of(before: Path, after: Path) -> str:
    """Every line of both, in one diff without its three lines of header."""
    old, new = (path.read_text().splitlines() for path in (before, after))
    lines = list(unified_diff(old, new, lineterm="", n=max(len(old), len(new))))[3:]
    return "".join(f"{line}\n" for line in lines)


def shown(kind: str, names: list[str]) -> str:
    paths = [ROOT / name for name in names]
    if kind == "diff":
        before, after = paths
        return diff_of(before, after)
    (path,) = paths
    return path.read_text()


def blocks(page: Path) -> list[tuple[str, list[str], str]]:
    """Kind, names of the files, and the text, of each block that is a file's."""
    return [(kind, names.split(), text) for _, kind, names, text in _BLOCK.findall(page.read_text())]


def rewritten(text: str) -> str:
    def block(found: re.Match[str]) -> str:
        marker, kind, names, _ = found.groups()
        return f"{marker}```{'diff' if kind == 'diff' else 'python'}\n{shown(kind, names.split())}```"

    return _BLOCK.sub(block, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rewritten(page.read_text()))
