"""Sums are exact to the integer whoever is lost, uploads look random, and what does not belong is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.federated.config import SecureAggregationConfig
from shoal.federated.secure.client import ProtocolBroken, SecureClient
from shoal.federated.secure.messages import Keys, Revealed, Roster, Sealed, Survivors, neighbours
from shoal.federated.secure.primitives import (
    PRIME,
    BadMessage,
    add_masks,
    agree,
    join,
    join_checked,
    new_private,
    public_of,
    seal,
    split,
    unseal,
)
from shoal.federated.secure.server import Refused, Secrets, SecureServer
from shoal.federated.secure.summing import PHASES, Quantiser, play

SESSION, PHASE_S = b"round 0", 10.0


def server_for(
    names: list[str], *, numel: int, least: int = 2, neighbours: int | None = None, threshold: float = 0.67
) -> SecureServer:
    quantiser = Quantiser(bits=20, clip=1.0, most_weight=len(names))
    return SecureServer(
        SecureAggregationConfig(neighbours=neighbours, threshold=threshold),
        tuple(names),
        session=SESSION,
        numel=numel,
        dtype=quantiser.dtype,
        least=least,
        phase_s=PHASE_S,
        now_s=0.0,
    )


def vectors_of(count: int, numel: int, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    quantiser = Quantiser(bits=20, clip=1.0, most_weight=count)
    rows = generator.uniform(-1, 1, (count, numel - 1))
    return {f"c{i:03d}": quantiser.encode(row, 1) for i, row in enumerate(rows)}


def plain_sum(vectors: dict[str, np.ndarray], names: tuple[str, ...]) -> np.ndarray:
    return np.sum([vectors[name] for name in names], axis=0, dtype=vectors[names[0]].dtype)


def test_the_field_is_one_of_a_prime() -> None:
    """Miller and Rabin with 40 bases."""
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for _ in range(40):
        x = pow(random.randrange(2, PRIME - 1), odd, PRIME)
        assert x in (1, PRIME - 1) or any((x := x * x % PRIME) == PRIME - 1 for _ in range(twos - 1))


@settings(max_examples=20)
@given(secret=st.binary(min_size=32, max_size=32), count=st.integers(1, 12), data=st.data())
def test_any_threshold_shares_give_the_secret_and_fewer_do_not(secret: bytes, count: int, data: st.DataObject) -> None:
    threshold = data.draw(st.integers(1, count))
    shares = split(secret, threshold=threshold, places=range(1, count + 1))
    some = data.draw(st.permutations(sorted(shares)))[:threshold]
    assert join({place: shares[place] for place in some}) == secret
    if threshold > 1:
        assert join({place: shares[place] for place in some[1:]}) != secret


def test_a_wrong_share_is_found() -> None:
    shares = split(b"s" * 32, threshold=3, places=range(1, 7))
    for liar in (1, 3):
        changed = shares | {liar: bytes(33)}
        assert join_checked(changed, threshold=3, fits=b"s".__mul__(32).__eq__) == (b"s" * 32, frozenset({liar}))
    assert join_checked({1: shares[1], 2: shares[2]}, threshold=3, fits=bool) is None


def test_boxes_open_for_their_receiver_alone() -> None:
    """Agreement gives both ends one key; a changed box, another session, sender or receiver is refused."""
    mine, theirs = new_private(), new_private()
    key = agree(mine, public_of(theirs), purpose="p", session=b"s")
    assert key == agree(theirs, public_of(mine), purpose="p", session=b"s")
    assert key != agree(mine, public_of(theirs), purpose="q", session=b"s")
    assert key != agree(mine, public_of(theirs), purpose="p", session=b"t")
    box = seal(key, b"shares", sender="a", receiver="b", session=b"s")
    assert unseal(key, box, sender="a", receiver="b", session=b"s") == b"shares"
    for changed, ends in ((box[:-1] + bytes([box[-1] ^ 1]), ("a", "b")), (box, ("b", "a"))):
        with pytest.raises(BadMessage):
            unseal(key, changed, sender=ends[0], receiver=ends[1], session=b"s")
    with pytest.raises(BadMessage):
        unseal(key, box, sender="a", receiver="b", session=b"t")
    with pytest.raises(BadMessage, match="none of X25519"):
        agree(mine, bytes(32), purpose="p", session=b"s")


def test_masks_cancel_and_do_not_repeat() -> None:
    """Over chunks, in both widths; different seeds give different streams."""
    for dtype in (np.uint32, np.uint64):
        vector = np.zeros(600_000, dtype)
        add_masks(vector, [(b"a" * 32, False)])
        assert len(np.unique(vector[:1000])) == 1000
        assert not np.array_equal(vector[:1000], vector[1 << 18 : (1 << 18) + 1000])
        add_masks(vector, [(b"a" * 32, True)])
        assert not vector.any()


def test_quantised_means_are_exact_to_half_a_level() -> None:
    quantiser = Quantiser(bits=16, clip=2.0, most_weight=10)
    rows, weights = np.random.default_rng(1).uniform(-3, 3, (3, 50)), (1, 4, 5)
    total = np.sum([quantiser.encode(row, w) for row, w in zip(rows, weights, strict=True)], axis=0, dtype=np.uint32)
    mean, weight = quantiser.decode(total)
    expected = np.average(np.clip(rows, -2, 2), axis=0, weights=weights)
    assert weight == 10
    assert np.abs(mean - expected).max() <= 0.5 * 2.0 / quantiser.levels + 1e-12


def test_graphs_are_regular_connected_and_symmetric() -> None:
    keys = {f"c{i}": bytes([i]) * 32 for i in range(30)}
    graph = neighbours(keys, 6)
    assert {len(others) for others in graph.values()} == {6}
    assert all(name in graph[other] for name, others in graph.items() for other in others)
    seen, todo = {"c0"}, ["c0"]
    while todo:
        todo += (new := set(graph[todo.pop()]) - seen)
        seen |= new
    assert len(seen) == 30
    assert graph != neighbours(keys | {"c0": b"x" * 32}, 6)
    assert {len(others) for others in neighbours(keys, None).values()} == {29}


@pytest.mark.parametrize("degree", [None, 6])
def test_the_sum_is_exact_whoever_is_lost(degree: int | None) -> None:
    """Sixteen clients, one lost in each phase, in several orders: the sum is that of those whose vectors came."""
    vectors = vectors_of(16, 40)
    for seed in range(4):
        names = random.Random(seed).sample(sorted(vectors), 4)
        lost = dict(zip(names, PHASES, strict=True))
        server = server_for(sorted(vectors), numel=40, neighbours=degree, threshold=0.51)
        play(server, vectors, lost=lost)
        assert server.phase == "summed", server.reason
        gone = {name for name, phase in lost.items() if phase != "secrets"}
        assert server.contributors == tuple(sorted(set(vectors) - gone))
        assert np.array_equal(server.total, plain_sum(vectors, server.contributors))
        assert int(server.total[-1]) == len(server.contributors)


@settings(max_examples=25)
@given(count=st.integers(3, 9), seed=st.integers(0, 2**32), data=st.data())
def test_a_round_ends_with_the_exact_sum_or_with_none(count: int, seed: int, data: st.DataObject) -> None:
    """Any clients lost in any phases: never a wrong sum. Both outcomes occur."""
    vectors = vectors_of(count, 12, seed)
    lost = data.draw(st.dictionaries(st.sampled_from(sorted(vectors)), st.sampled_from(PHASES)))
    server = server_for(sorted(vectors), numel=12, threshold=0.6)
    play(server, vectors, lost=lost)
    assert server.over
    if server.phase == "summed":
        assert np.array_equal(server.total, plain_sum(vectors, server.contributors))
    else:
        assert lost
        assert server.reason


def test_too_few_survivors_end_the_round() -> None:
    """Below the threshold there is no sum, and the reason says how many were missing."""
    vectors = vectors_of(6, 8)
    server = server_for(sorted(vectors), numel=8)
    play(server, vectors, lost=dict.fromkeys(sorted(vectors)[:3], "vectors"))
    assert server.phase == "failed"
    assert "3 are left, and 5 must be" in server.reason
    server = server_for(sorted(vectors), numel=8, least=5)
    play(server, vectors, lost=dict.fromkeys(sorted(vectors)[:2], "keys"))
    assert server.reason == "4 of at least 5 clients sent keys"


def test_what_the_server_sees_is_uniform() -> None:
    """Chi-square over the 256 values of every byte of an upload of zeros: within 5 deviations of its mean, 255."""
    numel = 1 << 16
    vectors = {f"c{i}": np.zeros(numel, np.uint32) for i in range(3)}
    seen: list[np.ndarray] = []
    server = server_for(sorted(vectors), numel=numel)
    play(server, vectors, on_vector=lambda _, vector: seen.append(vector.copy()))
    assert not server.total.any()
    for upload in seen:
        counts = np.bincount(upload.view(np.uint8), minlength=256)
        expected = upload.nbytes / 256
        assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 5 * (2 * 255) ** 0.5


def test_messages_out_of_place_are_refused_and_change_nothing() -> None:
    """Twice, from a stranger, in another phase, of another length, with used keys, for others than neighbours."""
    server = server_for(["a", "b", "c"], numel=4)
    clients = {name: SecureClient(name, SESSION, least=2) for name in "abc"}
    first = clients["a"].keys()
    server.take_keys("a", first, 0)
    refused = [
        lambda: server.take_keys("a", first, 0),
        lambda: server.take_keys("x", first, 0),
        lambda: server.take_keys("b", Keys(first.sealing, b"k" * 32), 0),
        lambda: server.take_vector("b", np.zeros(4, np.uint32), 0),
    ]
    for act in refused:
        with pytest.raises(Refused):
            act()
    for name in "bc":
        server.take_keys(name, clients[name].keys(), 0)
    roster = server.message_for("a")
    assert isinstance(roster, Roster)
    with pytest.raises(Refused, match="for others than its 2 neighbours"):
        server.take_shares("a", Sealed({"b": b"x" * 20}, b"c" * 32), 0)
    for name in "abc":
        server.take_shares(name, clients[name].shares(roster), 0)
    with pytest.raises(Refused, match="sent 5 numbers"):
        server.take_vector("a", np.zeros(5, np.uint32), 0)
    for name in "abc":
        sealed = server.message_for(name)
        assert isinstance(sealed, Sealed)
        server.take_vector(name, clients[name].masked(sealed, np.ones(4, np.uint32)), 0)
    with pytest.raises(Refused, match="both secrets of b"):
        server.take_secrets("a", Revealed({"b": b"s" * 33}, {"b": b"s" * 33}), 0)
    for name in "abc":
        server.take_secrets(name, clients[name].revealed(server.survivors(name)), 0)
    assert server.total.tolist() == [3, 3, 3, 3]


def test_the_server_cannot_hold_both_kinds_of_share_of_a_client() -> None:
    secrets = Secrets(frozenset({"a"}), frozenset({"b"}))
    secrets.add("c", "seed", {"a": b"1"})
    with pytest.raises(Refused, match="of which the seed alone"):
        secrets.add("c", "key", {"b": b"2", "a": b"3"})
    assert secrets.shares == {"a": {"c": b"1"}, "b": {}}


def to_the_end(server, vectors) -> dict[str, SecureClient]:
    """Plays the first three phases."""
    return play(server, vectors, lost=dict.fromkeys(vectors, "secrets"))


def test_a_client_answers_no_server_that_would_unmask_it() -> None:
    """Both secrets of one client, too few survivors, a second question, changed keys, too small a round."""
    vectors = vectors_of(5, 4)
    names = tuple(sorted(vectors))
    for survivors in (
        Survivors(names, names[1:2]),
        Survivors(names[:2], names[2:]),
        Survivors(names[1:], ()),
        Survivors((*names, "stranger"), ()),
    ):
        client = to_the_end(server_for(list(names), numel=4), vectors)["c000"]
        with pytest.raises(ProtocolBroken, match="takes no further part"):
            client.revealed(survivors)
        with pytest.raises(ProtocolBroken):
            client.revealed(Survivors(names, ()))
    client = to_the_end(server_for(list(names), numel=4), vectors)["c000"]
    client.revealed(Survivors(names, ()))
    with pytest.raises(ProtocolBroken, match="every phase comes once"):
        client.revealed(Survivors(names[:4], names[4:]))
    alone = SecureClient("a", SESSION, least=2)
    with pytest.raises(ProtocolBroken, match="too few to hide among"):
        alone.shares(Roster({"a": alone.keys()}, None, 0.67))
    with pytest.raises(ProtocolBroken, match="every phase comes once"):
        alone.masked(Sealed({}, b""), vectors["c000"])
    other = SecureClient("a", SESSION, least=2)
    other.keys()
    with pytest.raises(ProtocolBroken, match="other keys"):
        other.shares(Roster({"a": Keys(b"x" * 32, b"y" * 32)}, None, 0.67))


def test_a_client_that_lies_about_a_share_is_named() -> None:
    """The sum is exact all the same."""
    vectors = vectors_of(6, 8)
    server = server_for(sorted(vectors), numel=8, threshold=0.6)
    to_the_end(server, vectors)
    assert server.phase == "failed"  # nobody revealed anything
    server = server_for(sorted(vectors), numel=8, threshold=0.6)
    honest = SecureClient.revealed

    def lying(client: SecureClient, survivors: Survivors) -> Revealed:
        said = honest(client, survivors)
        return Revealed(dict.fromkeys(said.seeds, b"\0" * 33), said.keys) if client.name == "c002" else said

    class Liar(SecureClient):
        revealed = lying

    play(server, vectors, make=Liar)
    assert server.phase == "summed", server.reason
    assert server.liars == {"c002"}
    assert np.array_equal(server.total, plain_sum(vectors, server.contributors))
