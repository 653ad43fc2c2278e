"""Every code block of the README and of docs/ is run, checked, or says why not (`tests/docs/blocks.py`)."""

from __future__ import annotations

import pytest

from tests.docs.blocks import CODE, OUTPUT, QUOTES, ROOT, Block, blocks, table
from tests.docs.checks import CHECKS, check_shell

ALL = list(blocks())


def checked(block: Block) -> None:
    if block.language in CHECKS:
        CHECKS[block.language](block.code)
    else:
        for command in block.commands:
            check_shell(command)


def test_every_block_that_is_not_quoted_code_is_what_it_says() -> None:
    """Also those that are run, or not run for a reason: their options and names are there."""
    wrong = []
    for block in ALL:
        if block.treatment in ("checked", "run", "not run"):
            try:
                checked(block)
            except (AssertionError, SyntaxError, ValueError, ImportError) as error:
                wrong.append(f"{block}: {type(error).__name__}: {error}")
    print(table())
    assert not wrong, "\n".join(wrong)


def test_every_block_has_a_language_that_a_test_knows() -> None:
    unknown = [f"{block}: {block.language}" for block in ALL if block.language not in (*CODE, *OUTPUT)]
    assert not unknown, unknown


def test_a_marker_says_why_or_names_a_file_that_is_there() -> None:
    for block in ALL:
        if block.marker == "not run":
            assert block.reason, f"{block}: `not run` without a reason"
        if block.marker in QUOTES:
            assert block.reason, f"{block}: which file?"
            for file in block.reason.split():
                assert (ROOT / file).is_file(), f"{block}: {file} is not there"


@pytest.mark.parametrize(
    ("language", "code", "text"),
    [
        ("python", "paceline.Engine(lanez=2)", "has no lanez="),
        ("python", "paceline.Enginee()", "paceline has no Enginee"),
        ("python", "engine.step_count", "an Engine has no step_count"),
        ("python", "engine.checkpoints('runs', keeep=3)", "has no keeep="),
        ("python", "from paceline.data import Tokens", "has no Tokens"),
        ("python", "paceline.TrainingArguments('runs', epochs=3)", "has no epochs="),
        ("bash", "paceline run --wokers 2 train.py", "--wokers"),
        ("bash", "paceline run --workers 2 examples/none.py", "there is no examples/none.py"),
        ("bash", "paceline run examples/train_gpt.py --stepps 3 | grep weights", "knows no --stepps"),
        ("bash", "X=1 paceline run --strategy zero9 train.py", "'zero9' is no strategy"),
        ("bash", "cd runs && paceline chaos -- run --wokers 4 train.py", "--wokers"),
        ("bash", "kill -9 $(pgrepp train.py)", "'pgrepp' is no program"),
        ("bash", "make everything", "no target everything"),
        ("bash", "python benchmarks/loader.py --no-such-flag", "knows no --no-such-flag"),
        ("yaml", "wokers: 4", "not known"),
        ("toml", 'workers = 4\nstrategy = "zero9"', "zero9"),
    ],
)
def test_a_block_that_is_wrong_is_found(language: str, code: str, text: str) -> None:
    with pytest.raises((AssertionError, ValueError)) as found:
        checked(Block(page="page.md", line=1, language=language, code=code))
    assert text in str(found.value)
