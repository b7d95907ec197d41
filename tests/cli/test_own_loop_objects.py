"""Samples with texts and objects beside tensors, in a script's own loop: each beside its own tensors, on every rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.warm_scripts import run_script

SCRIPT = """
import json
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
import shoal

@dataclass
class Note:
    text: str
    boxes: list

class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 26

    def __getitem__(self, i):
        note = Note("note " * (i % 3) + str(i), [torch.full((4,), float(i))] * (i % 4))
        return {"path": f"images/{i}.png", "x": torch.full((6,), i / 26), "y": i % 2, "note": note, "more": None}

def detection(items):
    return {"path": [item["path"] for item in items], "x": torch.stack([item["x"] for item in items]),
            "y": torch.tensor([item["y"] for item in items]), "notes": [item["note"] for item in items],
            "longest": max(len(item["note"].boxes) for item in items)}

class Plain(Pictures):
    def __getitem__(self, i):
        return {name: value for name, value in super().__getitem__(i).items() if name != "note"}

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(DATA, batch_size=12, shuffle=True, collate_fn=COLLATE)
run = shoal.start(model=model, optimizer=optimizer, data=loader, epochs=1)
seen = []
for batch in run.batches():
    run.backward(F.cross_entropy(model(batch["x"]), batch["y"]))
    optimizer.step()
    optimizer.zero_grad()
    if not run.samples:
        continue
    for k, path in enumerate(batch["path"]):
        i = round(float(batch["x"][k, 0]) * 26)
        assert path == f"images/{i}.png"
        seen.append(i)
        if "notes" in batch:
            assert batch["notes"][k] == Note("note " * (i % 3) + str(i), batch["notes"][k].boxes)
            assert [box.tolist() for box in batch["notes"][k].boxes] == [[float(i)] * 4] * (i % 4)
            assert batch["longest"] >= i % 4
        else:
            assert batch["more"][k] is None
json.dump(seen, open(f"seen-{run.rank}.json", "w"))
run.close()
"""


@pytest.mark.matrix(rows=(1, 3))
@pytest.mark.parametrize("collate", ["None", "detection"])
@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (1, ("batch.micro_samples=5",)),
        (2, ()),
        (3, ("batch.micro_samples=2",)),
        (2, ("layout.shard=2", "memory.zero=3", "data.reader_kind=processes")),
        (3, ("layout.shard=3", "memory.zero=2")),
        (3, ("layout.shard=3", "memory.zero=1", "batch.micro_samples=2")),
    ],
)
def test_texts_and_objects_stay_beside_their_tensors(
    tmp_path: Path, world: int, overrides: tuple[str, ...], collate: str
) -> None:
    """Each sample once, in steps of 12, 12 and 2, of which a third rank gets none."""
    data = "Plain()" if collate == "None" else "Pictures()"
    (tmp_path / "mine.py").write_text(SCRIPT.replace("COLLATE", collate).replace("DATA", data))
    codes = run_script(tmp_path / "mine.py", tmp_path, *overrides, world=world)
    assert codes == [0] * world, "\n".join((tmp_path / f"rank-{rank}.txt").read_text() for rank in range(world))
    seen = [i for rank in range(world) for i in json.loads((tmp_path / f"seen-{rank}.json").read_text())]
    assert sorted(seen) == list(range(26))
