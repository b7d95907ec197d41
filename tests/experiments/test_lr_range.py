"""`shoal tune lr`: the rates that its run has, what its curve says, and the verb itself on two ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from shoal.config.load import dumps
from shoal.errors import UsageError
from shoal.experiments.lr_range import in_characters, judge, overrides_of, rates_beside, rates_between, smoothed
from shoal.optim.matrix_kinds import Muon
from shoal.optim.schedule import peak_rate, rate
from shoal.runfile.load import load_run
from tests.cli.project import project

RATES = rates_between(1e-6, 10.0, 141)
RUN = """
[run]
name = "range"
steps = 7
[model]
kind = "mlp"
inputs = 64
outputs = 10
[data]
kind = "digits"
[batch]
global_samples = 64
[optimizer]
lr = 0.3
KEYS
[schedule]
kind = "step"
milestones = [3]
warmup_steps = 2
final_fraction = 0.7
"""


@pytest.mark.parametrize("keys", ["", "lr_for_samples = 16", 'kind = "lars"'], ids=["plain", "scaled", "lars"])
def test_the_run_has_the_rates_whatever_its_own_schedule(tmp_path: Path, keys: str) -> None:
    """Step by step, the first and the last among them; and what the run writes down of itself is read again."""
    file = tmp_path / "run.toml"
    file.write_text(RUN.replace("KEYS", keys))
    loaded = load_run(file, overrides_of(load_run(file), RATES, tmp_path / "there"))
    peak, _ = peak_rate(loaded.optimizer, global_samples=loaded.batch.global_samples)
    found = [rate(loaded.schedule, peak, step=step, steps=loaded.run.steps) for step in range(1, len(RATES) + 1)]
    assert found == pytest.approx(RATES, rel=1e-12)
    assert loaded.run.steps == len(RATES)
    (tmp_path / "again.toml").write_text(dumps(loaded))
    assert load_run(tmp_path / "again.toml") == loaded


BESIDE = """kind = "muon"
adamw_lr = 0.03
groups = { "*.bias" = { kind = "lion" }, "body.0.*" = { kind = "sgd", lr = 0.6, momentum = 0.5 }, "*" = { rate = 2.0 } }
"""


def test_rates_beside_it_rise_in_proportion(tmp_path: Path) -> None:
    """AdamW's part of Muon and groups of their own kind: else they would stand nearly still where the rate is low."""
    file = tmp_path / "run.toml"
    file.write_text(RUN.replace("KEYS", BESIDE))
    before = load_run(file).optimizer
    loaded = load_run(file, overrides_of(load_run(file), RATES, tmp_path / "there")).optimizer
    times = 10.0 / 0.3
    assert isinstance(loaded, Muon)
    assert loaded.adamw_lr == pytest.approx(0.03 * times)
    assert [loaded.groups[p].lr for p in before.groups] == [pytest.approx(r) for r in (1e-4 * times, 0.6 * times, None)]
    assert [loaded.groups[p].rate for p in before.groups] == [1.0, 1.0, 2.0]
    assert loaded.groups["body.0.*"].momentum == 0.5
    wanted = {"adamw_lr": 0.003, 'groups."*.bias".lr': 1e-5, 'groups."body.0.*".lr': 0.06}
    assert rates_beside(before, 0.03) == pytest.approx({f"optimizer.{key}": rate for key, rate in wanted.items()})


@pytest.mark.parametrize(("kind", "why"), [("lbfgs", "length of a step"), ("schedule_free_sgd", "constant rate")])
def test_optimizers_of_a_constant_rate_are_refused(tmp_path: Path, kind: str, why: str) -> None:
    """In a sentence with another way."""
    file = tmp_path / "run.toml"
    schedule = '[schedule]\nkind = "constant"\n'
    file.write_text(RUN.replace("KEYS", f'kind = "{kind}"').partition("[schedule]")[0] + schedule)
    with pytest.raises(UsageError, match=rf'"{kind}" .*{why}.*shoal sweep'):
        overrides_of(load_run(file), RATES, tmp_path / "there")


def curve(at: float) -> float:
    """Falls around 1e-3, is lowest near 1e-1, and rises from there."""
    place = math.log10(at)
    return 3.0 - 2.0 / (1 + math.exp(-4 * (place + 3))) + 4.0 / (1 + math.exp(-6 * (place - 0.2)))


def test_a_curve_says_where_it_falls_lies_and_rises() -> None:
    """On a known one with noise; the picture has its suggestion in it."""
    losses = [curve(at) + 0.02 * math.sin(37 * number) for number, at in enumerate(RATES)]
    found = judge(RATES, losses)
    assert found.steepest == pytest.approx(1e-3, rel=0.5)
    assert 1e-2 < found.lowest < 0.4
    assert found.diverges is not None
    assert curve(found.diverges) == pytest.approx(3.0, rel=0.2)
    assert found.suggested == pytest.approx(min(found.steepest, found.lowest / 10), rel=0.05)
    lines = in_characters(found)
    marked = lines[-2].index("^") - lines[-3].index("+") - 1
    assert marked == round(63 * math.log(found.suggested / RATES[0]) / math.log(RATES[-1] / RATES[0]))
    assert sum("*" in line for line in lines) > 6


def test_a_run_that_ends_in_numbers_that_are_none_is_judged_up_to_there() -> None:
    """Where it diverges is where they begin."""
    losses = [curve(at) if at < 0.5 else math.nan for at in RATES]
    found = judge(RATES, losses)
    assert found.diverges == next(at for at in RATES if at >= 0.5)
    assert found.steepest == pytest.approx(1e-3, rel=0.5)
    assert json.loads(json.dumps(found.losses[:3])) == found.losses[:3]


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([3.0 + 0.01 * math.sin(n) for n in range(len(RATES))], "stayed at.*--from and --to, or more --steps"),
        ([math.nan] * len(RATES), "not finite from step 1 on: begin with a lower rate"),
    ],
)
def test_a_curve_that_says_nothing_is_refused(losses: list[float], said: str) -> None:
    """With what to try."""
    with pytest.raises(UsageError, match=said):
        judge(RATES, losses)


def test_smoothing_moves_nothing() -> None:
    """A straight line stays as it is, also at its ends; a mean of noise does not."""
    line = [2.0 - 0.1 * number for number in range(30)]
    assert smoothed(line, 4) == pytest.approx(line)
    jump = [float(number == 10) for number in range(30)]
    assert smoothed(jump, 2)[8:13] == pytest.approx([0.2] * 5)


@pytest.mark.slow
def test_the_verb_tells_in_json_and_draws(tmp_path: Path) -> None:
    """On the two ranks of a run file, whose own folder it leaves alone."""
    own = project(tmp_path)
    keys = ("--from", "1e-3", "--to", "1", "--steps", "20", "--picture", "lr.png", "--json")
    done = own.shoal("tune", "lr", "run.toml", "optimizer.kind=sgd", "run.processes=2", *keys)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rates"] == pytest.approx(rates_between(1e-3, 1.0, 20))
    assert 1e-4 <= found["suggested"] <= 1
    assert (own.folder / "lr.png").read_bytes().startswith(b"\x89PNG")
    assert not (own.folder / "runs").exists()
