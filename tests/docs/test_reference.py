"""What the reference tells by hand is there: the Engine's arguments, and the members of a prepared loader."""

from __future__ import annotations

import inspect
import re

import paceline
from paceline.engine.evaluation import EvaluationLoader
from paceline.engine.loop import PreparedLoader
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs/reference/paceline.md").read_text()


def test_every_argument_of_an_engine_is_explained_once() -> None:
    told = inspect.cleandoc(str(paceline.Engine.__init__.__doc__)).split("Args:\n")[1]
    names = re.findall(r"^- `(\w+)`: ", told, re.MULTILINE)
    parameters = inspect.signature(paceline.Engine).parameters.values()
    assert names == [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]


def test_the_members_of_a_prepared_loader_are_there() -> None:
    training, evaluation = PAGE.split("## A prepared loader\n")[1].split("| of a loader for evaluation | |")
    for kind, text in ((PreparedLoader, training), (EvaluationLoader, evaluation.split("\n:::")[0])):
        named = set(re.findall(r"`loader\.(\w+)", text))
        assert named
        assert not (missing := [name for name in named if not hasattr(kind, name)]), (kind, missing)
