"""Slurm's compressed notations, against lists that are compressed here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import EnvironmentFault
from shoal.launcher.environment import hosts, tasks_per_node

NAMES = st.from_regex(r"[a-z][a-z-]{0,6}", fullmatch=True)
SPANS = st.lists(st.tuples(st.integers(0, 900), st.integers(0, 20), st.integers(1, 5)), min_size=1, max_size=4)


@given(st.lists(st.tuples(NAMES, SPANS), min_size=1, max_size=4))
def test_a_host_list_gives_back_what_was_compressed(groups):
    """Expanding name[first-last,...] gives every number of every span, in order, with its zeros."""
    written = ",".join(
        f"{name}[{','.join(f'{first:0{width}d}-{first + more:0{width}d}' for first, more, width in spans)}]"
        for name, spans in groups
    )
    expected = [
        f"{name}{number:0{max(width, len(str(first)))}d}"
        for name, spans in groups
        for first, more, width in spans
        for number in range(first, first + more + 1)
    ]
    assert hosts(written) == expected


def test_host_lists_as_slurm_writes_them():
    """Plain names, zeros, single numbers and several brackets in one name."""
    assert hosts("n[01-03,7],m2") == ["n01", "n02", "n03", "n7", "m2"]
    assert hosts("login.site.org") == ["login.site.org"]
    assert hosts("r[1-2]n[1-2]x") == ["r1n1x", "r1n2x", "r2n1x", "r2n2x"]


@pytest.mark.parametrize(
    "text", ["", "n[1-3", "n]1", "n[3-1]", "n[a]", "n[]", "a,,b", "n[1-99999999]", "a[1-999]b[1-999]"]
)
def test_a_host_list_that_is_none_is_refused(text):
    """Broken brackets, ranges that run backwards and absurd sizes are named, not guessed at and not expanded."""
    with pytest.raises(EnvironmentFault, match="host list"):
        hosts(text)


@given(st.lists(st.tuples(st.integers(1, 128), st.integers(1, 40)), min_size=1, max_size=5))
def test_task_counts_give_back_what_was_compressed(groups):
    """n(xk) stands for k nodes of n tasks."""
    written = ",".join(f"{tasks}(x{times})" if times > 1 else str(tasks) for tasks, times in groups)
    assert tasks_per_node(written) == [tasks for tasks, times in groups for _ in range(times)]


@pytest.mark.parametrize("text", ["", "2(x3", "2x3", "two", "1,,1", "1(x9999999)"])
def test_task_counts_that_are_none_are_refused(text):
    """What cannot be read is named."""
    with pytest.raises(EnvironmentFault, match="task count"):
        tasks_per_node(text)
