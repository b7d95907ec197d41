"""The scripts of docs/migration that stand under "After" train as the plain loop does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.observe.events import read_events
from tests.cli.warm_scripts import run_plain, run_script

PAGES = Path(__file__).parents[2] / "docs" / "migration"
LOOPS = ["ddp", "fsdp2", "horovod", "deepspeed", "accelerate", "lightning"]
SHARDED = ("layout.shard=2", "memory.zero=3")
PLAIN = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(2):
    for x, y in torch.utils.data.DataLoader(data, batch_size=24, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        CLIP
        optimizer.step()
        print(loss.item())
"""


def after(name: str) -> str:
    (code,) = re.findall(r"## After\n```python\n(.*?)```", (PAGES / f"{name}.md").read_text(), flags=re.DOTALL)
    return code


def by_import(name: str) -> str:
    (code,) = re.findall(
        r"## One changed import\n.*?```python\n(.*?)```", (PAGES / f"{name}.md").read_text(), flags=re.DOTALL
    )
    return code


def losses(name: str, folder: Path, world: int, *overrides: str, code: str = "") -> list[float]:
    (folder / "mine.py").write_text(code or after(name))
    codes = run_script(folder / "mine.py", folder, *overrides, world=world)
    assert codes == [0] * world, (folder / "rank-0.txt").read_text()
    run = folder / ("output/shoal" if name == "hf-trainer" else "runs/mine")
    return [loss for e in read_events(run, 0) if (loss := e.get("loss/train")) is not None]


def plain(folder: Path, *, clips: bool) -> list[float]:
    head = after("ddp").split("optimizer =")[0].replace("import shoal\n", "")
    clip = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)" if clips else ""
    (folder / "plain.py").write_text(head + PLAIN.replace("CLIP", clip))
    return [float(line) for line in run_plain(folder / "plain.py", folder).splitlines()]


def test_every_page_is_tried() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {*LOOPS, "hf-trainer", "index"}


def test_pages_of_one_loop_have_one_script() -> None:
    """What is run for one page then stands for the others."""
    clipping = {after(name) for name in ("fsdp2", "deepspeed", "accelerate", "lightning")}
    assert len(clipping) == 1
    assert after("ddp") == after("horovod")


@pytest.mark.parametrize(("name", "overrides"), [("ddp", ()), ("deepspeed", SHARDED)])
def test_the_losses_are_those_of_the_plain_loop(name: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    """On two ranks, as the pages start them."""
    found = losses(name, tmp_path, 2, *overrides)
    assert found == pytest.approx(plain(tmp_path, clips=name != "ddp"), rel=1e-5)


@pytest.mark.slow
def test_a_deepspeed_script_trains_by_one_changed_import(tmp_path: Path) -> None:
    """At the stage of its own JSON file."""
    found = losses("deepspeed", tmp_path, 2, code=by_import("deepspeed"))
    assert found == pytest.approx(plain(tmp_path, clips=True), rel=1e-5)


@pytest.mark.slow
def test_a_transformers_model_trains_alike_on_one_rank_and_two(tmp_path: Path) -> None:
    """Dropout and all: the same losses."""
    folders = [tmp_path / "one", tmp_path / "two"]
    found = []
    for world, folder in enumerate(folders, start=1):
        folder.mkdir()
        found.append(losses("hf-trainer", folder, world))
    assert len(found[0]) == 8
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("name", [*LOOPS, "hf-trainer"])
def test_what_stands_before_is_python(name: str) -> None:
    """Frameworks that are not installed are not run; their scripts at least compile."""
    (code,) = re.findall(r"## Before\n```python\n(.*?)```", (PAGES / f"{name}.md").read_text(), flags=re.DOTALL)
    compile(code, name, "exec")
