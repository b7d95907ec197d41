"""Metrics of torchmetrics and scikit-learn in a script's own loop: over ranks they are those of one process."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from tests.cli.project import Project, project

pytestmark = [
    pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed: pip install {pip}")
    for name, pip in (("torchmetrics", "torchmetrics"), ("sklearn", "scikit-learn"))
]
SCRIPT = """
import json, sys
import shoal, torch, torchmetrics
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score
from torch import nn

x = torch.randn(121, 8, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] + x[:, 1] > 0).long()
sets = [torch.utils.data.TensorDataset(x[part], y[part]) for part in (slice(60), slice(60, None))]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
run = shoal.start(None, sys.argv[1:], model=model, optimizer=optimizer, data=tuple(sets), batch_samples=12, epochs=2)
kinds = {"task": "multiclass", "num_classes": 2}
metrics = torchmetrics.MetricCollection({
    "accuracy": torchmetrics.Accuracy(**kinds),
    "f1": torchmetrics.F1Score(average="macro", **kinds),
    "auroc": torchmetrics.AUROC(**kinds),
    "loss": torchmetrics.MeanMetric(),
    "samples": torchmetrics.SumMetric(),
})
for xs, ys in run.batches():
    run.backward(F.cross_entropy(model(xs), ys))
    optimizer.step()
    optimizer.zero_grad()
mine = []
for xs, ys in run.held_out():
    scores = model(xs)
    for name in ("accuracy", "f1", "auroc"):
        metrics[name].update(scores.softmax(1), ys)
    metrics["loss"].update(F.cross_entropy(scores, ys, reduction="none"))
    metrics["samples"].update(float(len(ys)))
    mine += zip(scores.softmax(1)[:, 1].tolist(), ys.tolist())
over_ranks = {name: float(value) for name, value in metrics.compute().items()}
rows = [None] * dist.get_world_size()
dist.all_gather_object(rows, mine)
scores, labels = zip(*sum(rows, []))
of_sklearn = {"accuracy": accuracy_score(labels, [score > 0.5 for score in scores]),
              "f1": f1_score(labels, [score > 0.5 for score in scores], average="macro"),
              "auroc": roc_auc_score(labels, scores), "samples": float(len(labels))}
with run.full_parameters(), torch.no_grad():
    whole, truth = model(x[60:]), y[60:]
one = {"accuracy": accuracy_score(truth, whole.argmax(1)), "f1": f1_score(truth, whole.argmax(1), average="macro"),
       "auroc": roc_auc_score(truth, whole.softmax(1)[:, 1]), "loss": float(F.cross_entropy(whole, truth)),
       "samples": float(len(truth))}
if dist.get_rank() == 0:
    print(json.dumps({"torchmetrics": over_ranks, "sklearn": of_sklearn, "one": one}))
run.close()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = project(tmp_path_factory.mktemp("metrics"))
    (made.folder / "metrics.py").write_text(SCRIPT)
    return made


@pytest.mark.slow
@pytest.mark.matrix(first=1)
@pytest.mark.parametrize(
    "layout",
    [
        "run.processes=2",
        "run.processes=3",
        "layout.shard=2 memory.zero=1",
        "layout.shard=3 memory.zero=2 batch.micro_samples=2",
        "layout.shard=2 memory.zero=3",
        "run.processes=1",
    ],
)
def test_metrics_over_ranks_are_those_of_one_process(script: Project, layout: str) -> None:
    """On 61 held-out samples, which no two ranks divide evenly."""
    done = script.python("metrics.py", *layout.split(), f"run.name={layout.replace(' ', '-').replace('=', '-')}")
    assert done.returncode == 0, done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert found["torchmetrics"] == pytest.approx(found["one"], rel=1e-6)
    assert found["sklearn"] == pytest.approx({name: found["one"][name] for name in found["sklearn"]}, rel=1e-6)
    assert 0.5 < found["one"]["accuracy"] < 1.0
