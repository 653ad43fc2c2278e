"""What happens in a script is told with the script's line, however many frames of ours or of torch lie between."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from paceline.trainer import TrainingArguments
from paceline.world import messages
from paceline.world.script_line import frames_to_script, place_of


def this_line() -> int:
    return sys._getframe(1).f_lineno


def test_a_warning_below_frames_of_torch_names_the_line_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    # The hook is code of ours: torch calls it, a line of this file calls torch.
    code = compile("def hook(*_):\n    messages.warn('told')", messages.__file__, "exec")
    names: dict[str, Any] = {"messages": messages}
    exec(code, names)
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(names["hook"])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        layer(torch.ones(1, 2)); line = this_line()  # fmt: skip  # noqa: E702
    assert [(one.filename, one.lineno) for one in seen] == [(__file__, line)]


def test_code_that_dataclasses_generate_for_us_is_not_the_script() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        TrainingArguments(no_cuda=True); line = this_line()  # fmt: skip  # noqa: E702
    assert [(one.filename, one.lineno) for one in seen] == [(__file__, line)]


def test_where_no_script_has_called_there_is_no_line() -> None:
    inside, script = frames_to_script(None)
    assert (inside, script) == ([], None)


def test_a_place_is_a_file_and_a_line() -> None:
    frame: FrameType = sys._getframe()
    assert place_of(frame) == f"test_script_line.py:{this_line()}"
