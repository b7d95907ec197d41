"""Every kind of data is built from its table, and bad data is refused with a sentence."""

from pathlib import Path

import numpy as np
import pytest

from shoal.data.build import build, from_objects
from shoal.data.config import ArrayFiles, BatchConfig, BuiltInData, Digits, StdlibText, TextFiles, Tokens
from shoal.data.sample import BatchSource
from shoal.errors import DataError, UserCodeError

BATCH = BatchConfig(global_samples=8, sequence=16)


def built(config: BuiltInData, tmp_path: Path, vocabulary: int | None = None):
    return build(config, batch=BATCH, vocabulary=vocabulary, cache=tmp_path / "cache")


def test_the_standard_library(tmp_path: Path):
    """The corpus of this interpreter comes with its hash, sizes and a plausible bigram baseline."""
    dataset = built(StdlibText(), tmp_path, vocabulary=256)
    assert 2.0 < float(dataset.facts["baseline/bigram_nats_per_byte"]) < 3.0
    assert len(dataset.train) == (int(dataset.facts["train/bytes"]) - 1) // 16
    assert isinstance(dataset.train, BatchSource)
    assert dataset.held_out is not None
    assert len(dataset.held_out) == dataset.facts["held_out/samples"]
    with pytest.raises(DataError, match="outside the vocabulary of 64"):
        built(StdlibText(), tmp_path, vocabulary=64)


@pytest.mark.parametrize("packing", ["concatenate", "pad"])
def test_text_files(tmp_path: Path, packing: str, monkeypatch: pytest.MonkeyPatch):
    """Globs find files; `pad` lets no sample cross a file, `concatenate` does."""
    for i in range(20):
        (tmp_path / "texts" / str(i)).mkdir(parents=True)
        (tmp_path / "texts" / str(i) / "a.txt").write_bytes(bytes([65 + i]) * 25)
    monkeypatch.chdir(tmp_path)
    dataset = built(TextFiles(files=["texts/**/*.txt"], packing=packing), tmp_path)  # type: ignore[arg-type]
    assert dataset.held_out is not None
    assert int(dataset.facts["train/files"]) + int(dataset.facts["held_out/files"]) == 20
    letters = [set(dataset.train[i][0].tolist()) - {0} for i in range(len(dataset.train))]
    assert all(len(of_sample) == 1 for of_sample in letters) == (packing == "pad")
    with pytest.raises(DataError, match="no file matches"):
        built(TextFiles(files=["none/*"]), tmp_path)


def test_tokens(tmp_path: Path):
    """Token files become windows of `batch.sequence`; the held-out file is checked as well."""
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(60, dtype=np.uint16).tofile(tmp_path / "test.bin")
    config = Tokens(path=str(tmp_path / "train.bin"), held_out=str(tmp_path / "test.bin"), dtype="uint16")
    dataset = built(config, tmp_path, vocabulary=100)
    assert dataset.held_out is not None
    assert (len(dataset.train), len(dataset.held_out)) == (6, 3)
    with pytest.raises(DataError, match="id 50 at token 50"):
        built(config, tmp_path, vocabulary=50)


def test_arrays_and_digits(tmp_path: Path):
    """Arrays come from their files; the digits from their package."""
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", np.zeros((4, 2)))
    a, b = str(tmp_path / "a.npy"), str(tmp_path / "b.npy")
    assert built(ArrayFiles(inputs=a, targets=b), tmp_path).held_out is None
    dataset = built(ArrayFiles(inputs=a, targets=b, held_out_inputs=a, held_out_targets=b), tmp_path)
    assert dataset.facts == {"train/samples": 4, "held_out/samples": 4}
    pytest.importorskip("sklearn")
    assert built(Digits(), tmp_path).facts == {"train/samples": 1438, "held_out/samples": 359}


def test_objects_are_checked():
    """A user's data needs items, and what has a length at least one sample."""
    assert from_objects([(1, 2)], held_out=[(3, 4), (5, 6)]).facts == {"train/samples": 1, "held_out/samples": 2}
    for wrong in (None, 3, "text", {"inputs": [1]}):
        with pytest.raises(UserCodeError, match=r"The training data is .*len\(d\)"):
            from_objects(wrong)
    with pytest.raises(UserCodeError, match="The held-out data is an int"):
        from_objects([(1, 2)], held_out=3)
    with pytest.raises(DataError, match=r"has no samples .*list has length 0"):
        from_objects([])
