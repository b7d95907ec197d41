"""What a start trains where its run directory holds a run: nothing is trained over, nothing is silently not trained."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import msgspec
import pytest

from shoal.assembly.finished_run import chosen_run, deciding_keys, intent_of, numbered
from shoal.config.load import dumps
from shoal.errors import UsageError
from shoal.observe import provenance
from shoal.observe.events import read_events
from shoal.observe.facts import read_facts, write_facts
from shoal.runfile.load import run_file_of
from shoal.runfile.run_file import RunFile, run_directory
from tests.programs import run

TABLES = {
    "run": {"name": "mine", "steps": 10},
    "model": {"kind": "mlp", "inputs": 4, "outputs": 2, "hidden": [8]},
    "data": {"kind": "digits"},
    "batch": {"global_samples": 8},
}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_of(**keys: object) -> RunFile:
    """`lr=0.1, steps=20, remote=...`: keys of the tables that have them."""
    tables = {name: dict(table) for name, table in TABLES.items()}
    places = {"lr": "optimizer", "steps": "run", "processes": "run", "directory": "run", "zero": "memory"}
    for key, value in keys.items():
        tables.setdefault(places.get(key, "checkpoint"), {})[key] = value
    if "zero" in keys:
        tables["layout"] = {"shard": 2}
    return run_file_of(tables, file="a test")


def leaves(run_file: RunFile, *, state: str, arguments: list[str] | None = None, files: dict | None = None) -> Path:
    """What a run leaves behind: its run file, how it ended, what it was made of."""
    directory = run_directory(run_file)
    made_of = {"directory": str(Path.cwd()), "files": files or {}}
    if arguments is not None:
        made_of["arguments"] = provenance.argument_hash(arguments)
    write_facts(directory, {"state": state, "provenance": made_of})
    (directory / "run.toml").write_text(dumps(run_file))
    return directory


def chosen(run_file: RunFile, *flags: str, environ: dict[str, str] | None = None) -> str:
    found = chosen_run(run_file, intent_of(flags)[0], environ={} if environ is None else environ)
    return str(run_directory(found))


def test_a_finished_run_whose_keys_changed_is_followed_by_a_new_one(capfd: pytest.CaptureFixture[str]) -> None:
    """In a folder of its own, which one line says, with the key; the old run stays as it was."""
    old = leaves(run_of(lr=0.01), state="finished")
    before = {path: path.read_bytes() for path in old.iterdir()}
    found = chosen_run(run_of(lr=0.02), environ={})
    assert (found.run.name, str(run_directory(found))) == ("mine-2", "runs/mine-2")
    assert msgspec.structs.replace(found, run=run_of().run) == run_of(lr=0.02), "nothing else has changed"
    assert {path: path.read_bytes() for path in old.iterdir()} == before
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert re.search(r"runs/mine is finished.*optimizer.lr has changed \(0.01, now 0.02\).*runs/mine-2", said)


def test_without_a_change_or_with_more_steps_a_finished_run_is_resumed() -> None:
    """As ever; what changes no result makes no new run: a job that is queued again on other ranks trains nothing."""
    leaves(run_of(lr=0.01), state="finished")
    assert chosen(run_of(lr=0.01)) == "runs/mine"
    assert chosen(run_of(lr=0.01, steps=20)) == "runs/mine"
    assert chosen(run_of(lr=0.01, processes=3, keep=9)) == "runs/mine"
    assert chosen(run_of(lr=0.01, zero=1)) == "runs/mine"
    assert chosen(run_of(lr=0.01, steps=5)) == "runs/mine-2"


@pytest.mark.parametrize("state", ["", "stopped", "failed", "diverged"])
def test_a_run_that_was_cut_off_is_resumed_with_changed_keys(state: str) -> None:
    leaves(run_of(lr=0.01), state=state)
    assert chosen(run_of(lr=0.02)) == "runs/mine"


def test_a_run_that_was_killed_behind_its_last_checkpoint_is_finished() -> None:
    directory = leaves(run_of(lr=0.01), state="")
    (directory / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert chosen(run_of(lr=0.02)) == "runs/mine-2"


def test_keys_of_an_earlier_run_find_that_run() -> None:
    """Of several; and a new one that was cut off is resumed as the first would be."""
    leaves(run_of(lr=0.01), state="finished")
    for lr, expected in ((0.02, "runs/mine-2"), (0.03, "runs/mine-3")):
        new = chosen_run(run_of(lr=lr), environ={})
        assert str(run_directory(new)) == expected
        leaves(new, state="finished")
    assert [chosen(run_of(lr=lr)) for lr in (0.01, 0.02, 0.03)] == ["runs/mine", "runs/mine-2", "runs/mine-3"]
    fourth = chosen_run(run_of(lr=0.04), environ={})
    leaves(fourth, state="stopped")
    assert chosen(run_of(lr=0.05)) == "runs/mine-4"


def test_a_new_run_that_has_not_begun_is_found_again() -> None:
    leaves(run_of(lr=0.01), state="finished")
    assert [chosen(run_of(lr=0.02)) for _ in range(2)] == ["runs/mine-2"] * 2


def test_a_strangers_folder_is_passed_over() -> None:
    """A run that somebody has called mine-2 himself is neither resumed nor overwritten."""
    leaves(run_of(lr=0.01), state="finished")
    stranger = leaves(numbered(run_of(lr=0.5), 2), state="stopped")
    assert chosen(run_of(lr=0.02)) == "runs/mine-3"
    assert "follows" not in read_facts(stranger)


def test_flags_decide_where_they_are_given() -> None:
    leaves(run_of(lr=0.01), state="finished")
    assert chosen(run_of(lr=0.02), "--resume") == "runs/mine"
    assert chosen(run_of(lr=0.01), "--fresh") == "runs/mine-2"
    assert chosen(run_of(lr=0.01), "--resume") == "runs/mine-2"
    leaves(run_of(lr=0.01), state="stopped")
    assert chosen(run_of(lr=0.01), "--fresh") == "runs/mine-3"
    with pytest.raises(UsageError, match="one of them"):
        intent_of(["--fresh", "run.steps=3", "--resume"])
    assert intent_of(["--fresh", "run.steps=3"]) == ("fresh", ["run.steps=3"])


def test_a_directory_of_its_own_is_numbered_too() -> None:
    leaves(run_of(lr=0.01, directory="elsewhere/a/"), state="finished")
    assert chosen(run_of(lr=0.02, directory="elsewhere/a/")) == "elsewhere/a-2"


def test_the_scripts_code_and_arguments_count_as_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of one's own keeps its learning rate in the script. Overrides among its arguments count as keys alone."""
    script = Path("mine.py")
    script.write_text("lr = 0.01")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    hashes = provenance.file_hashes(["mine.py"], Path.cwd())
    leaves(run_of(), state="finished", arguments=["--width", "8", "run.steps=10"], files=hashes)
    monkeypatch.setattr(sys, "argv", ["mine.py", "--width", "8", "run.steps=10", "--resume"])
    assert chosen(run_of()) == "runs/mine"
    monkeypatch.setattr(sys, "argv", ["mine.py", "--width", "9"])
    assert chosen(run_of()) == "runs/mine-2"
    monkeypatch.setattr(sys, "argv", ["mine.py", "--width", "8"])
    script.write_text("lr = 0.02")
    assert chosen(run_of()) == "runs/mine-2"


def test_ranks_train_what_the_process_that_started_them_has_chosen() -> None:
    """Also where the run that it names is finished by then."""
    environ: dict[str, str] = {}
    leaves(run_of(lr=0.01), state="finished")
    assert chosen(run_of(lr=0.02), environ=environ) == "runs/mine-2"
    leaves(numbered(run_of(lr=0.02), 2), state="finished")
    ranks = {**environ, **TORCHRUN, "SHOAL_LAUNCHER": "1"}
    assert chosen(run_of(lr=0.02), environ=ranks) == "runs/mine-2"


def test_under_another_launcher_a_finished_run_with_other_keys_is_refused() -> None:
    """Its ranks cannot agree on a folder before they meet. Everything else is as ever."""
    assert chosen(run_of(lr=0.02), environ=dict(TORCHRUN)) == "runs/mine"
    leaves(run_of(lr=0.01), state="finished")
    assert chosen(run_of(lr=0.01, steps=20), environ=dict(TORCHRUN)) == "runs/mine"
    assert chosen(run_of(lr=0.02), "--resume", environ=dict(TORCHRUN)) == "runs/mine"
    with pytest.raises(UsageError, match=r"optimizer.lr has changed.*run.name=mine-2.*--resume"):
        chosen(run_of(lr=0.02), environ=dict(TORCHRUN))
    with pytest.raises(UsageError, match="--fresh"):
        chosen(run_of(lr=0.01), "--fresh", environ=dict(TORCHRUN))


def test_a_new_run_does_not_resume_from_the_old_ones_remote_checkpoints() -> None:
    leaves(run_of(lr=0.01, remote="s3://bucket/run"), state="finished")
    with pytest.raises(UsageError, match=r"s3://bucket/run.*checkpoint.remote"):
        chosen(run_of(lr=0.02, remote="s3://bucket/run"))
    assert not Path("runs/mine-2").exists()


def test_a_run_file_that_cannot_be_read_changes_nothing() -> None:
    directory = leaves(run_of(lr=0.01), state="finished")
    (directory / "run.toml").write_text("no TOML at all")
    assert chosen(run_of(lr=0.02)) == "runs/mine"


def test_every_key_of_how_much_is_learnt_decides() -> None:
    decide = deciding_keys(run_of(lr=0.1))
    assert {"optimizer.lr", "model.hidden", "batch.global_samples", "run.seed", "schedule.warmup_steps"} <= {*decide}
    assert not any(key.startswith(("observe.", "layout.", "wire.", "run.processes")) for key in decide)


SCRIPT = """
import sys
import torch
import shoal
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
net = torch.nn.Linear(4, 2)
lr = 0.1
config = {"run": {"name": "mine", "steps": 3}, "batch": {"global_samples": 8}, "observe": {"report": False}}
"""
TRAIN = SCRIPT + "print(shoal.train({**config, 'optimizer': {'lr': lr}}, sys.argv[1:], model=lambda: net, data=data))"
START = (
    SCRIPT
    + """
optimizer = torch.optim.SGD(net.parameters(), lr=lr)
with shoal.start(config, sys.argv[1:], model=net, optimizer=optimizer, data=data) as run:
    for a, b in run.batches():
        run.backward(torch.nn.functional.cross_entropy(net(a), b))
        run.step()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "processes"), [(TRAIN, 2), (START, 2), (START, 1)])
def test_a_script_with_another_rate_trains_another_model(text: str, processes: int, tmp_path: Path) -> None:
    """From the first step, on the samples of the first run in their order: other losses, same lengths."""
    script = tmp_path / "mine.py"
    for lr in ("0.1", "0.2"):
        script.write_text(text.replace("lr = 0.1", f"lr = {lr}"))
        done = run([str(script), f"run.processes={processes}"], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    folders = [tmp_path / "runs" / name for name in ("mine", "mine-2")]
    losses = [[e.get("loss/train") for e in read_events(folder, 0) if e.get("loss/train")] for folder in folders]
    assert [len(each) for each in losses] == [3, 3]
    assert losses[0][0] == losses[1][0]
    assert losses[0][2] != losses[1][2]
    assert json.loads((folders[1] / "facts.json").read_text())["follows"] == "mine"


def test_a_folder_of_runs_is_no_run_directory() -> None:
    """`run.directory=runs` would mix a run's files with the folders of others; what has become a run goes on."""
    leaves(run_of(directory="runs/other"), state="finished")
    with pytest.raises(UsageError, match=r"runs is a folder of runs \(other\).* set run.directory=runs/mine"):
        chosen(run_of(directory="runs"))
    with pytest.raises(UsageError, match="is a folder of runs"):
        chosen(run_of(directory="runs"), environ=dict(TORCHRUN))
    assert chosen(run_of()) == "runs/mine"
    leaves(run_of(directory="runs"), state="failed")
    assert chosen(run_of(directory="runs")) == "runs"
