"""The search for the size of buckets: every size in turn, the fastest in the median stays."""

from __future__ import annotations

from shoal.gradients.replicated import ROUNDS, BucketSearch, candidates

MIB = 1 << 20


def searched(seconds: dict[int, list[float]]) -> BucketSearch:
    """Steps that take as long as `seconds` says of each size, in turn."""
    search, left = BucketSearch(list(seconds)), {size: list(times) for size, times in seconds.items()}
    while search.chosen is None:
        search.note(left[search.size].pop(0))
    return search


def test_the_fastest_median_stays() -> None:
    """One slow first step does not decide, nor one lucky one; ties go to the smaller size."""
    assert searched({1: [9, 1, 1, 1, 1], 2: [2, 2, 2, 2, 2], 4: [3, 0, 3, 3, 3]}).size == 1
    assert searched({1: [2.0] * ROUNDS, 2: [2.0] * ROUNDS}).size == 1


def test_a_search_goes_on_where_it_stood() -> None:
    """The sizes of the steps and the choice are those of a search that was never stopped."""
    whole = BucketSearch([1, 2, 4])
    sizes = []
    for number in range(15):
        sizes.append(whole.size)
        whole.note(float(number % 7))
    first, again = BucketSearch([1, 2, 4]), []
    for number in range(15):
        if number == 6:
            state, first = first.to_state(), BucketSearch([8])
            first.load(state)
        again.append(first.size)
        first.note(float(number % 7))
    assert again == sizes
    assert first.chosen == whole.chosen is not None


def test_sizes_end_where_one_bucket_holds_all() -> None:
    """Powers of two from 1 MiB, 64 MiB at most; a small model has nothing to search."""
    assert candidates(5 * MIB) == [MIB, 2 * MIB, 4 * MIB, 8 * MIB]
    assert candidates(10**9)[-1] == 64 * MIB
    assert BucketSearch(candidates(100)).chosen == MIB
