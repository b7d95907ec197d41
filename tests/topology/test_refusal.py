"""A layout that cannot be is refused with a sentence that offers the nearest one that can."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import LayoutError
from shoal.topology.layout import Layout
from shoal.topology.refusal import MOST_RANKS, nearest_divisors, nearest_multiples

SENTENCES: list[tuple[Callable[[], Layout], str]] = [
    (
        lambda: Layout.for_processes(8, tensor=3),
        "8 processes cannot be split by tensor=3; nearest: tensor=2 or tensor=4, or 6 or 9 processes",
    ),
    (
        lambda: Layout.for_processes(8, shard=3, tensor=2),
        "8 processes cannot be split by shard=3 x tensor=2; nearest: shard=2 or shard=4, or 6 or 12 processes",
    ),
    (
        lambda: Layout.for_processes(2, tensor=16),
        "2 processes cannot be split by tensor=16; nearest: tensor=2, or 16 processes",
    ),
    (
        lambda: Layout.for_processes(7, shard=2, tensor=2),
        "7 processes cannot be split by shard=2 x tensor=2; nearest: 4 or 8 processes",
    ),
    (
        lambda: Layout.for_processes(8, replicate=3, tensor=2),
        "replicate=3 x tensor=2 makes 6 ranks, but there are 8 processes: set replicate=4 or leave it out, "
        "or start 6 processes",
    ),
    (
        lambda: Layout(shard=4, tensor=2, expert=3),
        "expert=3 does not divide shard=4 x tensor=2 = 8, the ranks that experts are laid on; "
        "nearest: expert=2 or expert=4",
    ),
    (
        lambda: Layout(replicate=4, expert=2),
        "expert=2 does not divide shard=1 x context=1 x tensor=1 = 1, the ranks that experts are laid on; "
        "nearest: expert=1",
    ),
    (lambda: Layout(tensor=0), "tensor=0: a size is at least 1; leave it out, or set tensor=1"),
    (lambda: Layout(shard=-2), "shard=-2: a size is at least 1; leave it out, or set shard=1"),
    (lambda: Layout.for_processes(0), "processes=0: a size is at least 1; leave it out, or set processes=1"),
    (lambda: Layout(replicate=10**12), f"replicate={10**12}: a layout has at most {MOST_RANKS} ranks; lower it"),
    (
        lambda: Layout(replicate=2**15, shard=2**15),
        f"replicate=32768 x shard=32768 makes {2**30} ranks: a layout has at most {MOST_RANKS}; lower one of them",
    ),
    (lambda: Layout.from_dict({"tensor": True}), "tensor=True: a size is a whole number, such as tensor=2"),
    (lambda: Layout.from_dict({"tensor": 2.0}), "tensor=2.0: a size is a whole number, such as tensor=2"),  # pyright: ignore[reportArgumentType]
    (lambda: Layout.from_dict({"tensor": "2"}), "tensor='2': a size is a whole number, such as tensor=2"),  # pyright: ignore[reportArgumentType]
]


@pytest.mark.parametrize(("build", "sentence"), SENTENCES, ids=[sentence.split(":")[0] for _, sentence in SENTENCES])
def test_each_impossible_layout_has_its_sentence(build: Callable[[], Layout], sentence: str) -> None:
    """What was found, the rule, the repair; and the exit code of a wrong run file."""
    with pytest.raises(LayoutError) as refused:
        build()
    assert str(refused.value) == sentence
    assert refused.value.exit_code == 2


def test_the_largest_layout_is_allowed() -> None:
    """The bound itself is legal."""
    assert Layout(replicate=MOST_RANKS).world_size == MOST_RANKS


@given(st.integers(1, 200), st.integers(1, 12), st.integers(1, 12))
def test_every_offered_repair_works(processes: int, shard: int, tensor: int) -> None:
    """Whoever does what the sentence says gets a layout: each size and each number of processes that it offers."""
    sizes = {"shard": shard, "tensor": tensor}
    try:
        layout = Layout.for_processes(processes, **sizes)
    except LayoutError as refused:
        _, offers = str(refused).split("nearest: ")
        for axis, size in re.findall(r"(\w+)=(\d+)", offers):
            assert Layout.for_processes(processes, **{**sizes, axis: int(size)}).world_size == processes
        for count in re.findall(r"(?<![=\d])(\d+)", offers):
            assert Layout.for_processes(int(count), **sizes).world_size == int(count)
    else:
        assert layout.world_size == processes


@given(st.integers(1, 500), st.integers(1, 500))
def test_nearest_divisors_leave_none_between(number: int, wanted: int) -> None:
    """They divide, lie on both sides, and no other divisor is nearer on its side."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below, above = [d for d in divisors if d <= wanted], [d for d in divisors if d > wanted]
    assert nearest_divisors(number, wanted) == below[-1:] + above[:1]


@given(st.integers(1, 50), st.integers(1, 500))
def test_nearest_multiples_enclose(unit: int, wanted: int) -> None:
    """Positive multiples, the last at most `wanted` and the first above it."""
    multiples = range(unit, wanted + unit + 1, unit)
    assert (
        nearest_multiples(unit, wanted)
        == [m for m in multiples if m <= wanted][-1:] + [m for m in multiples if m > wanted][:1]
    )
