"""What users take from `paceline.data` is there under its name."""

from __future__ import annotations

import pytest

import paceline
from paceline import data


@pytest.mark.parametrize("name", data.__all__)
def test_every_name_comes_from_its_home(name: str) -> None:
    assert getattr(paceline.data, name).__name__ == name


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'paceline\.data' has no attribute 'Nothing'"):
        data.Nothing  # noqa: B018
