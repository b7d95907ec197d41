"""Speed-up and efficiency are told against a run of the same model on one rank, and nothing else."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.observe.events import EventWriter
from shoal.observe.facts import write_facts
from shoal.observe.goodput import EFFICIENCY, RATE, SPEED_UP, Scaling, one_rank_rate

MODEL = {"kind": "gpt", "layers": 2}


def one_rank_run(directory: Path, *, world: int = 1, steps: int = 10, layers: int = 2) -> Path:
    """A run whose first half was slow (10 samples/s), and then had 100."""
    directory.mkdir()
    (directory / "run.toml").write_text(f'[model]\nkind = "gpt"\nlayers = {layers}\n')
    with EventWriter(directory, rank=0) as writer:
        for step in range(1, steps + 1):
            writer.write(step, {RATE: 10.0 if step <= steps / 2 else 100.0}, time_s=float(step))
    write_facts(directory, {"world": world})
    return directory


def test_speed_up_is_a_ratio_of_rates(tmp_path: Path) -> None:
    """360 samples/s on 4 ranks, where one rank had 100: 3.6 times, efficiency 0.9. Steps that warm up do not count."""
    rate = one_rank_rate(one_rank_run(tmp_path / "one"), MODEL)
    assert rate == 100.0
    figures = Scaling(rate, 4).figures(360.0)
    assert figures[SPEED_UP] == pytest.approx(3.6)
    assert figures[EFFICIENCY] == pytest.approx(0.9)
    assert math.isnan(Scaling(rate, 4).figures(math.nan)[SPEED_UP])


def test_what_is_no_run_of_one_rank_is_refused(tmp_path: Path) -> None:
    """No run, two ranks, no steps, another model: each with the directory and what was found there."""
    cases = (
        (tmp_path / "none", "has no steps to compare with"),
        (one_rank_run(tmp_path / "two", world=2), "had 2 ranks"),
        (one_rank_run(tmp_path / "short", steps=0), "has no steps to compare with"),
        (one_rank_run(tmp_path / "other", layers=3), r"another model \(model.layers was 3, here it is 2\)"),
    )
    for directory, sentence in cases:
        with pytest.raises(UsageError, match=sentence) as refusal:
            one_rank_rate(directory, MODEL)
        assert str(directory) in str(refusal.value)
