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
    assert searched({1: [2.5, 1, 1, 1, 1], 2: [1.1] * 5, 4: [1.5, 0.9, 1.5, 1.5, 1.5]}).size == 1
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
    assert first.to_state() == whole.to_state()


def test_a_search_of_an_earlier_version_goes_on() -> None:
    """Its checkpoints have the seconds of all steps in one list."""
    search = BucketSearch([8])
    search.load({"sizes": [1, 2, 4], "seconds": [3.0, 1.0, 2.0, 3.0], "chosen": None})
    assert search.to_state()["tried"] == [[1, [3.0, 3.0]], [2, [1.0]], [4, [2.0]]]
    assert search.size == 2


def test_what_is_far_from_the_best_is_tried_twice() -> None:
    """Of four sizes two are a fifth worse: 4 x 2 + 2 x 3 steps instead of 20; and a size that was good once stays."""
    seconds = {1: 1.2, 2: 1.0, 4: 1.05, 8: 1.2}
    search, taken = BucketSearch(list(seconds)), []
    while search.searching:
        taken.append(search.size)
        search.note(seconds[search.size])
    assert [taken.count(size) for size in seconds] == [2, ROUNDS, ROUNDS, 2]
    assert search.size == 2


def test_a_link_that_changes_meanwhile_begins_the_search_anew() -> None:
    """In the third turn steps become ten times as long, and the order of the sizes another one."""
    before, after = {1: 1.0, 2: 1.05, 4: 1.5}, {1: 15.0, 2: 12.0, 4: 10.0}
    search, steps = BucketSearch(list(before)), 0
    while search.searching:
        search.note((before if steps < 6 else after)[search.size])
        steps += 1
    assert search.size == 4
    assert steps < 6 + 4 * ROUNDS


def test_a_search_begins_again_when_it_is_told_to() -> None:
    """As after a change of the link; where there is one size there is nothing to search."""
    search = searched({1: [1.0] * ROUNDS, 2: [1.05] * ROUNDS})
    search.again()
    assert search.searching
    alone = BucketSearch([1])
    alone.again()
    assert not alone.searching


def test_sizes_end_where_one_bucket_holds_all() -> None:
    """Powers of two from 1 MiB, 64 MiB at most; a small model has nothing to search."""
    assert candidates(5 * MIB) == [MIB, 2 * MIB, 4 * MIB, 8 * MIB]
    assert candidates(10**9)[-1] == 64 * MIB
    assert BucketSearch(candidates(100)).chosen == MIB
