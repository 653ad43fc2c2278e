"""What the README says is true: its commands run, its links lead somewhere, and the hello world is the example."""

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


def test_the_hello_world_changes_four_lines_and_prints_the_hash() -> None:
    plain, ours = (statements(code) for code in hello_worlds())
    changed = [line for line in ours if line not in plain]
    changed.remove("engine.print('weights', engine.weights_hash())")
    assert len(changed) == 4, changed
    assert [line for line in plain if line not in ours] == ["loss.backward()"]


def test_the_hello_world_is_the_example() -> None:
    _, ours = hello_worlds()
    assert statements((ROOT / "examples/hello.py").read_text()) == statements(ours)


def section(name: str) -> str:
    return (ROOT / "README.md").read_text().split(f"## {name}\n")[1].split("\n## ")[0]


def commands_of(name: str) -> list[str]:
    """What the section has `paceline` do, in fewer steps."""
    found = re.findall(r"^paceline (.*?)(?: +#.*)?$", section(name), re.MULTILINE)
    fewer = {"--steps 20": "--steps 4", "--stop-after 7": "--stop-after 2", "examples/": f"{ROOT}/examples/"}
    for long, short in fewer.items():
        found = [command.replace(long, short) for command in found]
    return found


@pytest.mark.job
@pytest.mark.smoke
def test_the_hello_world_prints_one_hash_on_one_two_and_three_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = commands_of("Hello world")
    assert [re.findall(r"--workers (\d)", command) for command in commands] == [["1"], ["2"], ["3"]]
    said = [printed_by(command) for command in commands]
    assert len({hash_in(one) for one in said}) == 1, said
    shown = re.findall(r"^(?:\[0\] )?weights (sha256:\w{64})$", section("Hello world"), re.MULTILINE)
    assert len(shown) == 3
    assert len(set(shown)) == 1


@pytest.mark.job
@pytest.mark.smoke
@pytest.mark.timeout(300)
def test_the_first_commands_show_the_promise_and_that_no_sample_was_lost_by_a_resize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    straight, stopped, resumed, audited = commands_of("Try more")
    expected = hash_in(printed_by(straight))
    printed_by(stopped)
    assert hash_in(printed_by(resumed)) == expected
    assert "\n0 lost, 0 repeated\n" in printed_by(audited)


@pytest.mark.parametrize("name", ["Five numbers", "What it costs", "Limits"])
def test_numbers_stand_on_the_pages_that_are_linked_beside_them(name: str) -> None:
    entries = re.findall(r"^(?:- |\| \*\*)(.*?)$(?=\n- |\n\||\n\n|\Z)", section(name), re.MULTILINE | re.DOTALL)
    linked = [(entry, re.findall(r"\]\((docs/[\w/]+\.md)", entry)) for entry in entries]
    checked = [
        (number, pages, entry)
        for entry, pages in linked
        for number in re.findall(r"\d+(?:[.,]\d+)+", re.sub(r"\]\([^)]*\)", "", entry))
        if pages
    ]
    assert len(checked) >= 5
    for number, pages, entry in checked:
        texts = " ".join((ROOT / page).read_text() for page in pages)
        assert re.search(rf"(?<![\d.,]){re.escape(number)}(?!\d)", texts), f"{number} is not on {pages}: {entry}"


def test_as_many_scripts_were_ported_as_it_says() -> None:
    table = (ROOT / "docs/porting.md").read_text().split("| script | lines |")[1].split("\n\n")[0]
    rows = [line for line in table.splitlines()[2:] if line.startswith("| ") and "has no gradient" not in line]
    assert f"**{len(rows)} scripts**" in section("Five numbers")


def linked_from(page: Path) -> list[str]:
    """Relative targets of links and pictures, in markdown and HTML."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'\b(?:src|srcset|href)="([^"]+)"', text)
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors_of(page: Path) -> set[str]:
    """What a heading is linked by: lower case, without punctuation, words joined by hyphens."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_that_is_linked_exists_and_has_the_heading() -> None:
    """Headings inside docs/ are the site's affair (tests/docs/test_site.py): some of its pages fill themselves in."""
    ours = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for page in (*ours, *sorted((ROOT / "docs").rglob("*.md"))):
        for target in linked_from(page):
            name, _, anchor = target.partition("#")
            file = page.parent / name if name else page
            assert file.exists(), f"{page.name} links to {target}, which is not there"
            if anchor and file.suffix == ".md" and page in ours:
                assert anchor in anchors_of(file), f"{page.name} links to {target}: no such heading"
