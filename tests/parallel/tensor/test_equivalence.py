"""A model split over tensor ranks is the same model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import LayoutError
from shoal.memory.recompute import RecomputeKind
from shoal.parallel.tensor.plan import split_tensor
from shoal.parallel.tensor.vocabulary import vocabulary_cross_entropy
from tests.parallel.tensor.models import batch, keyed_gpt, two_pairs, user_gpt
from tests.parallel.tensor.split import (
    F64,
    assembled,
    entropy,
    grid_of,
    one_step,
    tensor_group,
    tensor_mesh,
    weighted,
)
from tests.ranks import TestPlace


def check_same(outcomes: list[Any], model: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor) -> None:
    outputs = model(*inputs)
    losses = outputs.square().sum(-1) if targets is None else entropy(outputs, targets)
    loss = weighted(losses)
    loss.backward()
    for outcome in outcomes:
        torch.testing.assert_close(outcome.outputs, outputs.detach(), **F64)
        assert outcome.loss == pytest.approx(loss.item(), rel=1e-12)
    for name, grad in assembled(outcomes, model).items():
        expected = model.get_parameter(name).grad
        scale = expected.abs().max().item()
        torch.testing.assert_close(
            grad, expected, rtol=1e-12, atol=1e-12 * scale, msg=lambda text, n=name: f"{n}: {text}"
        )


GPTS = {
    "swiglu": {},
    "gelu, tied": {"feed_forward": "gelu", "tied": True},
    "kv heads shared by twins": {"kv_heads": 1, "dropout": 0.2},
    "kv heads shared within and between": {"kv_heads": 2, "tied": True, "dropout": 0.2},
}


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("keys", GPTS.values(), ids=GPTS.keys())
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole stream", "sequence parallel"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_split_gpt_has_the_loss_and_the_gradients_of_one_process(ranks, world, sequence_parallel, keys) -> None:
    """Logits, loss, and every gradient, in float64; a vocabulary of 40 over 4 ranks; dropout drops the same."""
    inputs, targets = batch()
    settings = {"model": keys, "sequence_parallel": sequence_parallel}
    outcomes = ranks(world, one_step, keyed_gpt, (inputs,), targets, settings)
    check_same(outcomes, keyed_gpt(**keys), (inputs,), targets)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole stream", "sequence parallel"])
@pytest.mark.parametrize("gather", [False, True], ids=["split loss", "gathered logits"])
def test_a_vocabulary_that_does_not_divide_is_split_all_the_same(ranks, sequence_parallel: bool, gather: bool) -> None:
    """41 tokens over 4 ranks, tied, and a loss of gathered logits beside the split one."""
    inputs, targets = batch()
    settings = {"model": {"vocabulary": 41, "tied": True}, "sequence_parallel": sequence_parallel, "gather": gather}
    outcomes = ranks(4, one_step, keyed_gpt, (inputs,), targets, settings)
    check_same(outcomes, keyed_gpt(vocabulary=41, tied=True), (inputs,), targets)
    assert [outcome.parts["embedding.weight"].length for outcome in outcomes] == [11, 10, 10, 10]


def test_ranks_without_any_token_take_part(ranks) -> None:
    """3 tokens over 4 ranks."""
    inputs, targets = batch()
    inputs, targets = inputs % 3, targets.where(targets < 0, targets % 3)
    outcomes = ranks(
        4, one_step, keyed_gpt, (inputs,), targets, {"model": {"vocabulary": 3}, "sequence_parallel": True}
    )
    check_same(outcomes, keyed_gpt(vocabulary=3), (inputs,), targets)


def test_positions_and_documents_of_packed_sequences_are_respected(ranks) -> None:
    """Both are given for whole sequences; dropout under sequence parallelism takes its slice of the positions."""
    ids, targets = batch()
    documents = torch.tensor([[0] * 3 + [1] * 5, [0] * 8, [0, 1, 1, 1, 2, 2, 2, 2]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], list(range(8)), [5, 0, 1, 2, 9, 10, 11, 12]])
    inputs = (ids, positions, documents)
    settings = {"model": {"dropout": 0.3}, "sequence_parallel": True}
    outcomes = ranks(4, one_step, keyed_gpt, inputs, targets, settings)
    check_same(outcomes, keyed_gpt(dropout=0.3), inputs, targets)


@pytest.mark.parametrize("world", [2, 4])
def test_a_users_module_with_biases_is_split_by_its_roles(ranks, world: int) -> None:
    """Each bias counts once, and what stands beside the layers in one forward keeps its gradient."""
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outcomes = ranks(world, one_step, two_pairs, (x,), None, {"sequence_parallel": False})
    check_same(outcomes, two_pairs(), (x,), None)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole stream", "sequence parallel"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_users_transformer_is_split_by_its_roles(ranks, world: int, sequence_parallel: bool) -> None:
    """Padding, norms of single heads, shared heads, biases everywhere."""
    inputs, targets = batch()
    outcomes = ranks(world, one_step, user_gpt, (inputs,), targets, {"sequence_parallel": sequence_parallel})
    check_same(outcomes, user_gpt(), (inputs,), targets)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole stream", "sequence parallel"])
@pytest.mark.parametrize(
    ("world", "rows", "kv_heads"), [(2, 1, 4), (2, 2, 1), (4, 2, 4), (4, 2, 2), (4, 4, 1), (4, 1, 4)]
)
def test_matrices_may_lie_in_blocks_on_a_grid(
    ranks, world: int, rows: int, kv_heads: int, sequence_parallel: bool
) -> None:
    """Attention and feed-forward in blocks, heads shared or not; the vocabulary is split along one axis as before, and
    dropout behind the blocks is the same."""
    inputs, targets = batch()
    keys = {"dropout": 0.2, "feed_forward_width": 48, "kv_heads": kv_heads}
    settings = {"model": keys, "sequence_parallel": sequence_parallel, "rows": rows}
    outcomes = ranks(world, one_step, keyed_gpt, (inputs,), targets, settings)
    check_same(outcomes, keyed_gpt(**keys), (inputs,), targets)
    (up,) = outcomes[-1].parts["blocks.0.feed_forward.up.weight"].boxes((48, 32))
    assert up.shape == (48 * rows // world, 32 // rows)
    (key,) = outcomes[-1].parts["blocks.0.attention.key.weight"].boxes((8 * kv_heads, 32))
    assert key.shape == (8 * kv_heads * rows // world, 32 // rows)


def heads_on_a_grid(place: TestPlace, kv_heads: int) -> str:
    """What is said of 4 query heads and fewer of the others on a grid of 1 x 4."""
    mesh = tensor_mesh(place)
    with pytest.raises(LayoutError) as refusal:
        split_tensor(keyed_gpt(kv_heads=kv_heads), mesh.axis("tensor"), sequence_parallel=False, grid=grid_of(mesh, 1))
    return str(refusal.value)


def test_fewer_shared_heads_than_columns_are_refused(ranks) -> None:
    """A column of the grid has whole heads."""
    for said in ranks(4, heads_on_a_grid, 2):
        assert "key has 2 heads, on a grid of 1 x 4 ranks; they must be a multiple of 4" in said


def test_biases_of_blocks_count_once(ranks) -> None:
    inputs, targets = batch()
    outcomes = ranks(4, one_step, user_gpt, (inputs,), targets, {"sequence_parallel": True, "rows": 2})
    check_same(outcomes, user_gpt(), (inputs,), targets)
    assert outcomes[1].parts["layers.0.last.up.bias"].twins == (1, 3)


def half_precision(place: TestPlace, dtype: torch.dtype) -> tuple[float, bool]:
    """The loss under autocast, and whether all gradients are finite."""
    group, (inputs, targets) = tensor_group(place), batch()
    model = keyed_gpt(scale=1.0).float()
    plan = split_tensor(model, group, sequence_parallel=True)
    with torch.autocast("cpu", dtype=dtype):
        outputs = model(inputs)
    losses = vocabulary_cross_entropy(outputs, targets, split=plan.vocabulary, group=group)
    weighted(losses).backward()
    return weighted(losses).item(), all(bool(p.grad.isfinite().all()) for p in model.parameters())


# Sums of 32 products of bfloat16 numbers (8 bits), in another order.
HALF = 1e-2


def test_a_split_gpt_runs_in_half_precision(ranks) -> None:
    """Under bfloat16 autocast the loss is near that of float64."""
    inputs, targets = batch()
    expected = weighted(entropy(keyed_gpt(scale=1.0)(inputs), targets)).item()
    for loss, finite in ranks(2, half_precision, torch.bfloat16):
        assert finite
        assert loss == pytest.approx(expected, rel=HALF)


def sequence_refusal(place: TestPlace) -> str:
    inputs, _ = batch(seq=7)
    model = keyed_gpt()
    split_tensor(model, tensor_group(place), sequence_parallel=True)
    with pytest.raises(LayoutError) as raised:
        model(inputs)
    return str(raised.value)


def test_a_sequence_that_does_not_divide_is_refused_on_every_rank(ranks) -> None:
    for message in ranks(2, sequence_refusal):
        assert "7 tokens" in message
        assert "nearest: 6 or 8 tokens" in message


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole stream", "sequence parallel"])
@pytest.mark.parametrize("kind", ["selective", "operators", "full"])
def test_activations_may_be_computed_again(ranks, kind: RecomputeKind, sequence_parallel: bool) -> None:
    """The collectives of the forward happen again in the backward, in the same order on every rank."""
    inputs, targets = batch()
    keys = {"dropout": 0.2, "kv_heads": 1}
    settings = {"model": keys, "sequence_parallel": sequence_parallel, "recompute": kind}
    outcomes = ranks(2, one_step, keyed_gpt, (inputs,), targets, settings)
    check_same(outcomes, keyed_gpt(**keys), (inputs,), targets)


def calls_of(place: TestPlace, sequence_parallel: bool) -> dict[str, int]:
    """How often this rank called each collective in one step of two blocks."""
    mesh, (inputs, targets) = tensor_mesh(place), batch()
    group, model = mesh.axis("tensor"), keyed_gpt()
    plan = split_tensor(model, group, sequence_parallel=sequence_parallel)
    mesh.ledger.take()
    vocabulary_cross_entropy(model(inputs), targets, split=plan.vocabulary, group=group).sum().backward()
    return {operation: entry.calls for operation, entry in mesh.ledger.take().items()}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole stream", "sequence parallel"])
def test_a_region_crosses_once_each_way(ranks, sequence_parallel: bool) -> None:
    """Two blocks have four regions: four ways in and out, and back again; embedding out, head in; two for the loss."""
    crossings = 4 + 1
    calls = {"all_reduce": 2 * crossings + 2}
    if sequence_parallel:
        calls = {"all_reduce": 2, "all_gather": 2 * crossings, "reduce_scatter": 2 * crossings}
    assert ranks(2, calls_of, sequence_parallel)[0] == calls
