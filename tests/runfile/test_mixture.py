"""A mixture is read as one: its sources have the keys of reading that `[data]` has."""

from __future__ import annotations

import pytest

from shoal.config.load import dumps, parse
from shoal.data.config import Mixture
from shoal.errors import ConfigError
from shoal.runfile.load import run_file_of

TABLES = {
    "run": {"name": "mixed", "steps": 1},
    "model": {"kind": "gpt"},
    "batch": {"global_samples": 4},
}
"""A run without its data."""


def mixture(whole: dict, source: dict) -> dict:
    sources = {"a": {"kind": "stdlib"} | source, "b": {"kind": "text", "files": ["*"]}}
    return TABLES | {"data": {"kind": "mixture", "sources": sources} | whole}


def test_a_resolved_mixture_is_the_same_run():
    """Its sources say what holds for them, and training from the written file again is no contradiction."""
    run_file = run_file_of(mixture({"shuffle": False, "readers": 3, "augment": ["flip"]}, {}), file="run.toml")
    assert isinstance(run_file.data, Mixture)
    assert [(source.shuffle, source.readers) for source in run_file.data.sources.values()] == [(False, 3)] * 2
    assert run_file_of(parse(dumps(run_file)), file="run.toml") == run_file


def test_a_source_may_repeat_what_holds():
    """The same value is no contradiction; another one is, also where it is the default."""
    assert run_file_of(mixture({"shuffle": False}, {"shuffle": False}), file="run.toml")
    with pytest.raises(ConfigError, match=r"data\.sources\.a\.shuffle: found True, .*with data\.shuffle = False"):
        run_file_of(mixture({"shuffle": False}, {"shuffle": True}), file="run.toml")
