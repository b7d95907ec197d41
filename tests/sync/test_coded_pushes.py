"""Codecs on what workers push to parameter servers."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from shoal.codec.config import BlockwiseConfig, CodecConfig, TopKConfig
from shoal.codec.quantise import Blockwise
from shoal.codec.top_k import TopK
from shoal.comm.collective import Collective
from shoal.comm.exchanges.coded_sum import CodedPushes, Spent
from shoal.comm.exchanges.exchange import Segment
from shoal.runfile.codec_rules import codec_refusal
from tests.comm.exchanges.test_coded import on_ranks
from tests.sync.steps import ADAM, SGD, STEPS, Tables, gap, train
from tests.verification.layouts import corpus, run_file_of

INT8: Tables = {"codec": {"kind": "blockwise"}}
STOCHASTIC: Tables = {"codec": {"kind": "blockwise", "rounding": "stochastic"}}
SERVED: Tables = {"sync": {"kind": "server"}}
DEDICATED: Tables = {"sync": {"kind": "server", "servers": 1}}
ONE_BYTE = 1.1 / 8
"""Of the bytes of float64 pushes: one byte for eight, and scales, heads and counts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pushes")
    corpus(folder)
    return folder


@pytest.mark.parametrize(
    "codec", [TopK(TopKConfig(fraction=0.1)), Blockwise(BlockwiseConfig(bits=4))], ids=["top-k", "4 bits"]
)
def test_what_servers_get_and_what_is_kept_is_the_gradient(codec) -> None:
    """Over many pushes, span by span, the own one sent as it is; no span takes another's residual."""
    spans, numel = [slice(0, 40), slice(40, 100), slice(100, 128)], 128
    segments = [Segment("w", 0, (numel,))]
    more = {"dtype": torch.float64, "feedback": True, "seed": 0, "spent": Spent()}
    pushes = CodedPushes(codec, 2, [0, 1, 2], segments, **more)
    draw = torch.Generator().manual_seed(0)
    gradients = [torch.randn(numel, generator=draw, dtype=torch.float64) for _ in range(20)]
    got = torch.zeros(numel, dtype=torch.float64)
    for gradient in gradients:
        pushes.begin(gradient)
        for server, span in enumerate(spans[:2]):
            packed, values = pushes.encoded(span, to=server), torch.empty(span.stop - span.start, dtype=torch.float64)
            assert len(packed) == pushes.nbytes(len(values))
            there = CodedPushes(codec, server, [0, 1, 2], [], **more)
            there.decoded(packed, values, source=2, number=pushes.rounds)
            got[span] += values
        got[spans[2]] += pushes.exact(spans[2])
    assert pushes.residual is not None
    torch.testing.assert_close(got + pushes.residual, sum(gradients[1:], gradients[0]), rtol=0, atol=1e-12)
    assert not pushes.residual[spans[2]].any()
    assert pushes.residual[spans[0]].any()


@pytest.mark.parametrize(
    ("leavers", "pushers", "taker"), [({1}, [0, 1, 2], 0), ({0}, [0, 1, 2], 1), ({0}, [0, 2], 2), (set(), [1, 2], 1)]
)
def test_what_is_not_pushed_any_more_is_handed_on(leavers: set[int], pushers: list[int], taker: int) -> None:
    """By ranks that leave or push no more, to the first that goes on; the others keep their own bits."""

    def work(group: Collective) -> Tensor | None:
        more = {"dtype": torch.float64, "feedback": True, "seed": 0, "spent": Spent()}
        pushes = CodedPushes(TopK(TopKConfig(fraction=0.1)), group.rank, pushers, [Segment("w", 0, (8,))], **more)
        pushes.arrival().fill_(10.0**group.rank)
        pushes.hand_over(group, leaving=group.rank in leavers)
        return pushes.residual

    found = on_ranks(3, lambda group: [work(group)])
    gives = {rank for rank in range(3) if rank in leavers or rank not in pushers}
    for rank, [residual] in enumerate(found):
        if rank in gives:
            assert residual is None
        else:
            own = 10.0**rank + (sum(10.0**giver for giver in gives) if rank == taker else 0)
            assert residual.tolist() == [own] * 8


def test_a_worker_sends_fewer_bytes_and_goes_nearly_the_same_way(ranks, folder: Path) -> None:
    """To a dedicated server, which gets all that workers push."""
    plain, *_ = ranks(3, train, SGD | DEDICATED, str(folder), 0, 4)
    coded, *_ = ranks(3, train, SGD | INT8 | DEDICATED, str(folder), 0, 4)
    assert sum(coded.sent) < ONE_BYTE * sum(plain.sent)
    assert 0 < gap(coded.weights, plain.weights) < 0.01
    residuals = {name for name in coded.state if name.startswith("codec/residual/")}
    assert {"codec/residual/0/head.weight", "codec/residual/1/head.weight"} <= residuals
    assert not any(name.startswith("codec/residual/2/") for name in residuals), "a server pushes nothing"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("sync", [SERVED, DEDICATED], ids=["every rank serves", "a server"])
def test_a_run_with_coded_pushes_goes_on_bitwise(ranks, folder: Path, sync: Tables, precision: str) -> None:
    """With what was not sent yet, and the random numbers of the codec."""
    size, name = (3, f"dedicated-{precision}") if sync is DEDICATED else (2, f"served-{precision}")
    sync = sync | {"precision": {"kind": precision}}
    whole, *_ = ranks(size, train, ADAM | STOCHASTIC | sync, str(folder))
    ranks(size, train, ADAM | STOCHASTIC | sync, str(folder), 0, 8, name)
    resumed, *_ = ranks(size, train, ADAM | STOCHASTIC | sync, str(folder), 8, STEPS, name)
    assert resumed.state.keys() == whole.state.keys()
    assert all(torch.equal(tensor, whole.state[key]) for key, tensor in resumed.state.items())


@pytest.mark.parametrize(
    "codec",
    [{"kind": "auto"}, {"kind": "power_sgd"}, {"kind": "acp_sgd"}, {"kind": "scale_com"}, {"kind": "dgc"}],
    ids=lambda codec: codec["kind"],
)
def test_codecs_of_all_ranks_are_refused(folder: Path, codec: Tables) -> None:
    """Workers push alone; and what serves is served."""
    tables = {"optimizer": {"kind": "sgd", "lr": 0.1, "clip_norm": None}, **SERVED}
    sentence = codec_refusal(run_file_of(folder, **tables, codec=codec))
    assert sentence is not None
    assert sentence.startswith(f'codec.kind = "{codec["kind"]}" with sync.kind = "server": its ranks')
    serving = [kind.__struct_config__.tag for kind in get_args(CodecConfig) if not kind.of_all_ranks]
    assert {"cast", "blockwise", "top_k"} < set(serving)
    for kind in serving:
        assert codec_refusal(run_file_of(folder, **tables, codec={"kind": kind})) is None
