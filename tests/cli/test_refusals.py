"""Bad input gets a sentence, a code and a repair, and nothing is lost by it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from shoal.assembly import start
from tests.cli.project import Project, project
from tests.waiting import HANG_S

USAGE, ENVIRONMENT = 2, 3


@pytest.fixture
def own(tmp_path: Path) -> Project:
    return project(tmp_path)


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["batch.global_sample=4"], ["batch.global_sample", "did you mean 'global_samples'"]),
        (["run.steps=many"], ["run.steps", "'many'"]),
        (["run.steps=0"], ["run.steps", "found 0"]),
        (["run.steps=-3"], ["run.steps"]),
        (["run.steps=10000000000"], ["run.steps"]),
        (["batch.global_samples=1", "run.processes=4"], ["global_samples = 1", "4 replicas"]),
        (["layout.replicate=3", "run.processes=4"], ["3", "4"]),
        (["layout.tensors=2"], ["layout.tensors", "unknown key", "layout.tensor"]),
        (["run.processes=0"], ["run.processes"]),
        (["precision.kind=float4"], ["precision.kind", "float4", "'bfloat16'"]),
        (["optimizer.kind=adam"], ["optimizer.kind", "did you mean 'adamw'"]),
        (["run.name=../../etc"], ["run.name"]),
    ],
)
def test_a_wrong_key_is_refused_before_anything_starts(own: Project, overrides: list[str], words: list[str]) -> None:
    """Exit 2, the key, what was found; no run directory appears."""
    refused(own.here("train", "run.toml", *overrides), USAGE, *words)
    assert not (own.folder / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sync.kind=hogwild", "optimizer.kind=sgd"], ["an order that time decides"]),
        (["sync.kind=server", "sync.admission=async"], ["sync.admission", "shoal train --replay RUN_DIR"]),
        (["sync.kind=server", "sync.admission=bounded", "sync.bound=1"], ["sync.admission", "time decides"]),
        (["sync.kind=server", "sync.admission=backup", "sync.backup=1"], ["sync.admission", "time decides"]),
        (["sync.kind=gossip", "sync.algorithm=sgp", "sync.asynchronous=true", "sync.delay=2"], ["sync.asynchronous"]),
        (["codec.kind=sign", "codec.feedback=false"], ["without error feedback"]),
        (["codec.kind=dgc", "optimizer.kind=sgd"], ["sends velocities"]),
        (["optimizer.kind=one_bit_adam"], ["sends coded momenta"]),
    ],
)
def test_what_cannot_be_verified_is_refused_before_anything_starts(
    own: Project, monkeypatch: pytest.MonkeyPatch, overrides: list[str], words: list[str]
) -> None:
    """Exit 2, and no rank is started."""

    def starts(*_: object, **__: object) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(start, "run_ranks", starts)
    refused(own.here("verify", "run.toml", "batch.global_samples=6", "run.processes=2", *overrides), USAGE, *words)


def test_a_refusal_is_the_same_in_a_process_of_its_own(own: Project) -> None:
    """What the command prints, and its code."""
    wrong = ("train", "run.toml", "batch.global_sample=4")
    here, apart = own.here(*wrong), own.shoal(*wrong)
    assert (here.returncode, here.stdout, here.stderr) == (apart.returncode, apart.stdout, apart.stderr)


def test_a_missing_run_file_is_named(own: Project) -> None:
    """Exit 2, with the run files that are there."""
    refused(own.here("train", "rum.toml"), USAGE, "rum.toml", "run.toml")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.build=own:nothing"], ["own:nothing", "no function 'nothing'", "model"]),
        (["model.build=nowhere:model"], ["nowhere", "no module"]),
        (["model.build=own:not_a_model"], ["the model is a str, 'hello'; it must be an nn.Module"]),
        (["model.build=builtins:int"], ["the model is an int; it must be an nn.Module"]),
        (["model.arguments={widht=3}"], ["model.build", "widht"]),
        (["data.build=own:not_a_model"], ["str"]),
        (["model.build=own:frozen"], ["the model has no parameter that requires a gradient"]),
        (["model.build=own:returns_class"], ["the model is the class Logging; it must be an nn.Module"]),
    ],
)
def test_a_user_function_that_is_wrong_is_named(own: Project, overrides: list[str], words: list[str]) -> None:
    """A function that is not there, fails, or returns the wrong thing: a refusal of code 2 that says so."""
    refusal = own.refusal_of_a_rank("run.processes=1", *overrides)
    assert refusal.exit_code == USAGE
    for word in words:
        assert word in str(refusal)


def test_a_module_beside_the_run_file_is_found_for_who_starts_elsewhere(own: Project) -> None:
    """Before any rank starts, the sentence says where to start."""
    elsewhere = own.folder / "elsewhere"
    elsewhere.mkdir()
    (own.folder / "lies_there.py").touch()
    run_file = own.folder / "run.toml"
    run_file.write_text(run_file.read_text().replace("own:model", "lies_there:model"))
    refused(Project(elsewhere).here("train", "../run.toml"), USAGE, f"it is in {own.folder}, so start the run there")
    assert not (elsewhere / "runs").exists()


def test_a_user_function_that_is_wrong_ends_the_command(own: Project) -> None:
    """Exit 2, and no traceback of Shoal's own."""
    done = own.shoal("train", "run.toml", "loss.kind=python", "loss.build=own:scalar_loss")
    refused(done, USAGE, "reduction='none'")
    assert "/shoal/" not in done.stderr, done.stderr


TOKENS = [
    "data.kind=tokens",
    "data.path=tokens.bin",
    "model.kind=gpt",
    "model.layers=1",
    "model.width=16",
    "batch.sequence=8",
]


@pytest.mark.parametrize(
    ("content", "overrides", "words"),
    [
        (None, [], ["tokens.bin"]),
        (b"", [], ["tokens.bin", "empty"]),
        (b"\1" * 33, ["data.dtype=uint16"], ["tokens.bin", "33"]),
        (bytes(range(200)), ["model.vocabulary=100"], ["100"]),
        (b"\1" * 5, [], ["5 tokens", "batch.sequence = 8"]),
    ],
)
def test_a_token_file_that_cannot_be_is_named(
    own: Project, content: bytes | None, overrides: list, words: list
) -> None:
    """Missing, empty, of odd length, ids outside the vocabulary, too short for one sample: code 2, and the file."""
    text = (own.folder / "run.toml").read_text().replace('kind = "python"', "").replace('build = "own:model"', "")
    (own.folder / "run.toml").write_text(text.replace('build = "own:data"', ""))
    if content is not None:
        (own.folder / "tokens.bin").write_bytes(content)
    refusal = own.refusal_of_a_rank("run.processes=1", *TOKENS, *overrides)
    assert refusal.exit_code == USAGE
    for word in words:
        assert word in str(refusal)


@pytest.mark.slow
def test_a_directory_of_another_model_is_refused_and_kept(own: Project) -> None:
    """Names and shapes that differ: exit 2 says which, and the checkpoints and the run file of the other stay."""
    assert own.shoal("train", "run.toml", "run.steps=2").returncode == 0
    written = (own.folder / "runs/own/checkpoints").rglob("*")
    before = {path: path.read_bytes() for path in written if path.is_file()}
    kept = (own.folder / "runs/own/run.toml").read_text()
    changed = ("--resume", "run.steps=4", "model.arguments={width=9}")
    refused(own.shoal("train", "run.toml", *changed), USAGE, "layers.0.weight")
    warm = ["run.name=other", "run.warm_start=runs/own", "model.arguments={width=9}"]
    refused(own.shoal("train", "run.toml", *warm), USAGE, "runs/own holds another model", "Let run.warm_start name")
    assert (own.folder / "runs/own/run.toml").read_text() == kept
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.slow
def test_a_directory_in_use_is_refused(own: Project) -> None:
    """A second run in the same directory: exit 3 names the holder, and the first goes on."""
    running = own.start("train", "run.toml", "model.arguments={hold_at=3}")
    own.wait_for_step(1)
    refused(own.shoal("train", "run.toml"), ENVIRONMENT, "in use", str(running.pid))
    (own.folder / "go").touch()
    assert running.wait(HANG_S) == 0


def test_an_empty_data_file_of_arrays_is_named(own: Project) -> None:
    """An array file without samples: code 2 and its name."""
    np.save(own.folder / "x.npy", np.zeros((0, 2), dtype=np.float32))
    np.save(own.folder / "y.npy", np.zeros(0, dtype=np.int64))
    text = (
        (own.folder / "run.toml")
        .read_text()
        .replace('kind = "python"\nbuild = "own:data"', 'kind = "arrays"\ninputs = "x.npy"\ntargets = "y.npy"')
    )
    (own.folder / "run.toml").write_text(text)
    refusal = own.refusal_of_a_rank("run.processes=1")
    assert refusal.exit_code == USAGE
    assert "x.npy" in str(refusal)


@pytest.mark.slow
def test_a_run_cannot_change_what_it_was(own: Project) -> None:
    """Another seed, order or optimizer in the same directory would lose samples or moments in silence: exit 2."""
    assert own.shoal("train", "run.toml", "run.steps=1", "run.processes=1").returncode == 0
    for changed, words in (
        ("run.seed=5", ["run.seed = 0", "now it is 5", "warm_start"]),
        ("optimizer.kind=sgd", ["optimizer.kind = 'adamw'", "'sgd'"]),
        ("data.shuffle=false", ["data.shuffle = True"]),
        ("data.arguments={broken=29}", ["training sample 29 is not what it was", "run.directory", "warm_start"]),
    ):
        refused(own.shoal("train", "run.toml", "--resume", "run.processes=1", changed), USAGE, *words)


@pytest.mark.slow
def test_ranks_that_drew_other_data_are_named(own: Project) -> None:
    """A data set that is drawn unseeded is another one on every rank: exit 2 names the rank and the sample."""
    (own.folder / "own.py").write_text(
        (own.folder / "own.py").read_text()
        + "\n\ndef unseeded():\n    torch.seed()\n    return list(zip(torch.randn(9, 2), torch.ones(9).long()))\n"
    )
    refused(own.shoal("train", "run.toml", "data.build=own:unseeded"), USAGE, "rank 1 has another data", "seeded")


@pytest.mark.slow
def test_ranks_with_another_module_are_named(own: Project) -> None:
    """A layer that every rank imports from a folder of its own, outside of where it was started: exit 2 names it."""
    for rank in (0, 1):
        (own.folder / f"side-{rank}").mkdir()
        (own.folder / f"side-{rank}/side.py").write_text(f"HIDDEN = {rank}")
    imports = f"import sys\nsys.path.insert(0, {str(own.folder)!r} + '/side-' + RANK)\nimport side\n"
    (own.folder / "own.py").write_text((own.folder / "own.py").read_text() + imports)
    refused(own.shoal("train", "run.toml"), USAGE, "rank 1 runs another module side (", "copy the same files")


def test_checkpoints_that_are_not_there_are_not_whole(own: Project) -> None:
    """A mistyped path must not pass a verification."""
    for verb in ("verify", "ls"):
        refused(own.here("checkpoint", verb, "runs/nowhere"), USAGE, "runs/nowhere")
