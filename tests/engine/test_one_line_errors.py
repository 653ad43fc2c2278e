"""What a user reads when a script fails under plain python."""

from __future__ import annotations

import sys

import pytest

from paceline.engine.one_line_errors import show_our_errors_in_one_line
from paceline.errors import ConfigError


def shown(error: BaseException, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    show_our_errors_in_one_line()
    try:
        raise error
    except BaseException as caught:
        sys.excepthook(type(caught), caught, caught.__traceback__)
    return capsys.readouterr().err


def test_our_error_is_one_line_with_its_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(ConfigError("lanes=0: a job has at least one lane"), capsys, monkeypatch)
    assert text.startswith("paceline: test_one_line_errors.py:")
    assert text.endswith(": ConfigError: lanes=0: a job has at least one lane\n")
    assert text.count("\n") == 1


def test_other_errors_keep_their_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(ValueError("theirs"), capsys, monkeypatch).startswith("Traceback (most recent call last)")
