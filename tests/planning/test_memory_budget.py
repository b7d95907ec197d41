"""What `memory.budget` chooses: of the mixtures that fit the one with the shortest predicted step, with its bill."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from shoal import units
from shoal.errors import ConfigError, LayoutError
from shoal.launcher.environment import Place
from shoal.observe.events import read_events
from shoal.observe.facts import read_facts
from shoal.observe.terminal import ProgressBar
from shoal.planning import mixture_search, trial
from shoal.planning.memory_budget import FILE_NAME, Bill, foreseen, used_by, with_budget
from shoal.planning.mixture_prices import PRICING, Prices
from shoal.planning.mixtures import AS_IT_IS, CHANGES, choices, ladder, mixtures, with_values
from shoal.planning.trial import FirstSteps, bare, hurried, needed
from shoal.runfile.rules import refusal
from shoal.runfile.run_file import RunFile
from tests.planning.test_mixture_prices import every_mixture
from tests.verification.layouts import run_file_of

MIB = 1 << 20
TORCHRUN = Place(0, 1, 0, 1, 0, "torchrun")


@pytest.fixture
def budgeted(tmp_path: Path) -> RunFile:
    return run_file_of(tmp_path, memory={"budget": "30 MiB"}, run={"processes": 1, "device": "cpu"})


class Trials:
    """Stand for runs: `peak` says what a run file needs (bytes), or why it does not run; `losses` what it comes to."""

    def __init__(
        self, peak: Callable[[RunFile], int | str], losses: Callable[[RunFile], float] = lambda _: 2.0
    ) -> None:
        self.peak, self.losses, self.tried = peak, losses, list[RunFile]()

    def __call__(self, run_file: RunFile) -> FirstSteps | str:
        self.tried.append(run_file)
        found = self.peak(run_file)
        return found if isinstance(found, str) else FirstSteps(found, [self.losses(run_file)], 0.1)


def as_priced(run_file: RunFile, scale: float = 1.0) -> Callable[[RunFile], int]:
    """Peaks are what the planner says of each mixture, times `scale`."""
    prices = Prices(run_file)
    priced = ((one, prices.of(one)) for change in CHANGES for one in every_mixture(run_file, prices, change))
    known = {dumped(run_file, one.values): price for one, price in priced if price is not None}
    return lambda tried: int(scale * known[dumped(tried, {})].size_bytes)


def dumped(run_file: RunFile, values: dict[str, Any]) -> tuple[Any, ...]:
    """What mixtures differ in."""
    own = with_values(run_file, values)
    offload = own.memory.offload
    return (
        own.memory.recompute, own.memory.recompute_budget, offload.optimizer, offload.activations, offload.parameters,
        own.memory.zero, own.memory.loss_chunks, own.batch.micro_samples, own.optimizer.variant,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("processes", "share", "scale"), [(1, 1.0, 1.0), (1, 0.6, 0.8), (2, 0.6, 1.3), (1, 0.4, 1.0), (2, 0.2, 1.0)]
)
def test_the_cheapest_that_fits_is_found(tmp_path: Path, processes: int, share: float, scale: float) -> None:
    """Against all mixtures: where trials come to the predicted peaks, or are all off by the same, the one with the
    least change that fits, and of those the one with the shortest step. Few are tried.
    """
    model = {"kind": "gpt", "vocabulary": 512, "layers": 4, "width": 128, "heads": 4}
    given = {"model": model, "batch": {"sequence": 64}, "run": {"processes": processes, "device": "cpu"}}
    plain = as_priced(run_file_of(tmp_path, **given))(run_file_of(tmp_path, **given))
    own = run_file_of(tmp_path, **given, memory={"budget": f"{int(plain * share * scale)} B"})
    peak, prices = as_priced(own, scale), Prices(own)
    fitting = [
        (place, price.step_s, one)
        for place, change in enumerate(CHANGES[:2])
        for one in every_mixture(own, prices, change)
        if (price := prices.of(one)) is not None
        if peak(with_values(own, one.values)) <= (own.memory.budget_bytes or 0)
    ]
    trials = Trials(peak)
    if not fitting:
        with pytest.raises(LayoutError, match="is short by"):
            with_budget(own, None, trial=trials)
        return
    with_budget(own, None, trial=trials)
    bill = msgspec.json.decode((tmp_path / "run" / FILE_NAME).read_bytes(), type=Bill)
    best = min(fitting, key=lambda one: one[:2])
    as_it_is = prices.of(AS_IT_IS)
    assert as_it_is is not None
    longer = best[1] / as_it_is.step_s - 1
    assert (bill.tried[-1].change, bill.tried[-1].longer) == (best[2].change, pytest.approx(longer))
    assert len(trials.tried) <= 6


def test_a_trial_has_the_masks_and_references_that_its_run_will_have(tmp_path: Path) -> None:
    """Though the run makes them later than a trial ends, whose last step is one as most are."""
    masks = {"kind": "magnitude", "density": 0.1, "schedule": {"begin": 8, "every": 2}}
    run_file = run_file_of(tmp_path, sparsity=masks, freeze={"progress": {"criterion": "activations", "every": 5}})
    assert "would end before it has its density" in str(refusal(with_values(run_file, {"run.steps": 3})))
    tried = hurried(run_file, 3)
    assert refusal(tried) is None
    assert tried.sparsity is not None
    assert (tried.sparsity.schedule.begin, tried.sparsity.schedule.end, tried.sparsity.density) == (2, 2, 0.1)
    assert tried.freeze is not None
    assert tried.freeze.progress is not None
    assert tried.freeze.progress.every == 1
    assert tried.freeze.progress.first(tried.run.steps) == tried.run.steps == 4


def test_it_is_held_to_the_budget_and_the_bill_says_what_was_tried(budgeted: RunFile, tmp_path: Path) -> None:
    peaks = iter([60 * MIB, 29 * MIB])
    trials, bar = Trials(lambda run_file: next(peaks)), Mock(spec=ProgressBar)
    chosen, why = with_budget(budgeted, None, trial=trials, bar=bar)
    said = [call.args[0] for call in bar.update.call_args_list]
    assert (said[0], said[-1].partition(", of memory.")[0]) == (PRICING, "memory.budget: trial 2")
    assert [one.memory.simulate_device for one in trials.tried] == ["1024 GiB"] * 2
    assert chosen.memory.simulate_device == "30 MiB"
    assert chosen.memory.budget is None
    assert (chosen.memory.offload, chosen.memory.recompute) == (
        trials.tried[1].memory.offload, trials.tried[1].memory.recompute,
    )  # fmt: skip
    assert "needs 29 MiB" in why
    assert "losses keep every bit (the run as it is needs 60 MiB)" in why
    bill = msgspec.json.decode((tmp_path / "run" / FILE_NAME).read_bytes(), type=Bill)
    assert [one.peak_bytes for one in bill.tried] == [60 * MIB, 29 * MIB]


def test_ranks_and_later_starts_use_what_was_chosen(budgeted: RunFile) -> None:
    """Until something changes that the peak depends on. A rank of another launcher cannot choose for all."""
    trials = Trials(lambda run_file: 60 * MIB if len(trials.tried) == 1 else 20 * MIB)
    with pytest.raises(ConfigError, match="under torchrun"):
        with_budget(budgeted, TORCHRUN, trial=trials)
    first, _ = with_budget(budgeted, None, trial=trials)
    longer = msgspec.structs.replace(budgeted, run=msgspec.structs.replace(budgeted.run, steps=999))
    assert with_budget(longer, TORCHRUN, trial=trials)[0].memory == first.memory
    assert len(trials.tried) == 2
    wider = msgspec.structs.replace(budgeted, batch=msgspec.structs.replace(budgeted.batch, sequence=32))
    with_budget(wider, None, trial=trials)
    assert len(trials.tried) == 3


def test_a_look_leaves_the_run_directory_alone(
    budgeted: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What verify tries lies in the cache folder, where its ranks find it; the bill of a run stays as it is."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    trials = Trials(lambda run_file: 20 * MIB)
    looked, _ = with_budget(budgeted, None, keeps=False, trial=trials)
    assert not (tmp_path / "run").exists()
    assert with_budget(budgeted, TORCHRUN, keeps=False, trial=trials)[0] == looked
    kept, _ = with_budget(budgeted, None, trial=trials)
    before = (tmp_path / "run" / FILE_NAME).read_bytes()
    with_budget(with_values(budgeted, {"memory.budget": "25 MiB"}), None, keeps=False, trial=trials)
    assert (tmp_path / "run" / FILE_NAME).read_bytes() == before
    assert (kept, len(trials.tried)) == (looked, 3)


def test_a_budget_that_nothing_meets_says_by_how_much_and_what_frees_what(tmp_path: Path) -> None:
    memory = {"budget": "30 MiB", "offload": {"part": "1 MiB"}}
    own = run_file_of(tmp_path, memory=memory, run={"processes": 1, "device": "cpu"})
    trials = Trials(lambda run_file: 41 * MIB if run_file.memory.recompute == "full" else 60 * MIB)
    with pytest.raises(LayoutError, match=r"short by 11 MiB: the least that is met is 41 MiB, with .*full") as refused:
        with_budget(own, None, trial=trials)
    assert re.search(r'memory\.recompute = "full" frees [0-9.]+ [KM]iB for \+[0-9]+ % of a step', str(refused.value))
    assert 'adamw_8bit" and memory.budget_may_change = "moments" frees' in str(refused.value)


def test_the_least_of_a_refusal_has_all_that_frees(budgeted: RunFile) -> None:
    """Whatever the planner thinks of it: here each means frees 3 MiB, but chunks, which need 3 more."""

    def peak(run_file: RunFile) -> int:
        offload, memory = run_file.memory.offload, run_file.memory
        on = [offload.optimizer == "host", offload.activations == "host", offload.parameters == "host"]
        on += [memory.recompute == "full", run_file.batch.micro_samples == 1]
        return 60 * MIB - 3 * MIB * sum(on) + 3 * MIB * (memory.loss_chunks > 1)

    with pytest.raises(LayoutError, match=r"the least that is met is 45 MiB, with") as refused:
        with_budget(with_values(budgeted, {"memory.offload.part": "1 MiB"}), None, trial=Trials(peak))
    with_keys = str(refused.value).partition("; raise it")[0]
    assert "loss_chunks" not in with_keys
    assert all(key in with_keys for key in ("micro_samples = 1", '"full"', "optimizer", "activations", "parameters"))


def test_the_least_is_one_that_is_met(budgeted: RunFile) -> None:
    """Parts of the state are larger under a larger budget: three of them and 38 MiB, not what the trials needed."""
    trials = Trials(lambda run_file: 38 * MIB + 3 * run_file.memory.offload.part_bytes)
    with pytest.raises(LayoutError) as refused:
        with_budget(budgeted, None, trial=trials)
    found = re.search(r"the least that is met is ([0-9.]+ MiB), with", str(refused.value))
    assert found is not None
    raised = with_values(budgeted, {"memory.budget": found[1]})
    chosen, _ = with_budget(raised, None, trial=trials)
    assert int(trials.peak(chosen)) <= (raised.memory.budget_bytes or 0) < 43 * MIB


def test_what_changes_the_losses_is_not_used(budgeted: RunFile) -> None:
    """As a smaller microbatch does where samples are coupled."""

    def losses(run_file: RunFile) -> float:
        return 2.0 + 0.1 * (run_file.batch.micro_samples is not None)

    trials = Trials(lambda run_file: 60 * MIB - 40 * MIB * (losses(run_file) > 2.0), losses)
    with pytest.raises(LayoutError, match="is short by"):
        with_budget(budgeted, None, trial=trials)
    assert any(run_file.batch.micro_samples for run_file in trials.tried)


def test_what_only_rounds_waits_until_that_is_allowed(tmp_path: Path) -> None:
    """Of means that should change nothing: they are used where no other mixture keeps every bit."""

    def losses(run_file: RunFile) -> float:
        return 2.0 + 1e-7 * (run_file.memory.offload.activations == "host")

    for full, home in ((20, "device"), (60, "host")):
        own = run_file_of(tmp_path / home, memory={"budget": "30 MiB"}, run={"processes": 1, "device": "cpu"})
        peaks = {"full": full * MIB}

        def peak(run_file: RunFile, peaks: dict[str, int] = peaks) -> int:
            rounds = run_file.memory.offload.activations == "host"
            return 20 * MIB if rounds else peaks.get(run_file.memory.recompute, 50 * MIB)

        chosen, why = with_budget(own, None, trial=Trials(peak, losses))
        assert chosen.memory.offload.activations == home
        assert ("keep every bit" in why) == (home == "device")


def test_what_does_not_run_is_passed_over(budgeted: RunFile) -> None:
    trials = Trials(lambda run_file: 60 * MIB if run_file.memory.offload.optimizer == "device" else "why not")
    with pytest.raises(LayoutError, match=r"the least that is met is 60 MiB"):
        with_budget(budgeted, None, trial=trials)
    assert sum(run_file.memory.offload.optimizer == "host" for run_file in trials.tried) < 5


def test_what_may_change_is_the_users_to_say(tmp_path: Path) -> None:
    """Moments in 8 bits are tried where they are allowed, behind all else."""
    for may, tried in (("nothing", {"adamw"}), ("rounding", {"adamw"}), ("moments", {"adamw", "adamw_8bit"})):
        memory = {"budget": "30 MiB", "budget_may_change": may}
        own = run_file_of(tmp_path / may, memory=memory, run={"processes": 2, "device": "cpu"})
        trials = Trials(lambda run_file: 60 * MIB)
        with pytest.raises(LayoutError):
            with_budget(own, None, trial=trials)
        assert {run_file.optimizer.variant for run_file in trials.tried} == tried
        assert any(run_file.batch.micro_samples for run_file in trials.tried) == (may != "nothing")


@pytest.mark.parametrize("size", [1, 1000, 41 * MIB + 1, 42_000_001, (1 << 30) + 5, 123_456_789_012])
def test_a_size_is_written_as_no_less(size: int) -> None:
    """In three digits, as people read it."""
    text = mixture_search._no_less(size)
    assert size <= units.memory_bytes(text) <= 1.011 * size + 1


@pytest.mark.parametrize(
    ("given", "absent"),
    [
        ({"optimizer": {"kind": "muon"}}, {"state", "parameters", "moments"}),
        ({"run": {"compile": True}}, {"activations", "parameters"}),
        ({"layout": {"replicate": 2}}, {"stage"}),
        ({"layout": {"shard": 2}}, {"stage"}),
        ({"layout": {"pipeline": 2}}, {"stage", "microbatch"}),
        ({"sync": {"kind": "local"}}, {"stage"}),
        ({"codec": {"kind": "cast"}}, {"stage"}),
        ({"batch": {"micro_samples": 2}}, {"microbatch"}),
    ],
)
def test_mixtures_are_those_that_the_run_can_be_with(tmp_path: Path, given: dict[str, Any], absent: set[str]) -> None:
    """Each once, and what the run file says itself in all of them."""
    run = {"processes": 2, "device": "cpu", **given.get("run", {})}
    own = run_file_of(tmp_path, **{**given, "run": run})
    found = [one for change in CHANGES for one in mixtures(own, change)]
    assert {means.kind for one in found for means in one.means}.isdisjoint(absent)
    assert len(set(found)) == len(found)
    if "compile" not in run:
        assert all(refusal(with_values(own, one.values)) is None for one in found)
    said = run_file_of(tmp_path, memory={"recompute": "full", "offload": {"optimizer": "disk"}}, run=run)
    kept = [one for change in CHANGES for one in mixtures(said, change)]
    assert {means.kind for one in kept for means in one.means}.isdisjoint({"recompute", "state"})


def test_a_plan_says_what_is_predicted_and_then_what_was_chosen(budgeted: RunFile, tmp_path: Path) -> None:
    """On a cluster's devices, of which no start here knows, what is predicted."""
    small = with_values(budgeted, {"memory.budget": "600 KiB"})
    assert foreseen(with_values(small, {"memory.budget": None}), None) is None
    predicted = (
        r'memory.budget = "600 KiB", as predicted: .+ needs [0-9.]+ KiB \(as it is [0-9.]+ MiB\), \+[0-9]+ % of .+'
    )
    assert re.fullmatch(predicted, foreseen(small, None) or "")
    enough = foreseen(with_values(small, {"memory.budget": "1 GiB"}), None) or ""
    assert re.fullmatch(r'memory.budget = "1 GiB", as predicted: the run as it is fits, and needs [0-9.]+ MiB', enough)
    assert "no mixture fits" in (foreseen(with_values(small, {"memory.budget": "1 KiB"}), None) or "")
    chosen, why = with_budget(small, None, trial=Trials(lambda run_file: 500 << 10))
    assert (foreseen(small, None) or "").startswith(why)
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('[cluster]\nnodes = 1\nmachine = "dgx-h100"\n', encoding="utf-8")
    assert "as predicted" in (foreseen(small, cluster) or "")
    assert used_by(chosen) == why
    assert used_by(with_values(chosen, {"memory.offload.part": "1 MiB"})) == ""
    assert used_by(with_values(chosen, {"memory.simulate_device": None})) == ""


def test_without_prices_a_ladder_is_climbed(tmp_path: Path) -> None:
    """Each rung frees no less than the one before it."""
    rungs = list(ladder(run_file_of(tmp_path, run={"processes": 2, "device": "cpu"})))
    assert rungs[0] == AS_IT_IS
    assert all(after.frees_as_much_as(before) for before, after in pairwise(rungs))
    assert len(rungs) < 20


def test_kinds_of_means_are_ordered_by_what_they_free(tmp_path: Path) -> None:
    for own in choices(run_file_of(tmp_path, run={"processes": 2, "device": "cpu"})):
        assert [means.strength for means in own] == sorted({means.strength for means in own})


def test_a_run_that_no_device_can_count_is_refused(tmp_path: Path) -> None:
    run = {"processes": 1, "device": "cpu", "compile": True}
    with pytest.raises(ConfigError, match=r"memory\.budget needs .*run\.compile"):
        with_budget(run_file_of(tmp_path, memory={"budget": "30 MiB"}, run=run), None)


def test_a_budget_beyond_the_machine_is_refused(tmp_path: Path) -> None:
    run = {"processes": 1, "device": "cpu"}
    with pytest.raises(ConfigError, match=r'memory\.budget = "900 TiB" is more than the .* that .* has'):
        with_budget(run_file_of(tmp_path, memory={"budget": "900 TiB"}, run=run), None)


SCRIPT = """
import os, torch, shoal
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(128, 128) for _ in range(4)])

    def forward(self, x):
        for block in self.body:
            x = block(x).relu()
        return x

def other():
    assert "SHOAL_TRIAL" not in os.environ, "it is another run that is tried"
    return Net()

data = [(torch.full((128,), index / 64), index % 10) for index in range(64)]
tables = {"run": {"name": "both", "steps": 2, "processes": 1, "device": "cpu"}, "batch": {"global_samples": 16}}
for name, model, memory in (("other", other, {}), ("mine", Net, {"budget": "1 MiB"})):
    given = {**tables, "run": {**tables["run"], "directory": f"runs/{name}"}, "memory": memory}
    shoal.train(given, model=model, data=data, loss=nn.CrossEntropyLoss(reduction="none"))
print("the end")
"""


@pytest.mark.slow
def test_objects_of_a_script_are_tried_by_the_script(tmp_path: Path) -> None:
    """Trials take its steps alone: what stands behind the call runs once, and a run before it, though of the same name,
    is not trained again.
    """
    (tmp_path / "mine.py").write_text(SCRIPT, encoding="utf-8")
    ran = subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.count("the end") == 1
    bill = msgspec.json.decode((tmp_path / "runs/mine" / FILE_NAME).read_bytes(), type=Bill)
    assert len(bill.tried) > 1
    assert (bill.tried[-1].peak_bytes or 0) <= MIB
    losses = [event.get("loss/train") for event in read_events(tmp_path / "runs/other")]
    assert sum(loss is not None for loss in losses) == 2
    assert read_facts(tmp_path / "runs/mine")["memory_budget"].startswith('memory.budget = "1 MiB": ')


def test_a_trial_tells_nobody_and_takes_up_no_checkpoint(budgeted: RunFile) -> None:
    """What it measures in its steps stays, as memory goes into that."""
    told = {
        "checkpoint.remote": "memory://store", "checkpoint.every_steps": 1, "observe.webhook": "http://host/hook",
        "observe.mlflow": "http://host", "observe.wandb": "online", "observe.prometheus_port": 1, "observe.page": True,
        "observe.tensorboard": True, "observe.sample_bytes": 9, "observe.evaluate_every_steps": 1,
    }  # fmt: skip
    measured = with_values(budgeted, {"observe.noise_every_steps": 1, "observe.layer_norms_every_steps": 1})
    found = bare(with_values(measured, told))
    assert found == bare(measured)
    assert (found.checkpoint.remote, found.observe.noise_every_steps) == (None, 1)
    assert found.observe.layer_norms_every_steps == 1


def test_sigterm_leaves_nothing_of_a_trial(budgeted: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))

    def sleeping(command: list[str], *, env: dict[str, str], first: Callable[[], None], **to: int) -> Any:
        assert list((tmp_path / "scratch").iterdir())
        started.append(subprocess.Popen(["sleep", "60"], env=env, preexec_fn=first, stderr=to["stderr"]))
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return started[-1]

    monkeypatch.setattr(trial.warm, "start", sleeping)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # not the end of the tests, where this fails
    try:
        with pytest.raises(KeyboardInterrupt):
            with_budget(budgeted, None)
        assert [one.poll() for one in started] == [-signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
        started[-1].kill()
    assert not list((tmp_path / "scratch").iterdir())


def test_a_bill_of_another_version_stops_no_run_without_a_budget(tmp_path: Path) -> None:
    own = run_file_of(tmp_path, run={"processes": 1, "device": "cpu"})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FILE_NAME).write_text('{"tried": "nothing"}', encoding="utf-8")
    assert used_by(own) == ""


@pytest.mark.parametrize(
    ("kind", "change"), [("adamw", "nothing"), ("lion", "nothing"), ("adan", "nothing"), ("adamw_8bit", "rounding")]
)
def test_numbers_that_are_updated_alone_are_the_same_in_pieces(tmp_path: Path, kind: str, change: str) -> None:
    """Unless their gradient's norm is bounded."""
    for clip_norm, wanted in ((None, change), (1.0, "rounding")):
        own = run_file_of(tmp_path, optimizer={"kind": kind, "lr": 1e-3}, run={"processes": 1, "device": "cpu"})
        own = with_values(own, {"optimizer.clip_norm": clip_norm})
        moved = [means for each in choices(own) for means in each if means.kind == "parameters"]
        assert [means.change for means in moved] == [wanted]


def test_what_steps_differ_by_is_asked_for_once_more() -> None:
    """Not what the first, in which state is made, has less or more."""
    assert needed([50.0]) == 50
    assert needed([50.0, 70.0, 70.0]) == 70
    assert needed([90.0, 70.0, 70.0]) == 90
    assert needed([50.0, 70.0, 64.0]) == 76
