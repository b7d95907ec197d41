"""Recorded routes."""

from __future__ import annotations

import pytest
import torch

from shoal.models.mixture import Mixture, MixtureOptions, RecordRoutes, ReplayRoutes, Routes, set_routes
from shoal.models.router import set_auxiliary, use_auxiliary

WIDTH, EXPERTS, SEQ = 6, 5, 8


def mixture() -> Mixture:
    options = MixtureOptions(experts=EXPERTS, top_k=2, expert_width=4)
    layer = Mixture(WIDTH, options, feed_forward="gelu", name="layer").double().eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return layer


def inputs() -> torch.Tensor:
    return torch.randn(3, SEQ, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def recorded(layer: Mixture) -> Routes:
    """The routes of samples 10, 11 and 12."""
    routes = Routes()
    set_routes(layer, RecordRoutes(routes))
    set_auxiliary(layer, torch.ones(3), samples=torch.tensor([10, 11, 12]))
    layer(inputs())
    set_routes(layer, None)
    return routes


def test_routes_are_found_by_sample_and_place_whatever_the_batch() -> None:
    """Parts of samples in another order replay what was recorded, and the output is then the same part of the whole."""
    layer, x = mixture(), inputs()
    routes, whole = recorded(layer), layer(x)
    places = torch.tensor([[1, 6, 7], [0, 2, 3]])
    replay = ReplayRoutes(routes, margin=0.0)
    set_routes(layer, replay)
    set_auxiliary(layer, torch.ones(2), samples=torch.tensor([12, 10]))
    part = torch.stack((x[2, places[0]], x[0, places[1]]))
    wanted = torch.stack((whole[2, places[0]], whole[0, places[1]]))
    torch.testing.assert_close(layer(part, places), wanted, rtol=1e-12, atol=1e-13)
    assert replay.replayed == 0
    assert replay.differences == []


def test_a_near_tie_follows_the_record_and_a_true_difference_is_named() -> None:
    """With weights moved a little, tokens go where they went before; only gaps beyond the margin are differences."""
    layer, x = mixture(), inputs()
    routes = recorded(layer)
    layer.router.weight.data += 0.3 * torch.randn(
        EXPERTS, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    strict, lenient = ReplayRoutes(routes, margin=0.0), ReplayRoutes(routes, margin=1.0)
    set_auxiliary(layer, torch.ones(3), samples=torch.tensor([10, 11, 12]))
    for replay in (strict, lenient):
        set_routes(layer, replay)
        layer(x)
    assert strict.replayed == lenient.replayed == len(strict.differences) > 0
    assert lenient.differences == []
    first = strict.differences[0]
    assert first.layer == "layer"
    assert first.sample in (10, 11, 12)
    assert 0 < first.gap < 1
    set_routes(layer, None)
    layer.router.weight.data.zero_()  # every score a tie: by itself all tokens would go to experts 0 and 1
    set_routes(layer, ReplayRoutes(routes, margin=0.0))
    counted = []
    layer.experts.register_forward_pre_hook(lambda module, args: counted.append(args[1].tolist()))
    layer(x)
    tables = torch.cat(list(routes.tables["layer"].values()))
    assert counted == [torch.bincount(tables.flatten(), minlength=EXPERTS).tolist()]


def test_filler_is_neither_recorded_nor_looked_up() -> None:
    """A sample of a negative number goes where it likes."""
    layer, x = mixture(), inputs()
    routes = recorded(layer)
    for tap in (ReplayRoutes(routes, margin=0.0), RecordRoutes(routes)):
        set_routes(layer, tap)
        set_auxiliary(layer, torch.ones(3), samples=torch.tensor([10, -1, 12]))
        layer(x)
    assert set(routes.tables["layer"]) == {10, 11, 12}


def test_records_of_ranks_merge_into_the_whole() -> None:
    """Two records of different places of the same samples, merged, are the record of all places."""
    layer, x, whole = mixture(), inputs(), Routes()
    for places in (torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5])):
        part = Routes()
        set_routes(layer, RecordRoutes(part))
        set_auxiliary(layer, torch.ones(3), samples=torch.tensor([10, 11, 12]))
        layer(x[:, places], places.expand(3, -1))
        whole.merge(part.tables)
    set_routes(layer, None)
    for sample, rows in recorded(layer).tables["layer"].items():
        assert torch.equal(whole.tables["layer"][sample], rows)


def test_what_was_not_recorded_is_refused() -> None:
    """An unknown sample and a layer that does not know its samples are errors, not guesses."""
    layer, x = mixture(), inputs()
    set_routes(layer, ReplayRoutes(recorded(mixture()), margin=0.0))
    set_auxiliary(layer, torch.ones(3), samples=torch.tensor([10, 11, 99]))
    with pytest.raises(KeyError, match="no routes of sample 99 in layer"):
        layer(x)
    use_auxiliary(layer, None)
    with pytest.raises(RuntimeError, match="layer has its routes recorded or replayed and does not know its samples"):
        layer(x)
