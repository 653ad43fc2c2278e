"""SLURM's compressed lists expand to what they were compressed from."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import WorldError
from paceline.world.launchers import expand_nodelist, tasks_per_node

names = st.from_regex(r"[a-z][a-z-]{0,5}", fullmatch=True)
spans = st.tuples(st.integers(0, 40), st.integers(0, 3)).map(lambda span: (span[0], span[0] + span[1]))


def compress(prefix: str, ranges: list[tuple[int, int]], width: int, suffix: str) -> str:
    parts = (f"{a:0{width}d}" if a == b else f"{a:0{width}d}-{b:0{width}d}" for a, b in ranges)
    return f"{prefix}[{','.join(parts)}]{suffix}"


@given(st.lists(st.tuples(names, st.lists(spans, min_size=1, max_size=3), st.sampled_from(["", "-ib"])), min_size=1))
def test_a_node_list_expands_to_the_hosts_in_it(groups: list[tuple[str, list[tuple[int, int]], str]]) -> None:
    width = 2  # zero-padded, as sites name their hosts
    nodelist = ",".join(compress(prefix, ranges, width, suffix) for prefix, ranges, suffix in groups)
    hosts = [
        f"{prefix}{number:0{width}d}{suffix}"
        for prefix, ranges, suffix in groups
        for first, last in ranges
        for number in range(first, last + 1)
    ]
    assert list(expand_nodelist(nodelist)) == hosts


@given(st.lists(names, min_size=1))
def test_plain_names_stay_as_they_are(hosts: list[str]) -> None:
    assert list(expand_nodelist(",".join(hosts))) == hosts


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("node[1-3,7],gpu-02", ["node1", "node2", "node3", "node7", "gpu-02"]),
        ("node[08-10]", ["node08", "node09", "node10"]),
        ("node[9-11]", ["node9", "node10", "node11"]),
        ("rack[0-1]n[1-2]", ["rack0n1", "rack0n2", "rack1n1", "rack1n2"]),
        ("", []),
    ],
)
def test_node_lists_seen_in_the_wild(nodelist: str, hosts: list[str]) -> None:
    assert list(expand_nodelist(nodelist)) == hosts


def test_the_first_host_of_a_huge_list_is_found_at_once() -> None:
    assert next(expand_nodelist("node[0-99999999999]")) == "node0"


@pytest.mark.parametrize("nodelist", ["node[a-b]", "node[1-]", "node[]", "node[-3]", "node[1-3", "node1]", "a,,b", ","])
def test_an_unreadable_node_list_is_quoted(nodelist: str) -> None:
    with pytest.raises(WorldError, match=r"SLURM's node list .*is not of the form"):
        list(expand_nodelist(nodelist))


@given(st.lists(st.tuples(st.integers(1, 16), st.integers(1, 5)), min_size=1, max_size=6))
def test_tasks_per_node_expand_to_one_count_per_host(runs: list[tuple[int, int]]) -> None:
    text = ",".join(str(tasks) if hosts == 1 else f"{tasks}(x{hosts})" for tasks, hosts in runs)
    assert tasks_per_node(text) == [tasks for tasks, hosts in runs for _ in range(hosts)]


@given(st.text(alphabet="0123456789(x),- ", max_size=4))
def test_tasks_per_node_are_read_or_refused_but_never_crash(text: str) -> None:
    with suppress(WorldError):
        assert all(tasks >= 0 for tasks in tasks_per_node(text))


@given(st.text(alphabet="ab0123[]-,", max_size=7))
def test_node_lists_are_read_or_refused_but_never_crash(text: str) -> None:
    with suppress(WorldError):
        assert not any(set("[],") & set(host) for host in islice(expand_nodelist(text), 10))
