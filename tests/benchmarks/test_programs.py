"""The plain programs that are measured: on the instant network they do all that is theirs, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

from benchmarks.plain_programs import ON_INSTANT_NETWORK, PROGRAMS, all_reduces, alone, repeated
from shoal.bench.training_job import corpus_file

TOKENS, WIDTH, LAYERS = 128, 256, 6


def with_group(place, backend: str, program: Any, *args: Any) -> Any:
    """What `program(group)` returns, for a group of all ranks."""
    dist.init_process_group("gloo", store=place.store, rank=place.rank, world_size=place.size)
    try:
        return program(dist.new_group(backend=backend), *args)
    finally:
        dist.destroy_process_group()


def losses(group: Any, corpus: Path) -> tuple[list[float], list[float]]:
    made = (ON_INSTANT_NETWORK["ddp"], alone)
    ddp, bare = ([step() for _ in range(3)] for step in (make(group, corpus, tokens=TOKENS) for make in made))
    return list(ddp), list(bare)


def test_ddp_on_the_instant_network_is_the_bare_model(ranks, tmp_path: Path) -> None:
    """Three updates of DDP, whose buckets come back as they were, give each rank the bare model's losses."""
    outcomes = ranks(2, with_group, "fake", losses, corpus_file(tmp_path))
    assert all(ddp == bare for ddp, bare in outcomes)
    assert outcomes[0] != outcomes[1]


def outputs(group: Any) -> tuple[list[float], list[float]]:
    whole, part = torch.full((4,), torch.nan), torch.full((2,), torch.nan)
    dist.all_gather_into_tensor(whole, torch.tensor([1.0, 2.0]), group=group)
    dist.reduce_scatter_tensor(part, torch.tensor([1.0, 2.0, 3.0, 4.0]), group=group)
    return whole.tolist(), part.tolist()


def test_outputs_of_the_instant_network_are_written(ranks) -> None:
    """FSDP2's gathers and scatters touch the memory that they would touch."""
    first, second = ranks(2, with_group, "fake", outputs)
    assert first == ([1.0, 2.0, 1.0, 2.0], [1.0, 2.0])
    assert second == ([1.0, 2.0, 1.0, 2.0], [3.0, 4.0])


def calls(group: Any, corpus: Path) -> tuple[list[int], list[int], list[int]]:
    tensor, fsdp2 = (PROGRAMS[name](group, corpus, tokens=TOKENS) for name in ("tensor", "fsdp2"))
    numels = all_reduces(tensor)
    repeated(numels, group)()
    return numels, all_reduces(tensor), all_reduces(fsdp2)


@pytest.mark.slow
def test_the_all_reduces_of_a_step_are_found(ranks, tmp_path: Path) -> None:
    """Tensor parallelism: activations, two in each layer's forward, at least as many in its backward; FSDP2: none."""
    for numels, once_more, fsdp2 in ranks(2, with_group, "gloo", calls, corpus_file(tmp_path)):
        assert set(numels) == {TOKENS * WIDTH}
        assert len(numels) >= 4 * LAYERS
        assert numels == once_more
        assert fsdp2 == []


def two_backends(group: Any, corpus: Path) -> tuple[float, float]:
    sums = PROGRAMS["tensor"](group, corpus, tokens=TOKENS)()
    return sums, PROGRAMS["tensor"](dist.new_group(backend="fake"), corpus, tokens=TOKENS)()


def test_two_programs_of_one_process_use_their_own_groups(ranks, tmp_path: Path) -> None:
    """The same ranks, split over Gloo and then over the fake backend, which adds nothing up: another loss."""
    outcomes = ranks(2, with_group, "gloo", two_backends, corpus_file(tmp_path))
    assert outcomes[0][0] == outcomes[1][0]
    assert all(summed != unsummed for summed, unsummed in outcomes)
