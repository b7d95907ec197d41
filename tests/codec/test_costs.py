"""What codecs state without torch is what they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import pytest
import torch

from shoal.codec.codec import TensorPlace
from shoal.codec.config import AutoConfig, BlockwiseConfig, CodecConfig, NoCodec, PowerSGDConfig
from shoal.codec.costs import Matrices, is_stated, label, stated
from shoal.config.check import implementation_of
from tests.codec.every import CONFIGS

LENGTHS = (1, 7, 16, 100, 1000, 70_001)
SHAPES = ((24, 20), (16, 30), (2, 3))
"""The last is no smaller as two thin matrices of rank 1."""


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("numel", LENGTHS)
def test_payloads_have_the_stated_bytes(name: str, numel: int) -> None:
    """For vectors without matrices, and for all codecs: what a sum yields if linear, else the packed payload."""
    config = CONFIGS[name]
    one = implementation_of(config)(config)
    found = stated(config, numel)
    assert found.linear == one.linear
    if one.linear:
        assert [payload for payload in found.payloads if payload] == _summed_bytes(config, numel, ())
    else:
        assert found.payloads == (one.wire_bytes(numel),)


def _summed_bytes(config: CodecConfig, numel: int, places: Sequence[TensorPlace], sums: int = 1) -> list[float]:
    """Bytes of each all-reduce that a sum of one rank makes, the mean of several sums."""
    one = implementation_of(config)(config).bound(places, key=0, rank=0, ranks=1)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    rounds = [[sum(part.nbytes for part in payload) for payload in one.summing(x, key=n)] for n in range(sums)]
    return [size for column in zip(*rounds, strict=True) if (size := sum(column) / sums)]


@pytest.mark.parametrize("name", ["power_sgd", "acp_sgd"])
@pytest.mark.parametrize("rank", [1, 4])
def test_low_rank_payloads_have_the_stated_bytes(name: str, rank: int) -> None:
    """With matrices, of which one stays whole, and numbers that lie in none; ACP-SGD in the mean of its two sums."""
    places, at = [], 0
    for number, shape in enumerate(SHAPES):
        places.append(TensorPlace(str(number), at, shape))
        at += shape[0] * shape[1]
    config = type(CONFIGS[name])(rank=rank)  # pyright: ignore[reportCallIssue]
    matrices = [Matrices(*shape) for shape in SHAPES]
    assert list(stated(config, at + 50, matrices).payloads) == _summed_bytes(config, at + 50, places, sums=2)


def test_equal_matrices_may_be_counted() -> None:
    """Two copies are as two entries."""
    config = PowerSGDConfig(rank=2)
    assert stated(config, 2000, [Matrices(30, 30, 2)]) == stated(config, 2000, [Matrices(30, 30)] * 2)


def test_every_table_of_a_codec_states_itself() -> None:
    """None and auto are no codecs of their own; nothing else is left out."""
    assert {kind for kind in get_args(CodecConfig) if not is_stated(kind())} == {NoCodec, AutoConfig}


def test_labels_tell_codecs_apart_by_what_coding_costs() -> None:
    """Bits do, blocks and feedback do not."""
    assert label(BlockwiseConfig(block=64, feedback=False)) == label(BlockwiseConfig())
    assert label(BlockwiseConfig(bits=4)) != label(BlockwiseConfig())
    assert len({label(config) for config in CONFIGS.values()}) >= len(CONFIGS) - 2  # random_k and none more twice
