"""A prepared corpus is whole, split by file, made once, and made safely by many at once."""

import multiprocessing
from pathlib import Path

import pytest

from shoal.data import text
from shoal.data.corpora import split_by_path
from shoal.data.text import prepare_text
from shoal.errors import DataError


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    paths = [root / "sub" / f"{i}.txt" for i in range(40)]
    for i, path in enumerate(paths):
        path.write_bytes(f"document {i}\n".encode() * (i + 1))
    return paths


def prepared(files: list[Path], tmp_path: Path, fraction: float = 0.2) -> text.TextCorpus:
    return prepare_text(files, tmp_path / "cache", root=tmp_path / "root", held_out_fraction=fraction)


def test_documents_are_joined_and_split(files: list[Path], tmp_path: Path):
    """Both files hold their documents in order of path, each closed by byte 0, and meta.json counts them."""
    corpus = prepared(files, tmp_path)
    by_name = {path.relative_to(tmp_path / "root").as_posix(): path.read_bytes() for path in files}
    train, held_out = split_by_path(by_name, 0.2)
    assert corpus.held_out is not None
    assert corpus.train.read_bytes() == b"".join(by_name[name] + b"\0" for name in train)
    assert corpus.held_out.read_bytes() == b"".join(by_name[name] + b"\0" for name in held_out)
    assert (corpus.meta.train_files, corpus.meta.held_out_files) == (len(train), len(held_out))
    assert corpus.meta.train_bytes == corpus.train.stat().st_size
    assert corpus.meta.bigram_nats_per_byte is not None


def test_the_second_call_finds_it(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing is made again until a file or the fraction changes; equal content has an equal hash anywhere."""
    first = prepared(files, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(text, "_make", lambda *_: pytest.fail("made again"))
        assert prepared(files, tmp_path) == first
    elsewhere = prepare_text(files, tmp_path / "other", root=tmp_path / "root", held_out_fraction=0.2)
    assert elsewhere.meta == first.meta
    files[0].write_bytes(b"other")
    changed = prepared(files, tmp_path)
    assert changed.meta.hash != first.meta.hash
    assert prepared(files, tmp_path, fraction=0).held_out is None


def test_ranks_may_ask_at_once(files: list[Path], tmp_path: Path):
    """Eight processes at once get one corpus, and leave no half-made folder behind."""
    with multiprocessing.get_context("fork").Pool(8) as pool:
        corpora = pool.starmap(prepared, [(files, tmp_path)] * 8)
    assert len({corpus.train for corpus in corpora}) == 1
    assert len({corpus.meta.hash for corpus in corpora}) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [corpora[0].train.parent.name]


def test_a_crash_leaves_nothing_half_made(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where the builder fails before the rename there is no corpus; a killed builder's leftovers are cleared."""
    with monkeypatch.context() as patch:
        patch.setattr(text, "_baseline", lambda _: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            prepared(files, tmp_path)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    corpus = prepared(files, tmp_path)
    abandoned = tmp_path / "cache" / f".{corpus.train.parent.name}-killed"
    abandoned.mkdir()
    corpus.train.parent.rename(tmp_path / "away")
    assert prepared(files, tmp_path).meta == corpus.meta
    assert not abandoned.exists()


def test_what_is_no_corpus_is_refused(files: list[Path], tmp_path: Path):
    """Byte 0, a missing file, empty files and a damaged cache each have a sentence."""
    corpus = prepared(files, tmp_path)
    corpus.train.write_bytes(b"short")
    with pytest.raises(DataError, match="other sizes"):
        prepared(files, tmp_path)
    (corpus.train.parent / "meta.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        prepared(files, tmp_path)
    files[5].write_bytes(b"a\0b")
    with pytest.raises(DataError, match=r"5\.txt holds byte 0"):
        prepared(files, tmp_path)
    for path in files:
        path.write_bytes(b"")
    with pytest.raises(DataError, match="are empty"):
        prepared(files, tmp_path)
    files[0].unlink()
    with pytest.raises(DataError, match="There is no text file"):
        prepared(files, tmp_path)
