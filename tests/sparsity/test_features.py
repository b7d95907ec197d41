"""Hidden features that are masked together, and taken out of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.assembly.shrinking import sentence, shrink
from shoal.checkpoint.inspect import weights_of
from shoal.config.load import dumps, read
from shoal.errors import ConfigError, UsageError
from shoal.models.config import GPTConfig
from shoal.models.gpt import GPT
from shoal.sparsity.masks import FeatureGroup, feature_groups, feature_mask, feature_scores, shrunk
from tests.assembly.training_ranks import trained as taken
from tests.sparsity.test_training import BASE, KINDS, SMALL
from tests.verification.layouts import corpus, run_file_of

SHAPES = {"0.ff.gate.weight": (6, 4), "0.ff.up.weight": (6, 4), "0.ff.down.weight": (4, 6)}
ROLES = {"0.ff.gate.weight": "column", "0.ff.up.weight": "column", "0.ff.down.weight": "row"}


def test_a_feature_is_a_row_where_it_is_made_and_a_column_where_it_is_read() -> None:
    (group,) = feature_groups(SHAPES, ROLES)
    assert group == FeatureGroup({"0.ff.gate.weight": 0, "0.ff.up.weight": 0, "0.ff.down.weight": 1}, 6)
    scores = {name: torch.rand(shape) for name, shape in SHAPES.items()}
    gate, up, down = scores.values()
    wanted = [torch.cat([gate[i], up[i], down[:, i]]).mean() for i in range(6)]
    assert torch.allclose(feature_scores(group, scores), torch.stack(wanted))
    kept = torch.tensor([True, False, True, True, False, True])
    assert torch.equal(feature_mask(kept, 1, (4, 6)).all(0), kept)
    assert torch.equal(feature_mask(kept, 0, (6, 4)).all(1), kept)


@pytest.mark.parametrize(
    ("shapes", "roles"),
    [
        ({"a.up.weight": (6, 4)}, {"a.up.weight": "column"}),
        ({"a.up.weight": (6, 4), "a.down.weight": (4, 5)}, {"a.up.weight": "column", "a.down.weight": "row"}),
        ({"a.up.weight": (6, 4)}, {"a.up.weight": "replicated"}),
    ],
)
def test_layers_that_share_no_features_are_refused(shapes: dict[str, tuple[int, ...]], roles: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="make and read the same features"):
        feature_groups(shapes, roles)


def test_blocks_that_would_differ_are_not_shrunk() -> None:
    shapes = SHAPES | {name.replace("0.", "1.", 1): shape for name, shape in SHAPES.items()}
    groups = feature_groups(shapes, ROLES | {name.replace("0.", "1.", 1): role for name, role in ROLES.items()})
    masks = {
        name: feature_mask(torch.arange(6) < 2 + int(name[0]), 1 if "down" in name else 0, shape)
        for name, shape in shapes.items()
    }
    with pytest.raises(UsageError, match="from 2 to 3 features"):
        shrunk({name: torch.rand(shape) for name, shape in shapes.items()}, masks, groups)


def test_a_smaller_model_computes_what_the_masked_one_does(ranks, tmp_path: Path) -> None:
    """Half of the features go; what is written begins a run of the smaller model."""
    corpus(tmp_path)
    tables = BASE | {"sparsity": KINDS["features"] | {"schedule": {"begin": 2, "end": 4, "every": 1}}}
    ranks(1, taken, tables, str(tmp_path))
    write_run_file(tmp_path, tables)
    left = shrink(tmp_path / "run", tmp_path / "smaller")
    assert left == SMALL["feed_forward_width"] // 2
    assert f"model.feed_forward_width={left}" in sentence(left, tmp_path / "smaller")
    assert read(tmp_path / "smaller" / "model.toml")["model"]["feed_forward_width"] == left
    large, small = weights_of(tmp_path / "run"), weights_of(tmp_path / "smaller")
    assert sum(t.numel() for t in small.values()) < sum(t.numel() for t in large.values())
    tokens = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    outputs = []
    for weights, width in ((large, SMALL["feed_forward_width"]), (small, left)):
        model = GPT(GPTConfig(vocabulary=61, layers=2, width=16, heads=2, feed_forward_width=width)).double()
        model.load_state_dict(weights)
        outputs.append(model(tokens))
    assert torch.allclose(*outputs, rtol=1e-12)
    with pytest.raises(UsageError, match="give a new folder"):
        shrink(tmp_path / "run", tmp_path / "smaller")


def write_run_file(folder: Path, tables: dict[str, Any]) -> None:
    (folder / "run" / "run.toml").write_text(dumps(run_file_of(folder, **tables)))
