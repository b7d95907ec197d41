"""Every layout computes what one process computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verification.covering import Choices, covering, named, tables_of, world_of
from tests.verification.layouts import corpus, verified

LAYOUTS = covering(44)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    corpus(folder)
    return folder


@pytest.mark.matrix(rows=range(2, 8))  # rows 0, 1 and 8 take as long as all these
@pytest.mark.parametrize("choices", LAYOUTS, ids=named)
def test_a_layout_is_the_same_model(ranks, folder: Path, choices: Choices) -> None:
    """Loss, norm, every gradient and every weight of two steps are those of one process."""
    verdict, *_ = ranks(world_of(choices), verified, tables_of(choices), str(folder), choices["exact"], 2)
    assert verdict["holds"], verdict["sentence"]


def test_the_layouts_cover_every_axis() -> None:
    """Both sides of every choice occur, and worlds up to eight ranks."""
    worlds = {world_of(choices) for choices in LAYOUTS}
    assert {2, 4, 8} <= worlds
    for axis in ("replicate", "shard", "tensor", "pipeline", "context", "expert"):
        assert any(choices.get(axis, 1) > 1 for choices in LAYOUTS), axis
