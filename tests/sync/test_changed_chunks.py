"""Pushes and pulls of the chunks that have changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.sync.server_part import CHUNK, changed_chunks, chunks_in, elements_of
from tests.assembly.test_embedding_tables import tables
from tests.sync.steps import SGD, SUM_ORDER, Tables, gap, train
from tests.verification.table_models import Recommender

ROWS = 20_000


@pytest.mark.parametrize("numel", [1, CHUNK - 1, CHUNK, 5 * CHUNK, 5 * CHUNK + 3])
def test_what_has_changed_is_rebuilt_from_its_chunks(numel: int) -> None:
    """Any changes, none and all: the elements of the chunks that are said to have changed are enough."""
    draw = torch.Generator().manual_seed(numel)
    for part in (0.0, 0.001, 0.3, 1.0):
        before = torch.randn(numel, generator=draw)
        now = torch.where(torch.rand(numel, generator=draw) < part, torch.randn(numel, generator=draw), before)
        chunks = changed_chunks(now, before)
        rebuilt = before.clone()
        if chunks is None:
            rebuilt = now
        else:
            assert len(chunks) == chunks_in(numel)
            there = elements_of(chunks, numel)
            rebuilt[there] = now[there]
            assert not bool(chunks.all())
        assert torch.equal(rebuilt, now)
        if part == 0.0:
            assert chunks is not None
            assert not chunks.any()


def test_one_number_that_is_not_is_a_change() -> None:
    """A gradient that is not finite arrives."""
    gradient = torch.zeros(4 * CHUNK)
    gradient[2 * CHUNK + 5] = torch.nan
    chunks = changed_chunks(gradient)
    assert chunks is not None
    assert chunks.tolist() == [False, False, True, False]


def dense_recommender() -> nn.Module:
    """Its table has a dense gradient, most of which is zero."""
    return Recommender(nn.Embedding(ROWS, 8), 8)


@pytest.mark.parametrize(("size", "servers"), [(3, 1), (2, 0)], ids=["a server", "every rank serves"])
def test_bytes_follow_what_has_changed(ranks, tmp_path: Path, size: int, servers: int) -> None:
    """Of a dense embedding a step touches few rows: a step sends a small part of the parameters in both directions, and
    comes to the weights of all-reduce.
    """
    model = {"kind": "python", "build": f"{__name__}:dense_recommender"}
    keys: Tables = tables(rows=ROWS, model=model) | SGD | {"batch": {"global_samples": 12, "denominator": "samples"}}
    keys["optimizer"] = {"kind": "sgd", "clip_norm": None, "weight_decay": 0.0}
    found = ranks(size, train, keys | {"sync": {"kind": "server", "servers": servers}}, str(tmp_path), 0, 4)
    plain = ranks(2, train, keys, str(tmp_path), 0, 4)[0]
    assert gap(found[0].weights, plain.weights) < SUM_ORDER
    whole = sum(tensor.nbytes for tensor in plain.weights.values())
    assert all(sum(one.sent) < 0.3 * 4 * whole for one in found)
    assert sum(plain.sent) > 0.9 * 4 * whole
