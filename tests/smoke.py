"""Smoke tests, of which `make test` has each promise once: of a test's many cases the first of each kind.

metafunc.parametrize("case", first_of_each(cases, kind=lambda case: (case.strategy, case.backend)))
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest


def first_of_each(cases: Iterable[Any], kind: Callable[[Any], Hashable], name: Callable[[Any], str] = str) -> list[Any]:
    """All cases, as parameters; the first of each kind is marked as a smoke test. A case of kind None never is."""
    seen: set[Hashable] = {None}
    parameters = []
    for case in cases:
        marks = [pytest.mark.smoke] if kind(case) not in seen else []
        seen.add(kind(case))
        parameters.append(pytest.param(case, id=name(case), marks=marks))
    return parameters
