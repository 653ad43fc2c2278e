"""Every fenced block of the README and of docs/, and what a test does with it.

    <!-- run -->                     before a block of commands: it runs as a job; before Python, `run: job` does that
    <!-- not run: needs a GPU -->    it is only checked, and this is why
    <!-- tested by: tests/… -->      that file runs it; `verbatim: FILE`, `file FILE` and `diff FILE FILE` quote files,
                                     which the tests of those pages compare
    (nothing)                        Python runs, in a forked worker; commands are parsed, and data are read

What runs is checked too: what it imports is there, and the options and scripts of a command.

`python -m tests.docs.blocks` prints where each is and how many there are of each kind.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>```+)(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)(?P=ticks) *$", re.M | re.S
)
MARKER = re.compile(r"<!-- (run|not run|tested by|verbatim|file|diff)(?:: | )?(.+?)? -->\s*$")
QUOTES = ("tested by", "verbatim", "file", "diff")
COMMAND = re.compile(r"^(?:\$ )?((?:[A-Z_]+=\S+ )*(?:paceline|python|torchrun) (?!\w+:).*)$")
CODE = ("python", "bash", "yaml", "toml")
OUTPUT = ("", "text", "diff", "json", "console")


@dataclass(frozen=True)
class Block:
    """One fenced block, where it stands, and the marker before it."""

    page: str
    line: int
    language: str
    code: str
    marker: str | None = None
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def treatment(self) -> str:
        """run, tested (by another file), not run (and why), checked; or output, which is no code."""
        if self.marker is not None:
            return {"run": "run", "not run": "not run"}.get(self.marker, "tested")
        if self.language == "python":
            return "run"
        return "checked" if self.language in CODE or self.commands else "output"

    @property
    def commands(self) -> list[str]:
        """Command lines, of a shell's block all and of an output's those that a person typed."""
        if self.language == "bash":
            return [self.code]
        if self.language not in OUTPUT or self.language == "diff":
            return []
        found = [COMMAND.match(line) for line in self.code.splitlines()]
        return [re.split(r" {4,}", line[1])[0] for line in found if line]  # what follows wide space is a remark


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text()
        for found in FENCE.finditer(text):
            said = MARKER.search(text[: found.start()].rstrip() if text[: found.start()].strip() else "")
            code = re.sub(rf"^{found['indent']}", "", found["code"], flags=re.M)
            yield Block(
                page=str(page.relative_to(ROOT)),
                line=text[: found.start()].count("\n") + 1,
                language=found["language"],
                code=code,
                marker=said[1] if said else None,
                reason=said[2] if said else None,
            )


def counts() -> Counter[tuple[str, str]]:
    """How many blocks of each language have each treatment."""
    return Counter((block.treatment, block.language or "commands") for block in blocks() if block.treatment != "output")


def table() -> str:
    """The counts in words, one line for each treatment."""
    found = counts()
    lines = []
    for treatment in ("run", "tested", "checked", "not run"):
        of = {language: n for (kind, language), n in sorted(found.items()) if kind == treatment}
        lines.append(f"{treatment:8} {sum(of.values()):4}   " + ", ".join(f"{n} {name}" for name, n in of.items()))
    return "\n".join([*lines, f"{'blocks':8} {sum(found.values()):4}"])


if __name__ == "__main__":
    for block in blocks():
        if block.treatment != "output":
            print(f"{block.treatment:8} {block.language or 'commands':8} {block}  {block.reason or ''}")
    print(table())
