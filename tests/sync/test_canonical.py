"""`sync.order = "canonical"`: the number of replicas changes no bit of the weights."""

from __future__ import annotations

import re
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.comm.exchanges.exchange import Canonical
from shoal.errors import ConfigError
from shoal.runfile.rules import check_across
from tests.comm.local import local_group
from tests.sync.steps import Tables, train
from tests.verification.layouts import corpus, run_file_of

CANONICAL: Tables = {"sync": {"kind": "allreduce", "order": "canonical", "logical_shards": 4}}
GPT: Tables = {"batch": {"global_samples": 8}, "optimizer": {"kind": "adamw", "lr": 2e-3, "clip_norm": 0.5}}
DIGITS: Tables = {
    "model": {"kind": "convnet", "channels": 1, "classes": 10, "width": 8},
    "data": {"kind": "digits"},
    "batch": {"global_samples": 16, "sequence": 1},
    "optimizer": {"kind": "adamw", "lr": 4e-3, "clip_norm": 0.5},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("canonical")
    corpus(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("tables", [GPT, DIGITS], ids=["gpt", "digits"])
def test_weights_are_the_same_bits_on_1_2_and_4_replicas(ranks, folder: Path, tables: Tables) -> None:
    """In float32, AdamW, with a clipped norm, over 12 steps; the moments too."""
    if tables is DIGITS:
        pytest.importorskip("sklearn")
    one, *_ = ranks(1, train, tables | CANONICAL, str(folder))
    for replicas in (2, 4):
        several, *_ = ranks(replicas, train, tables | CANONICAL, str(folder))
        assert several.state.keys() == one.state.keys()
        assert all(torch.equal(tensor, one.state[name]) for name, tensor in several.state.items()), replicas


HUNDRED = 100
STDLIB_GPT: Tables = {
    "model": {
        "kind": "gpt", "layers": 4, "width": 128, "heads": 4, "feed_forward": "swiglu", "feed_forward_width": 384,
        "tied": True,
    },
    "data": {"kind": "stdlib"},
    "batch": {"global_samples": 16, "sequence": 32},
    "optimizer": {"kind": "adamw", "lr": 2e-3, "clip_norm": 1.0},
}  # fmt: skip


@pytest.mark.stress
@pytest.mark.parametrize("tables", [STDLIB_GPT, DIGITS], ids=["stdlib gpt", "digits"])
def test_weights_are_the_same_bits_on_8_replicas_after_100_steps(ranks, folder: Path, tables: Tables) -> None:
    """As on 1, 2 and 4; in float32, moments too."""
    eight = {"sync": CANONICAL["sync"] | {"logical_shards": 8}}
    states = [
        ranks(replicas, train, tables | eight, str(folder), 0, HUNDRED, timeout_s=280.0)[0].state
        for replicas in (1, 2, 4, 8)
    ]
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(tensor, states[0][name]) for name, tensor in state.items())


def test_without_it_bits_differ(ranks, folder: Path) -> None:
    """Or there would be nothing to prove."""
    one, *_ = ranks(1, train, GPT, str(folder))
    two, *_ = ranks(2, train, GPT, str(folder))
    assert not all(torch.equal(tensor, one.state[name]) for name, tensor in two.state.items())


def summed(shards: Tensor, replicas: int) -> Tensor:
    """What each of `replicas` threads has after each has sent its share of the rows of `shards`."""
    found: list[Tensor] = [torch.empty(0)] * replicas

    def rank(group: Collective, own: Tensor) -> None:
        buffer = torch.empty(shards.shape[1])
        exchange = Canonical(group, buffer)
        for _ in range(2):  # a step after a step
            exchange.start()
            for row in own:
                buffer.copy_(row)
                exchange.send(buffer)
                buffer.fill_(float("nan"))
            exchange.settle()
            exchange.wait()
        found[group.rank] = exchange.result

    parts = shards.chunk(replicas)
    threads = [Thread(target=rank, args=pair) for pair in zip(local_group(replicas), parts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, found[0]) for one in found)
    return found[0]


@pytest.mark.parametrize(("shards", "numbers"), [(8, (1, 2, 4, 8)), (12, (1, 3, 6, 12)), (5, (1, 5))])
def test_the_tree_is_the_same_for_all_numbers_of_ranks(shards: int, numbers: tuple[int, ...]) -> None:
    """Numbers of very different sizes, of which sums in another order differ; 37 of them divide evenly by no number."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(shards, 37, generator=generator) * 10 ** torch.randint(-3, 4, (shards, 37), generator=generator)
    sums = [summed(rows, ranks) for ranks in numbers]
    assert all(torch.equal(one, sums[0]) for one in sums)
    assert not torch.equal(sums[0], rows.flip(0).cumsum(0)[-1]) or shards < 5
    assert torch.allclose(sums[0].double(), rows.double().sum(0), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"run": {"processes": 3}}, "3 replicas: each replica must add whole branches of the tree of 4; use 1, 2, 4"),
        ({"batch": {"global_samples": 10}}, "nearest global_samples: 8 or 12"),
        ({"batch": {"micro_samples": 4}}, "batch.micro_samples = 4: a microbatch is one logical shard"),
        ({"layout": {"shard": 2}}, "layout.shard = 2"),
        ({"codec": {"kind": "cast"}}, "[codec]"),
        ({"gradients": {"bucket": "auto"}}, 'gradients.bucket = "auto"'),
        ({"observe": {"noise_every_steps": 5}}, "observe.noise_every_steps"),
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path: Path, tables: Tables, words: str) -> None:
    """In a sentence, before any process starts."""
    corpus(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_across(run_file_of(tmp_path, **({"run": {"processes": 2}} | CANONICAL | tables)), file="canonical.toml")
