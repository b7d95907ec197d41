"""What scripts of `accelerate.Accelerator` write: states that rank 0 alone asks for, folders, trackers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.warm_scripts import run_script
from tests.huggingface.accelerate.scripts import HEAD, SHARDED, assert_alike, ours, plain, script

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow

# The style of train_text_to_image_lora.py: rank 0 alone saves, deletes old folders and goes on with the newest; a hook
# writes a file beside; rank 0 looks at trackers.
ALONE = (
    HEAD
    + """
import shutil
from accelerate.tracking import GeneralTracker
from accelerate.utils import broadcast, gather, gather_object, reduce

class Lines(GeneralTracker):
    name, requires_logging_directory = "lines", False
    tracker = None
    def __init__(self):
        super().__init__()
        self.file = "lines.txt"
    def start(self):
        print("the tracker is started", os.getpid())
    def store_init_configuration(self, values): ...
    def log(self, values, step=None, **kwargs):
        with open(self.file, "a") as lines:
            print(step, file=lines)
    def finish(self):
        with open(self.file, "a") as lines:
            print("finished", file=lines)

accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True, log_with=Lines(), project_dir="out")
os.makedirs("out", exist_ok=True)  # on every rank, which all look into it
if accelerator.is_main_process:
    accelerator.init_trackers("mine")
set_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(DROPOUT), nn.Tanh(), nn.Linear(16, 2))
data = [(torch.randn(4, generator=drawn), torch.randn(2, generator=drawn)) for _ in range(24)]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
train, test = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data[:10], batch_size=4)
model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

def before_save(models, weights, folder):
    if accelerator.is_main_process:
        accelerator.save(models[0].state_dict(), os.path.join(folder, "hook.safetensors"), safe_serialization=True)

if HOOKS:
    accelerator.register_save_state_pre_hook(before_save)
done, per_epoch, losses, others = 0, math.ceil(len(train) / 2), [], []
found = sorted((n for n in os.listdir("out") if n.startswith("checkpoint-")), key=lambda n: int(n.split("-")[1]))
if found:
    accelerator.load_state(os.path.join("out", found[-1]))
    done = int(found[-1].split("-")[1])
for epoch in range(done // per_epoch, 4):
    for x, y in train:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            done += 1
            accelerator.log({"train_loss": loss.item()}, step=done)
            if accelerator.is_main_process and done % 2 == 0:
                old = [n for n in os.listdir("out") if n.startswith("checkpoint-")]
                for name in sorted(old, key=lambda n: int(n.split("-")[1]))[:-1]:
                    shutil.rmtree(os.path.join("out", name))
                accelerator.save_state(os.path.join("out", f"checkpoint-{done}"))
    model.eval()
    seen = []
    for x, y in test:
        with torch.no_grad():
            seen.append(accelerator.gather(F.mse_loss(model(x), y).repeat(4)))
    model.train()
    losses.append(torch.cat(seen)[: len(test.dataset)].mean().item())
    rank = torch.tensor([accelerator.process_index])
    others = [len(gather_object([1])), accelerator.state.num_processes, int(broadcast(rank.clone()))]
    others += [gather(rank).tolist(), int(reduce(rank + 1, reduction="sum"))]
left(accelerator, model, done=done, losses=losses, others=others)
"""
)


@pytest.mark.parametrize(("keys", "hooks"), [((), True), (SHARDED, False)])
def test_rank_0_saves_for_all(keys: tuple[str, ...], hooks: bool, tmp_path: Path) -> None:
    """`if accelerator.is_main_process: accelerator.save_state(...)`, as in the scripts of diffusers: a whole checkpoint
    of all ranks, from which a killed script goes on to the same bits. A folder has what the hook wrote for it.
    """
    expected = plain(tmp_path / "plain", ALONE, DROPOUT=0, HOOKS=False)
    found = ours(tmp_path / "same", ALONE, *keys, world=2, DROPOUT=0, HOOKS=hooks)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["others"] == [2, 2, 0, [0, 1], 3]
    assert_alike(tmp_path / "same", tmp_path / "plain")
    for name in ("checkpoint-10", "checkpoint-12"):
        folder = tmp_path / "same" / "out" / name
        assert json.loads((folder / "shoal.json").read_text())["step"] == int(name.split("-")[1])
        assert (folder / "hook.safetensors").is_file() == hooks
    assert not [each for each in (tmp_path / "same" / "out").iterdir() if each.name.endswith("unfinished")]
    lines = (tmp_path / "same" / "lines.txt").read_text().split()
    assert lines == [*map(str, range(1, 13)), "finished"]

    constants = {"DROPOUT": 0.1, "HOOKS": hooks}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    ours(whole, ALONE, *keys, world=2, **constants)
    assert run_script(script(cut, ALONE, "shoal.huggingface", **constants), cut, *keys, world=2, dies_at=15)[-1] == -9
    resumed = ours(cut, ALONE, *keys, world=2, **constants)
    assert re.search(r"resuming from the checkpoint of step [46]", (cut / "rank-0.txt").read_text())
    assert resumed["done"] == 12
    assert_alike(cut, whole, rounding=0)


def test_a_hook_of_divided_weights_is_for_all_ranks(tmp_path: Path) -> None:
    """Under ZeRO-3 rank 0 alone cannot gather what the hook is to write: a sentence, and no rank that waits."""
    file = script(tmp_path, ALONE, "shoal.huggingface", DROPOUT=0, HOOKS=True)
    codes = run_script(file, tmp_path, *SHARDED, world=2)
    assert all(codes)
    assert "call it on every rank, outside of `if accelerator.is_main_process`" in (tmp_path / "rank-0.txt").read_text()


def test_a_loop_that_passes_over_batches_itself_is_told(tmp_path: Path) -> None:
    """As that of train_unconditional.py: the loader begins where the run stands, so that it would leave out others."""
    skips = "    for n, (x, y) in enumerate(train):\n        if found and epoch == 1 and n < 2:\n            continue\n"
    text = ALONE.replace("    for x, y in train:\n", skips)
    file = script(tmp_path, text, "shoal.huggingface", DROPOUT=0, HOOKS=False)
    assert run_script(file, tmp_path, world=1, dies_at=11) == [-9]
    assert run_script(file, tmp_path, world=1) != [0]
    printed = (tmp_path / "rank-0.txt").read_text()
    assert "Behind load_state the loader begins where the run stands: leave out what passes over" in printed


def test_another_rank_that_saves_alone_is_told(tmp_path: Path) -> None:
    """And rank 0 with it, which would go on without a folder: all ranks end with the sentence."""
    text = ALONE.replace("accelerator.is_main_process and done", "accelerator.is_last_process and done")
    file = script(tmp_path, text, "shoal.huggingface", DROPOUT=0, HOOKS=False)
    assert all(run_script(file, tmp_path, world=2))
    for rank in range(2):
        assert "call it there, or on all ranks" in (tmp_path / f"rank-{rank}.txt").read_text()


@pytest.mark.parametrize(
    ("there", "instead", "words"),
    [
        ("gradient_accumulation_steps=2, ", "", r"say Accelerator\(gradient_accumulation_steps=n\)"),
        ("optimizer, train, test", "optimizer, test, train", "was given first"),
    ],
)
def test_what_a_loop_gets_wrong_is_said(there: str, instead: str, words: str, tmp_path: Path) -> None:
    """Batches accumulated by hand that the run knows nothing of; the data of the evaluation prepared first."""
    step = "            optimizer.step()\n"
    text = ALONE.replace(there, instead).replace(step, "            if done % 2 == 1:\n    " + step)
    file = script(tmp_path, text, "shoal.huggingface", DROPOUT=0, HOOKS=False)
    assert run_script(file, tmp_path, world=1) != [0]
    assert re.search(words, (tmp_path / "rank-0.txt").read_text())


def test_folders_are_whole_or_not_there(tmp_path: Path) -> None:
    """Until its checkpoint is, what hooks wrote is beside it; a folder that the script has made gets it then."""
    from shoal.huggingface.accelerate.folders import MARK, Saved, mark, unfinished

    class Run:
        directory = tmp_path / "run"

    project = accelerate.utils.ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    saved = Saved(project)
    written = saved.begin(None, 2)
    folder = tmp_path / "checkpoints" / "checkpoint_0"
    assert (written, saved.asks) == (unfinished(folder), True)
    (written / "model").mkdir(parents=True)
    (written / "model" / "a").write_text("1")
    assert not folder.exists()
    mark(folder, Run(), 2)  # type: ignore[arg-type]
    assert {each.name for each in folder.iterdir()} == {"model", MARK}
    (written / "model").mkdir(parents=True)
    (written / "model" / "a").write_text("2")
    (folder / "own").write_text("of the script")
    mark(folder, Run(), 4)  # type: ignore[arg-type]
    assert {each.name for each in folder.iterdir()} == {"model", MARK, "own"}
    assert ((folder / "model" / "a").read_text(), json.loads((folder / MARK).read_text())["step"]) == ("2", 4)
    assert not written.exists()


def test_a_resumed_run_numbers_its_folders_on(tmp_path: Path) -> None:
    """Behind those that are there, unless the script has set a number."""
    from shoal.huggingface.accelerate.folders import Saved

    project = accelerate.utils.ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    for number in (3, 10):
        (tmp_path / "checkpoints" / f"checkpoint_{number}").mkdir(parents=True)
    saved = Saved(project)
    saved.go_on()
    assert saved.number == 11
    project.iteration = 5
    saved.go_on()
    assert saved.number == 5


def test_trackers_start_where_ranks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may only be about to start the ranks has none, unless it is asked for one; the end of a training
    finishes them once, and takes down no process group of the run's.
    """
    from accelerate.tracking import GeneralTracker

    from shoal.huggingface import Accelerator

    done: list[str] = []

    class Told(GeneralTracker):
        name, requires_logging_directory, tracker = "told", False, None

        def start(self) -> None:
            done.append("start")

        def store_init_configuration(self, values: dict) -> None: ...

        def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None: ...

        def finish(self) -> None:
            done.append("finish")

    def refuse(*given: Any) -> None:
        raise AssertionError("a process group was taken down")

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", refuse)
    for name in [name for name in os.environ if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]:
        monkeypatch.delenv(name)
    ours = Accelerator(cpu=True, log_with=Told())
    ours.init_trackers("mine", {"lr": 1.0})
    assert done == []
    assert ours.get_tracker("told").name == "told"
    assert done == ["start"]
    ours.end_training()
    ours.end_training()
    assert done == ["start", "finish"]
