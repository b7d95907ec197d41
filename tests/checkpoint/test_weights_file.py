"""Weights go out and in as one safetensors file."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.checkpoint.commit import read_manifest
from shoal.checkpoint.load import read_all
from shoal.checkpoint.weights import export, import_weights
from shoal.errors import UsageError
from tests.checkpoint.states import leftovers, same, save, saver_for, state_of


def weights(step):
    """The weights of `state_of(step)`, by the model's own names."""
    return {name.removeprefix("model/"): t for name, t in state_of(step).items() if name.startswith("model/")}


def test_what_is_exported_is_imported_bit_by_bit(tmp_path):
    """Another program reads the file by the model's names; imported, it is a whole checkpoint of weights alone."""
    save(saver_for(tmp_path / "run"), 5)
    file = tmp_path / "weights.safetensors"
    assert export(tmp_path / "run", file) == 5
    assert same(load_file(file), weights(5))
    manifest = read_manifest(import_weights(file, tmp_path / "imported"))
    assert same(read_all(manifest, tmp_path / "imported", "model/"), {f"model/{n}": t for n, t in weights(5).items()})
    assert {entry.name for entry in manifest.tensors} == {f"model/{name}" for name in weights(5)}
    assert leftovers(tmp_path / "imported") == []


def test_nothing_is_overwritten(tmp_path):
    """A file that is there, and a run directory with checkpoints, are refused by name."""
    save(saver_for(tmp_path / "run"), 5)
    file = tmp_path / "weights.safetensors"
    save_file({"a": torch.ones(2)}, file)
    with pytest.raises(UsageError, match=r"weights\.safetensors exists"):
        export(tmp_path / "run", file)
    with pytest.raises(UsageError, match="holds checkpoints of a run"):
        import_weights(file, tmp_path / "run")


@pytest.mark.parametrize("content", [b"", b"\x80\x04pickle", None])
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    """Nothing is unpickled, and no half of a run directory is left."""
    file = tmp_path / "weights.bin"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=r"weights\.bin (cannot be read|is missing).*: give a safetensors file"):
        import_weights(file, tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


def test_a_checkpoint_without_weights_has_nothing_to_export(tmp_path):
    """The sentence says which tensors weights are."""
    save(saver_for(tmp_path), 1, {"optimizer/step": torch.zeros(())})
    with pytest.raises(UsageError, match=r"no tensor in it is called model/"):
        export(tmp_path, tmp_path / "out")
