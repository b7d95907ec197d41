"""Parameters that are not divided between ranks, for optimizers that work on whole matrices."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.codec.config import MOMENT_BLOCK as BLOCK
from shoal.comm.config import WireConfig
from shoal.comm.mesh import build_mesh
from shoal.gradients.bucket import ALIGNMENT, flat_layout
from shoal.gradients.build import Summing
from shoal.topology.layout import Layout
from tests.gradients.training import Case, microbatches, synced, take_step
from tests.ranks import TestPlace

SUM_ORDER = 1e-9  # float64; signs of singular vectors cancel, small singular values amplify


class Orthogonal(torch.optim.Optimizer):
    """Steps by the orthogonal factor of a matrix's gradient, as Muon does, and by the gradient of anything else."""

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(_direction(parameter.grad), alpha=-group["lr"])


def _direction(gradient: Tensor) -> Tensor:
    if gradient.ndim != 2:
        return gradient
    u, s, v = torch.linalg.svd(gradient, full_matrices=False)
    return (u * (s / (s + 0.01))) @ v


@given(st.lists(st.integers(0, 300), max_size=12), st.integers(1, 5))
def test_packed_tensors_lie_whole_in_one_piece(lengths: list[int], ranks: int) -> None:
    """Each on a cache line, none over another, and the longest piece is at most 4/3 of an even one, or one tensor."""
    layout = flat_layout(lengths, ranks, undivided=None)
    covered = sorted((layout.starts[n], layout.starts[n] + length) for n, length in enumerate(lengths) if length)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(covered))
    for number, length in enumerate(lengths):
        assert layout.starts[number] % ALIGNMENT == 0
        holding = [rank for rank in range(ranks) if (run := layout.run(number, rank)) is not None and run.numel]
        assert len(holding) == (1 if length else 0)
    lines = [-(-length // ALIGNMENT) for length in lengths]
    bound = max([4 / 3 * sum(lines) / ranks + max(lines, default=0) / 3, *lines])
    assert layout.piece <= bound * ALIGNMENT


BLOCK_OF_768 = [768 * 3072] * 2 + [768 * 768] * 4


@given(st.integers(2, 6), st.lists(st.sampled_from([BLOCK_OF_768, [768 * 3072], [768 * 768] * 3]), min_size=48))
def test_ranks_own_alike_over_all_buckets(ranks: int, buckets: list[list[int]]) -> None:
    """What a bucket cannot divide evenly goes to another rank each time: no rank owns 1.4 times its share."""
    held = [0] * ranks
    for number, lengths in enumerate(buckets):
        layout = flat_layout(lengths, ranks, undivided=None, number=number)
        for each, length in enumerate(lengths):
            held[layout.starts[each] // layout.piece] += length
    assert max(held) < 1.4 * sum(held) / ranks


def trained(place: TestPlace, zero: int | None, whole: bool) -> tuple[dict[str, Tensor], list[tuple[int, ...]]]:
    """The parameters after four steps, and the shapes of what this rank's optimizer steps."""
    layout = Layout(replicate=place.size) if zero is None else Layout(shard=place.size)
    case = Case(layout, zero, steps=4)
    mesh = build_mesh(layout, place.rank, store=place.store, device=torch.device("cpu"), wire=WireConfig(timeout_s=180))
    net, gradients = synced(case, mesh, Summing(undivided=None if whole else ALIGNMENT))
    optimizer = Orthogonal([owned.parameter for owned in gradients.owned], lr=0.02)
    for step in range(case.steps):
        take_step(net, gradients, optimizer, microbatches(case, step, mesh.rank), case.clip_norm)
    with gradients.full_parameters():
        return (
            {name: parameter.detach().clone() for name, parameter in net.named_parameters()},
            [tuple(owned.parameter.shape) for owned in gradients.owned],
        )


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_matrices_are_whole_under_zero(ranks, zero: int) -> None:
    """The parameters are those of replicas, which have every matrix whole."""
    plain, _ = ranks(3, trained, None, False)[0]
    for parameters, _ in ranks(3, trained, zero, True):
        for name, wanted in plain.items():
            assert float((parameters[name] - wanted).abs().max()) < SUM_ORDER, name


def test_divided_matrices_would_step_otherwise(ranks) -> None:
    """The comparison has teeth: without `whole` some matrices are runs of elements, which have no singular values."""
    plain, shapes = ranks(3, trained, None, False)[0]
    results = ranks(3, trained, 1, False)
    assert any(len(shape) == 1 for _, found in results for shape in found if shape not in shapes)
    assert max(float((results[0][0][name] - wanted).abs().max()) for name, wanted in plain.items()) > 1e-4


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=12), st.integers(1, 9))
def test_blocks_are_not_divided(lengths: list[int], ranks: int) -> None:
    """Each rank's run of a tensor begins at a multiple of the block, and ends at one or with the tensor: so its blocks
    are those of the whole, on any number of ranks.
    """
    layout = flat_layout(lengths, ranks, undivided=BLOCK)
    for number, length in enumerate(lengths):
        runs = [run for rank in range(ranks) if (run := layout.run(number, rank)) is not None]
        assert sum(run.numel for run in runs) == length
        assert all(run.start % BLOCK == 0 and (run.stop % BLOCK == 0 or run.stop == length) for run in runs)
    assert layout.numel < sum(lengths) + BLOCK * (len(lengths) + ranks)
