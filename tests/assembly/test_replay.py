"""A run that is served asynchronously records its order of events, and is repeated bitwise by it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from shoal.assembly.run import open_run
from shoal.assembly.run_record import replayed, rounds_of
from shoal.errors import ConfigError
from shoal.launcher.environment import Place
from shoal.sync.event_order import EventFiles, Rounds, event_file, read_rounds
from tests.assembly.journey import whole_state
from tests.ranks import TestPlace
from tests.sync.test_server import BATCH, LR, STEPS
from tests.verification.layouts import corpus, run_file_of

Tables = dict[str, Any]
ADAM: Tables = {"optimizer": {"clip_norm": None}} | BATCH
PERIOD, WORKERS = 6, 3


def served(admission: str, **keys: Any) -> Tables:
    return ADAM | {"sync": {"kind": "server", "admission": admission, "period": PERIOD, **keys}}


def train(place: TestPlace, tables: Tables, folder: str, replay: str, late: bool) -> dict[str, Tensor]:
    """The state after the last step. `late`: rank 2 ends its first step when rank 0 has made four."""
    run_file = run_file_of(Path(folder), **tables)
    own = msgspec.structs.replace(run_file.run, processes=place.size, steps=STEPS)
    run_file = msgspec.structs.replace(run_file, run=own)
    rank = place.rank
    here = event_file(Path(folder) / ("replayed" if replay else "recorded"), rank)
    rounds = Rounds(EventFiles(here, event_file(Path(folder) / replay, rank) if replay else None))
    run = open_run(run_file, Place(rank, place.size, rank, place.size, 0, "shoal"), store=place.store, rounds=rounds)
    with closing(run.feed()) as feed:
        for number in range(1, STEPS + 1):
            waits = late and rank == 2 and number == 1
            wait = (lambda norm: place.store.wait(["four steps"])) if waits else None
            run.step(number, feed.next().microbatches, lr=LR, on_gradients=wait)
            if late and rank == 0 and number == 4:
                place.store.set("four steps", "made")
    return whole_state(run)


@pytest.mark.slow
@pytest.mark.matrix(first=1)
@pytest.mark.parametrize(
    "tables",
    [served("async", staleness="compensated"), served("bounded", bound=4), served("backup", backup=1)],
    ids=["async", "bounded", "backup"],
)
def test_a_replay_is_the_run_to_the_bit(ranks, tmp_path: Path, tables: Tables) -> None:
    """In the recorded run a worker was late, in the replay none is; parameters and moments are the same bits, and so
    is the order of events at every part.
    """
    corpus(tmp_path)
    recorded = ranks(WORKERS, train, tables, str(tmp_path), "", True)[0]
    repeated = ranks(WORKERS, train, tables, str(tmp_path), "recorded", False)[0]
    assert recorded.keys() == repeated.keys()
    assert all(torch.equal(tensor, repeated[name]) for name, tensor in recorded.items())
    for rank in range(WORKERS):
        files = [event_file(tmp_path / name, rank) for name in ("recorded", "replayed")]
        assert files[0].read_text() == files[1].read_text()
        first = json.loads(files[0].read_text().splitlines()[0])["events"]
        assert first.index("c2") > [place for place, event in enumerate(first) if event == "c0"][3]


@pytest.mark.slow
@pytest.mark.parametrize(("strength", "equal"), [(0.0, True), (1.0, False)])
def test_compensation_of_no_strength_is_the_asynchronous_run(
    ranks, tmp_path: Path, strength: float, equal: bool
) -> None:
    """In the order of events of a run with old gradients: DC-ASGD with lambda = 0 comes to the same bits, with
    lambda = 1 it does not.
    """
    corpus(tmp_path)
    compensated = served("async", staleness="compensated", compensation=strength)
    plain = ranks(WORKERS, train, served("async"), str(tmp_path), "", True)[0]
    found = ranks(WORKERS, train, compensated, str(tmp_path), "recorded", False)[0]
    assert all(torch.equal(tensor, found[name]) for name, tensor in plain.items()) is equal


def test_a_round_that_was_recorded_again_replaces_what_followed(tmp_path: Path) -> None:
    """As after a restart from a checkpoint."""
    path = tmp_path / "rank-00000.jsonl"
    rounds = [(1, ["c0"]), (7, ["c1"]), (13, ["c2"]), (7, ["c3"])]
    path.write_text("\n".join(json.dumps({"first": first, "last": 0, "events": events}) for first, events in rounds))
    assert read_rounds(path) == {1: ["c0"], 7: ["c3"]}


def test_a_replay_that_goes_elsewhere_says_so(tmp_path: Path) -> None:
    """More events than were recorded, a round that was not, a damaged file, and none."""
    path = tmp_path / "rank-00000.jsonl"
    path.write_text('{"first": 1, "last": 6, "events": ["c0"]}\n')
    rounds = Rounds(EventFiles(replay=path))
    order = rounds.begin()
    assert not order.may("c1")
    assert order.may("c0")
    order.happened("c0")
    with pytest.raises(ConfigError, match="the recorded round has 1 events, and here is one more"):
        order.may("c0")
    rounds.end(6)
    with pytest.raises(ConfigError, match="no order of events is recorded for the round from step 7 on"):
        rounds.begin()
    path.write_text('{"first": 1, "eve')
    with pytest.raises(ConfigError, match="is no record of events"):
        read_rounds(path)
    with pytest.raises(ConfigError, match="is not there"):
        read_rounds(tmp_path / "none")


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"sync": {"kind": "hogwild"}, "optimizer": {"kind": "sgd"}}, 'sync.kind = "hogwild" cannot be replayed'),
        ({"batch": {"division": "by_speed"}}, 'batch.division = "by_speed" cannot be replayed'),
        ({"elastic": {"max": 2}}, r"a run with \[elastic\] cannot be replayed"),
        ({"elastic": {"max": 2}, "sync": {"kind": "server", "admission": "async"}}, r"with \[elastic\]"),
    ],
)
def test_what_cannot_be_repeated_is_refused(tmp_path: Path, tables: Tables, words: str) -> None:
    """In a sentence."""
    if "optimizer" in tables:
        tables = tables | {"optimizer": {"kind": "sgd", "lr": 0.1}}
    with pytest.raises(ConfigError, match=words):
        replayed(run_file_of(tmp_path, **tables))


def test_what_is_decided_by_the_clock_is_repeated_step_by_step(tmp_path: Path) -> None:
    """Two choices in each of three steps; the run went on after the second one from a checkpoint of the first. The last
    choices hold; a rank that has made none says so.
    """
    recorded, said = EventFiles(record=tmp_path / "one"), ["wint8", "wnone", "wnone"]
    one = Rounds(recorded)
    for step in range(2):
        one.decide(said[step], first=True)
        one.decide("wgone", first=False)
    again = Rounds(recorded)
    again.resume(1)
    for step in (1, 2):
        again.decide(said[step], first=True)
        again.decide(f"wother-{step}", first=False)
    repeated = Rounds(EventFiles(record=tmp_path / "two", replay=tmp_path / "one"))
    found = [repeated.decide("wmine", first=first) for _ in range(4) for first in (True, False)]
    assert found == ["wint8", "wgone", "wnone", "wother-1", "wnone", "wother-2", "wnone", "wother-2"]
    assert read_rounds(tmp_path / "two") == read_rounds(tmp_path / "one")
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="nothing is recorded that this rank decided by step 1"):
        Rounds(EventFiles(replay=tmp_path / "empty")).decide("wmine", first=True)


def test_what_is_decided_is_written_where_it_changes(tmp_path: Path) -> None:
    """A thousand steps of two choices that change once: a line for each first choice, and one for the change."""
    path = tmp_path / "rank-00000.jsonl"
    rounds = Rounds(EventFiles(record=path))
    for step in range(1, 1001):
        rounds.decide("wnone" if step < 700 else "wint8", first=True)
        rounds.decide("wnone", first=False)
    assert len(path.read_text().splitlines()) == 3
    assert read_rounds(path) == {1: ["wnone", "wnone"], 700: ["wint8", "wnone"]}


def test_a_rank_that_sends_nothing_coded_is_repeated_too(tmp_path: Path) -> None:
    """Of the ranks of a host some lead no buffer: their record is empty, and it is there."""
    run_file = run_file_of(tmp_path, codec={"kind": "auto"})
    assert rounds_of(run_file, 3, tmp_path / "recorded", None) is not None
    repeated = rounds_of(run_file, 3, tmp_path / "replayed", tmp_path / "recorded")
    assert repeated is not None
    assert repeated.repeats
    with pytest.raises(ConfigError, match=r"rank-00004\.jsonl is not there"):
        rounds_of(run_file, 4, tmp_path / "replayed", tmp_path / "recorded")
