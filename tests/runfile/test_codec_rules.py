"""A codec that cannot serve a run is refused in a sentence, before any process starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shoal.codec.config import TopKConfig
from shoal.errors import ConfigError
from shoal.runfile.codec_rules import codec_refusal
from shoal.runfile.load import load_run
from tests.verification.layouts import run_file_of

TOP_K = {"codec": {"kind": "top_k"}}
DIGITS = Path(__file__).parents[2] / "recipes" / "digits.toml"

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layout": {"tensor": 2}}, "layout.tensor = 2"),
    ({"layout": {"shard": 4}}, "one replica"),
    ({"layout": {"shard": 2, "pipeline": 2}}, "one replica"),
    ({"layout": {"pipeline": 2}, "pipeline": {"schedule": "PipeDream"}}, "PipeDream"),
    ({"sync": {"kind": "gossip"}}, 'sync.kind = "gossip"'),
    ({"gradients": {"bucket": "auto"}}, 'gradients.bucket = "auto"'),
    ({"precision": {"kind": "float16"}}, 'precision.kind = "float16"'),
    ({"observe": {"noise_every_steps": 5}}, "observe.noise_every_steps = 5"),
]


@pytest.mark.parametrize(("tables", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_what_it_cannot_serve(tmp_path: Path, tables: dict[str, Any], named: str) -> None:
    """The sentence names both keys; without a codec there is none."""
    sentence = codec_refusal(run_file_of(tmp_path, **tables, **TOP_K))
    assert sentence is not None
    assert 'codec.kind = "top_k"' in sentence
    assert named in sentence
    assert codec_refusal(run_file_of(tmp_path, **tables)) is None


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({"layout": {"replicate": 2}, "sync": {"kind": "local"}}, 'sync.kind = "local"'),
        ({"layout": {"replicate": 2}, "sync": {"kind": "streaming"}}, 'sync.kind = "streaming"'),
        ({"gradients": {"schedule": "priority"}}, 'gradients.schedule = "priority"'),
        ({"run": {"device": "cuda"}}, 'run.device = "cuda"'),
        ({"run": {"device": "xpu"}}, 'run.device = "xpu"'),
    ],
)
def test_what_auto_cannot_serve(tmp_path: Path, tables: dict[str, Any], named: str) -> None:
    """Where ranks cannot measure together; a named codec can."""
    sentence = codec_refusal(run_file_of(tmp_path, **tables, codec={"kind": "auto"}))
    assert sentence is not None
    assert named in sentence
    assert codec_refusal(run_file_of(tmp_path, **tables, **TOP_K)) is None


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({"optimizer": {"kind": "adamw"}}, 'optimizer.kind = "adamw"'),
        ({"optimizer": {"kind": "sgd", "momentum": 0.9, "lr": 0.1}}, "optimizer.momentum = 0.9"),
        ({"optimizer": {"kind": "sgd", "lr": 0.1}, "sync": {"kind": "local"}}, 'sync.kind = "local"'),
    ],
)
def test_velocities_are_for_plain_gradient_descent(tmp_path: Path, tables: dict[str, Any], named: str) -> None:
    """Deep Gradient Compression has the momentum; another codec serves the same run."""
    sentence = codec_refusal(run_file_of(tmp_path, **tables, codec={"kind": "dgc"}))
    assert sentence is not None
    assert named in sentence
    assert codec_refusal(run_file_of(tmp_path, **tables, **TOP_K)) is None


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"layout": {"replicate": 4}},
        {"layout": {"replicate": 2, "shard": 2}},
        {"layout": {"replicate": 2, "pipeline": 2}},
        {"layout": {"replicate": 2, "context": 2}},
        {"layout": {"shard": 2}, "run": {"processes": 4}},
        {"precision": {"kind": "bfloat16"}},
    ],
)
def test_what_it_serves(tmp_path: Path, tables: dict[str, Any]) -> None:
    """One process included: a run may go on with fewer."""
    assert codec_refusal(run_file_of(tmp_path, **tables, **TOP_K)) is None


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["codec.kind=top-k"], "top_k"),
        (["codec.kind=top_k", "codec.fraction=0.0"], "codec.fraction"),
        (["codec.kind=blockwise", "codec.bits=5"], "codec.bits"),
        (["codec.kind=cast", "codec.fraction=0.1"], "fraction"),
        (["codec.kind=dct_top_k", "codec.kept=65"], "64 or less"),
        (["codec.kind=scale_com", "codec.fraction=1.5"], "codec.fraction"),
        (["codec.kind=dgc", "codec.momentum=1.0"], "codec.momentum"),
        (["codec.kind=qsgd", "codec.feedback=true"], "feedback"),
        (["codec.kind=blockwise", "codec.bits=4", "codec.rounding=stochastic"], "195 or less"),
    ],
)
def test_values_that_make_no_sense(tmp_path: Path, overrides: list[str], named: str) -> None:
    """Refused by the table itself, with what is allowed; without the wrong key the file is read."""
    path = tmp_path / "digits.toml"
    path.write_text(DIGITS.read_text())
    with pytest.raises(ConfigError) as refused:
        load_run(path, overrides)
    assert re.search(named, str(refused.value).partition(": ")[2])
    assert load_run(path, ["codec.kind=top_k", "codec.fraction=0.5"]).codec == TopKConfig(fraction=0.5)


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({"codec": {"kind": "sign"}}, 'codec.kind = "sign"'),
        ({"optimizer": {"clip_norm": 1.0}}, "optimizer.clip_norm = 1"),
        ({"sync": {"kind": "local"}}, 'sync.kind = "local"'),
        ({"sync": {"kind": "allreduce", "order": "canonical", "logical_shards": 4}}, 'sync.order = "canonical"'),
        ({"layout": {"tensor": 2}}, "layout.tensor = 2"),
        ({"precision": {"kind": "float16"}}, 'precision.kind = "float16"'),
        ({"observe": {"noise_every_steps": 5}}, "observe.noise_every_steps = 5"),
        ({"gradients": {"schedule": "priority"}}, 'gradients.schedule = "priority"'),
    ],
)
@pytest.mark.parametrize("kind", ["one_bit_adam", "zero_one_adam", "one_bit_lamb"])
def test_what_an_optimizer_that_sends_momenta_cannot_serve(
    tmp_path: Path, kind: str, tables: dict[str, Any], named: str
) -> None:
    """The sentence names the optimizer and the key; alone it is served, and AdamW with the key too."""
    own = {**tables.get("optimizer", {}), "kind": kind}
    sentence = codec_refusal(run_file_of(tmp_path, **{**tables, "optimizer": own}))
    assert sentence is not None
    assert f'optimizer.kind = "{kind}"' in sentence
    assert named in sentence
    assert codec_refusal(run_file_of(tmp_path, optimizer={"kind": kind})) is None
