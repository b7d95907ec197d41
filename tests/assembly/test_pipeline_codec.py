"""`pipeline.codec`, end to end: the ledger's bytes, the loss of a short training, what verify says."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.assembly.run import open_run
from shoal.launcher.environment import Place
from shoal.runfile.codec_rules import pipeline_codec_refusal
from tests.assembly.journey import travel
from tests.ranks import TestPlace
from tests.verification.layouts import GPT, corpus, run_file_of, verified

STEPS = 12
LOSS = 0.01
"""Relative, of 12 steps of a GPT of 30,000 numbers."""
MICROBATCHES, SAMPLES, SEQUENCE, WIDTH, FLOAT = 4, 2, 16, 32, 4
HEADER_BYTES = 88


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    corpus(folder)
    return folder


def tables(codec: str, **keys: Any) -> dict[str, Any]:
    """Two stages, four microbatches of two samples."""
    pipeline = {"schedule": "1F1B", "microbatches": MICROBATCHES, "codec": codec, **keys}
    return {"model": GPT, "layout": {"pipeline": 2}, "pipeline": pipeline, "batch": {"micro_samples": SAMPLES}}


def sent(place: TestPlace, choice: dict[str, Any], folder: str) -> int:
    """Bytes that this rank sent to its neighbour in one step."""
    run_file = run_file_of(Path(folder), **choice, wire={"check_collectives": False})
    run_file = msgspec.structs.replace(run_file, run=msgspec.structs.replace(run_file.run, processes=place.size))
    run = open_run(run_file, Place(place.rank, place.size, place.rank, place.size, 0, "shoal"), store=place.store)
    with closing(run.feed()) as feed:
        run.step(1, feed.next().microbatches, lr=2e-3)
        result = run.step(2, feed.next().microbatches, lr=2e-3)
    return result.wire["send"].bytes_sent


@pytest.mark.parametrize(("codec", "each"), [("none", FLOAT), ("bfloat16", 2), ("int8", 1 + 4 / 256)])
def test_the_ledger_counts_coded_bytes(ranks, folder: Path, codec: str, each: float) -> None:
    """Exactly: a stage sends one activation of each microbatch, or one gradient; the first one tells its form, too."""
    numbers = SAMPLES * SEQUENCE * WIDTH
    first, last = ranks(2, sent, tables(codec), str(folder))
    assert last == MICROBATCHES * numbers * each
    assert first == last + HEADER_BYTES


@pytest.mark.slow
def test_a_short_training_ends_near_the_exact_one(ranks, folder: Path) -> None:
    """Every loss of twelve steps, and none the same; eight bits are further off than bfloat16, in blocks of 256."""
    losses = {
        codec: ranks(2, travel, tables(codec), str(folder), f"training-{codec}", STEPS)[0].losses
        for codec in ("none", "bfloat16", "int8")
    }
    for codec in ("bfloat16", "int8"):
        assert losses[codec] != losses["none"]
        assert losses[codec] == [pytest.approx(loss, rel=LOSS) for loss in losses["none"]]


def test_verify_proves_the_layout_and_says_what_it_left_out(ranks, folder: Path) -> None:
    """With activations as they are; the note names the codec and its bound."""
    verdict = ranks(2, verified, tables("int8"), str(folder), False, 1)[0]
    assert verdict["holds"]
    (note,) = verdict["notes"]
    assert 'pipeline.codec = "int8" was left out' in note
    assert "1/254" in note
    assert ranks(2, verified, tables("none"), str(folder), False, 1)[0]["notes"] == []


def test_without_stages_there_is_nothing_to_code(folder: Path) -> None:
    """A sentence before the start."""
    sentence = pipeline_codec_refusal(run_file_of(folder, pipeline={"codec": "int8"}))
    assert sentence is not None
    assert 'pipeline.codec = "int8" with layout.pipeline = 1' in sentence
    assert pipeline_codec_refusal(run_file_of(folder, **tables("int8"))) is None
    assert pipeline_codec_refusal(run_file_of(folder)) is None
