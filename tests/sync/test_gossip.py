"""`sync.kind = "gossip"`: replicas mix with their neighbours in a graph, and never become equal."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import torch

from shoal.errors import ConfigError
from shoal.runfile.rules import check_across
from shoal.sync.config import GossipConfig
from shoal.sync.push_sum import Share, pack, unpack
from tests.sync.steps import ADAM, LR, SGD, STEPS, SUM_ORDER, Tables, gap, mean_of, train
from tests.verification.layouts import corpus, run_file_of

D_PSGD: Tables = {"kind": "gossip", "meet_every": 4, "algorithm": "d_psgd"}
SGP: Tables = D_PSGD | {"algorithm": "sgp"}
ONE_WAY: Tables = SGP | {"graph": "neighbours", "neighbours": [[1, 2], [2], [0]]}
CONSENSUS = 1e-9


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gossip")
    corpus(folder)
    return folder


def even(replicas: int, **sync: object) -> Tables:
    """Equally many tokens on every replica, so that the mean of gradients is the gradient of the mean."""
    return SGD | {"sync": sync, "batch": {"global_samples": 2 * replicas, "denominator": "samples"}}


@pytest.mark.parametrize("algorithm", ["d_psgd", "sgp"])
def test_an_even_mix_of_all_is_all_reduce(ranks, folder: Path, algorithm: str) -> None:
    """With plain SGD and weights 1/n everywhere."""
    tables = even(3, **D_PSGD | {"graph": "weights", "weights": [[1 / 3] * 3] * 3, "algorithm": algorithm})
    gossip, *_ = ranks(3, train, tables, str(folder))
    plain, *_ = ranks(3, train, {key: table for key, table in tables.items() if key != "sync"}, str(folder))
    assert gap(gossip.weights, plain.weights) < SUM_ORDER


def test_consensus_is_exact_after_k_rounds(ranks, folder: Path) -> None:
    """Two rounds without learning on the one-peer exponential graph make four different replicas equal."""
    rates = [LR] * 4 + [0.0] * 2
    before, *_ = ranks(4, train, even(4, **D_PSGD), str(folder), 0, 4, "", rates)
    after, *_ = ranks(4, train, even(4, **D_PSGD | {"meet_every": 6}), str(folder), 0, 6, "", rates)
    assert gap(before.own(0), before.own(3)) > 1e-4, "replicas were to differ"
    assert gap(after.weights, before.weights) < SUM_ORDER, "mixing keeps the average"
    for replica in range(4):
        assert gap(after.own(replica), after.weights) < SUM_ORDER


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("delay", [0, 2])
def test_push_sum_reaches_the_average_on_a_one_way_graph(ranks, folder: Path, delay: int) -> None:
    """Though replicas receive more or less than they send: x / w is the average, x alone is not."""
    steps = 60 + 50 * delay
    tables, rates = even(3, **ONE_WAY | {"delay": delay, "meet_every": steps}), [LR] * 4 + [0.0] * steps
    gossip, *_ = ranks(3, train, tables, str(folder), 0, steps, "", rates)
    weights = [float(gossip.state[f"sync/replica-{replica}/weight"]) for replica in range(3)]
    assert abs(sum(weights) - 3) < SUM_ORDER
    assert max(weights) > 1.1
    for replica, weight in enumerate(weights):
        x = gossip.own(replica)
        assert gap({name: tensor / weight for name, tensor in x.items()}, gossip.weights) < CONSENSUS
    assert gap(mean_of([gossip.own(replica) for replica in range(3)]), gossip.weights) < SUM_ORDER


@pytest.mark.parametrize("sync", [D_PSGD | {"graph": "ring"}, ONE_WAY], ids=["d_psgd", "sgp"])
def test_a_meeting_changes_no_replica(ranks, folder: Path, sync: Tables) -> None:
    """However often the average is looked at."""
    often, *_ = ranks(3, train, ADAM | {"sync": sync | {"meet_every": 2}}, str(folder))
    seldom, *_ = ranks(3, train, ADAM | {"sync": sync | {"meet_every": 100}}, str(folder))
    assert often.agreed == [False, True] * (STEPS // 2)
    assert seldom.agreed == [False] * (STEPS - 1) + [True]
    assert all(torch.equal(tensor, seldom.state[name]) for name, tensor in often.state.items())


@pytest.mark.slow
@pytest.mark.matrix(first=1)
@pytest.mark.parametrize(
    ("layout", "sync"),
    [
        ({"replicate": 3}, D_PSGD | {"graph": "ring"}),
        ({"replicate": 3}, ONE_WAY | {"delay": 1}),
        ({"replicate": 2, "shard": 2}, SGP),
    ],
    ids=["d_psgd", "sgp-delay", "sgp-sharded"],
)
def test_a_run_goes_on_bitwise(ranks, folder: Path, layout: Tables, sync: Tables) -> None:
    """Each replica's parameters, weight and moments are those of the run that was not interrupted."""
    size, name = layout["replicate"] * layout.get("shard", 1), f"gossip-{len(sync)}-{len(layout)}-{sync.get('delay')}"
    tables = ADAM | {"layout": layout, "sync": sync, "batch": {"global_samples": 2 * size}}
    whole, *_ = ranks(size, train, tables, str(folder))
    ranks(size, train, tables, str(folder), 0, 8, name)
    resumed, *_ = ranks(size, train, tables, str(folder), 8, STEPS, name)
    assert {"sync/replica-1/x/head.weight", "replica-1/optimizer/exp_avg/head.weight"} <= whole.state.keys()
    assert resumed.state.keys() == whole.state.keys()
    assert all(torch.equal(tensor, whole.state[key]) for key, tensor in resumed.state.items())


def test_other_numbers_of_replicas_begin_at_the_average(ranks, folder: Path) -> None:
    """Two replicas go on from the checkpoint of three; without learning their average is the one that was saved."""
    tables = ADAM | {"batch": {"global_samples": 6}}
    saved, *_ = ranks(3, train, tables | {"sync": ONE_WAY}, str(folder), 0, 8, "three")
    tables = SGD | {"batch": {"global_samples": 6}, "optimizer": {"kind": "adamw"}}
    resumed, *_ = ranks(2, train, tables | {"sync": SGP}, str(folder), 8, STEPS, "three", [0.0] * STEPS)
    assert gap(resumed.weights, saved.weights) < SUM_ORDER


def test_a_step_sends_to_neighbours_alone(ranks, folder: Path) -> None:
    """The bytes of one copy of the model for the one-peer graph, of two for a ring, and a little for counting."""
    for graph, degree in (("exponential", 1), ("ring", 2)):
        found, *_ = ranks(4, train, even(4, **D_PSGD | {"graph": graph, "meet_every": STEPS}), str(folder))
        model = sum(tensor.nbytes for tensor in found.weights.values())
        for sent in found.sent[1:-1]:
            assert degree * model <= sent < degree * model + 400


def test_messages_hold_tensors_of_all_dtypes() -> None:
    """What is packed comes out in every bit, in the order of the tensors."""
    x = [torch.randn(5).bfloat16(), torch.randn(3, dtype=torch.float64), torch.randn(7)]
    found = unpack(pack(Share(2, 9, x, 1 / 3), torch.device("cpu")), 2, [torch.empty_like(one) for one in x])
    assert (found.source, found.number, found.weight) == (2, 9, 1 / 3)
    assert all(torch.equal(one, other) for one, other in zip(found.x, x, strict=True))


@pytest.mark.parametrize(
    ("sync", "processes", "words"),
    [
        ({}, 1, "one replica: there is no other to agree with"),
        ({"graph": "torus"}, 5, 'graph = "torus": a torus of 5 replicas: the number is prime'),
        ({"graph": "neighbours", "neighbours": [[1], [2], [0]]}, 3, "replica 0 sends to 1 and not 1 to 0"),
        ({"graph": "neighbours", "neighbours": [[1], [0], []]}, 3, "what replica 0 has never reaches replica 2"),
        ({"graph": "neighbours", "neighbours": [[1], [0]]}, 3, "neighbours has 2 rows for 3 replicas"),
        ({"graph": "weights", "weights": [[0.5, 0.5], [0.5, 0.4]]}, 2, "column 1 sums to 0.9"),
        ({"graph": "weights", "weights": [[0.9, 0.5], [0.1, 0.5]]}, 2, "row 0 sums to 1.4"),
    ],
)
def test_graphs_that_make_no_sense_are_refused(tmp_path: Path, sync: Tables, processes: int, words: str) -> None:
    """In a sentence, before any process starts."""
    corpus(tmp_path)
    run_file = run_file_of(tmp_path, run={"processes": processes}, sync={"kind": "gossip"} | sync)
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_across(run_file, file="gossip.toml")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"delay": 1}, 'delay = 1 with algorithm = "d_psgd"'),
        ({"weights": [[1.0]]}, 'weights with graph = "exponential"'),
        ({"graph": "neighbours"}, 'graph = "neighbours" without neighbours'),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: Tables, words: str) -> None:
    """When the table is read."""
    with pytest.raises(msgspec.ValidationError, match=re.escape(words)):
        msgspec.convert({"kind": "gossip"} | keys, GossipConfig)
