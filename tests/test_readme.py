"""What the README says is true: its commands run, and the hello world is the example, four lines from plain PyTorch."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.examples.running import hash_in, printed_by

ROOT = Path(__file__).parents[1]


def statements(code: str) -> list[str]:
    """Every statement of the code, one line each; comments, blank lines and docstrings don't count."""
    lines: list[str] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.For):
            lines.append(f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}")
        elif isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            lines.append(ast.unparse(node))
    return lines


def hello_worlds() -> tuple[str, str]:
    section = (ROOT / "README.md").read_text().split("## Hello world")[1].split("</table>")[0]
    plain, ours = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return plain, ours


def test_the_hello_world_changes_at_most_four_lines() -> None:
    plain, ours = (statements(code) for code in hello_worlds())
    changed = [line for line in ours if line not in plain]
    assert len(changed) <= 4, changed
    assert [line for line in plain if line not in ours] == ["loss.backward()"]


def test_the_hello_world_is_the_example() -> None:
    _, ours = hello_worlds()
    assert statements((ROOT / "examples/hello.py").read_text()) == statements(ours)


def commands_of(section: str) -> list[str]:
    """What the section has `paceline` do, in fewer steps, and with two workers where it tries several numbers."""
    text = (ROOT / "README.md").read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    found = re.findall(r"^ *\.venv/bin/paceline (.*?)(?: \|.*)?$", text, re.MULTILINE)
    fewer = {"--steps 20": "--steps 4", "--stop-after 7": "--stop-after 2", "$n": "2", "examples/": f"{ROOT}/examples/"}
    for long, short in fewer.items():
        found = [command.replace(long, short) for command in found]
    return found


@pytest.mark.job
@pytest.mark.smoke
@pytest.mark.timeout(300)
def test_the_first_commands_show_the_promise_and_that_no_sample_was_lost_by_a_resize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    straight, stopped, resumed, audited = commands_of("Two commands")
    expected = hash_in(printed_by(straight))
    printed_by(stopped)
    assert hash_in(printed_by(resumed)) == expected
    assert "\n0 lost, 0 repeated\n" in printed_by(audited)


def test_every_page_that_is_linked_exists() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"
