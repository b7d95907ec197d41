"""Files as strangers have them: what can be read is read as it is meant, the rest is refused or named, not guessed."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from shoal.data.batches import BatchRead, read_batch
from shoal.data.dataset import Dataset
from shoal.data.decode import ImageForm, decoded, image_array
from shoal.errors import DataError, UserCodeError
from tests.data.sources import built

RECORDS = {"inputs": "x", "targets": "y"}


def read_all(dataset: Dataset) -> BatchRead:
    """All samples in one batch."""
    ids = np.arange(len(dataset.train))
    return read_batch(dataset.train, ids, ids, denominator="auto")


def inputs_of(dataset: Dataset) -> list:
    inputs = read_all(dataset).batch.inputs
    return inputs.tolist()  # type: ignore[union-attr]


def jsonl(tmp_path: Path, content: bytes, **keys) -> Dataset:
    (tmp_path / "a.jsonl").write_bytes(content)
    fields = {} if "text" in keys else RECORDS
    table = {"kind": "jsonl", "files": [str(tmp_path / "a.jsonl")]}
    return built(table | fields | keys, tmp_path / "cache")


def line(number: int, end: bytes = b"\n") -> bytes:
    return json.dumps({"x": [number, number], "y": number}).encode() + end


def parquet(tmp_path: Path, columns: dict, **keys) -> Dataset:
    arrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    writer.write_table(arrow.table(columns), tmp_path / "a.parquet", row_group_size=2)
    table = {"kind": "parquet", "files": [str(tmp_path / "*.parquet")]}
    return built(table | RECORDS | keys, tmp_path / "cache")


def npy(number: int) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.full(2, number))
    return buffer.getvalue()


def tar(*members: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def sample(number: int) -> list[tuple[str, bytes]]:
    return [(f"{number:03d}.npy", npy(number)), (f"{number:03d}.cls", b"%d" % number)]


def tars(tmp_path: Path, content: bytes, **keys) -> Dataset:
    (tmp_path / "a.tar").write_bytes(content)
    table = {"kind": "webdataset", "files": [str(tmp_path / "a.tar")], "inputs": "npy", "targets": "cls"}
    return built(table | keys, tmp_path / "cache")


@pytest.mark.parametrize("head", [b"", b"\n", b"  \r\n"])
def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path, head: bytes):
    """Editors of other systems begin a file with one."""
    assert inputs_of(jsonl(tmp_path, b"\xef\xbb\xbf" + head + line(1) + line(2))) == [[1, 1], [2, 2]]


def test_lines_of_blanks_are_no_records(tmp_path: Path):
    """Spaces, tabs and returns between lines, at the end, and across the pieces in which a file is read."""
    blanks = b"\n  \n\t\r\n \x00 \n"
    content = (
        blanks + line(1) + blanks + line(2, b"\r\n") + b" " * 2**22 + b"\n" + line(3) + b" " * (2**22 - 50) + b"\n \n"
    )
    assert inputs_of(jsonl(tmp_path, content)) == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize("head", ["1f8b08", "28b52ffd", "425a6839", "fd377a585a00"])
def test_compressed_lines_are_refused(tmp_path: Path, head: str):
    """gzip, zstd, bzip2 and xz, whatever the file is called."""
    with pytest.raises(DataError, match="is compressed"):
        jsonl(tmp_path, bytes.fromhex(head) + b"x" * 100)


def test_whole_numbers_that_do_not_fit_are_refused(tmp_path: Path):
    """They would become other numbers."""
    with pytest.raises(DataError, match="has 67 bits, and whole numbers have 64"):
        inputs_of(jsonl(tmp_path, b'{"x": [1], "y": 123456789012345678901}\n'))
    arrow = pytest.importorskip("pyarrow")
    with pytest.raises(UserCodeError, match="holds 9223372036854775809, more than an int64 can"):
        inputs_of(parquet(tmp_path, {"x": arrow.array([[1], [2**63 + 1]], arrow.list_(arrow.uint64())), "y": [0, 1]}))


def test_text_that_cannot_be_tokenised_is_named_or_left_out(tmp_path: Path):
    """Byte 0 ends a document of bytes, so that no text may hold it."""
    content = b'{"t": "a\\u0000b"}\n' + b'{"t": "abcdefg"}\n' * 9
    with pytest.raises(DataError, match=r"a\.jsonl, record 0: The text holds byte 0"):
        jsonl(tmp_path, content, text="t")
    assert jsonl(tmp_path, content, text="t", bad_records="skip").facts["train/skipped"] == 1


@pytest.mark.parametrize(
    "values", [[[1.0, None], [2.0, 3.0]], [[1, None], [None, 3]], [[[1.0], [None]], [[2.0], [3.0]]]]
)
def test_a_null_in_a_list_is_no_number(tmp_path: Path, values: list):
    """It would become NaN, and whole numbers floating-point ones; the record is damaged instead."""
    with pytest.raises(DataError, match=r"a\.parquet, record 0: The field 'x' is a list with a null in it"):
        inputs_of(parquet(tmp_path, {"x": values, "y": [0, 1]}))


def test_columns_that_are_no_numbers_are_named(tmp_path: Path):
    """Structs, maps, lists of structs and dictionaries of strings: the file, the record and the field."""
    arrow = pytest.importorskip("pyarrow")
    for values, sentence in (
        ([{"a": 1.0}] * 3, "is of type dict"),
        ([[{"a": 1.0}]] * 3, "is a list that is no array of numbers"),
        (arrow.array([[("a", 1.0)]] * 3, arrow.map_(arrow.string(), arrow.float64())), "is a list that is no array"),
        (arrow.array(["cat", "dog", "cat"]).dictionary_encode(), "holds text, 'cat'"),
    ):
        with pytest.raises(DataError, match=rf"a\.parquet, record 0: The field 'x' {sentence}"):
            inputs_of(parquet(tmp_path, {"x": values, "y": [0, 1, 2]}))


def test_images_as_datasets_stores_them_in_parquet(tmp_path: Path):
    """A struct of bytes and a path is an image."""
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.fromarray(np.full((2, 2, 3), 51, np.uint8)).save(buffer, "png")
    dataset = parquet(tmp_path, {"x": [{"bytes": buffer.getvalue(), "path": "a.png"}] * 2, "y": [0, 1]})
    assert np.allclose(inputs_of(dataset), 0.2)


def test_a_tar_that_was_cut_between_two_members_is_refused(tmp_path: Path):
    """It would have fewer samples; what is left ends without a tar's end mark."""
    whole = tar(*sample(0), *sample(1))
    with pytest.raises(DataError, match=r"ends at byte 2048 without a tar's end mark"):
        tars(tmp_path, whole[:2048])


def test_tars_one_behind_the_other_are_refused(tmp_path: Path):
    """The samples of the second one would be left out."""
    first = tar(*sample(0))
    with pytest.raises(DataError, match="goes on behind the end mark"):
        tars(tmp_path, first + tar(*sample(1)))


def test_folders_and_hidden_members_at_the_end_of_a_tar_are_nothing(tmp_path: Path):
    """They end it as well as a sample would."""
    assert inputs_of(tars(tmp_path, tar(*sample(1), ("._1.npy", b"x" * 700)))) == [[1, 1]]


def test_a_field_that_is_there_twice_is_damage(tmp_path: Path):
    """Neither of the two is taken for it."""
    content = tar(*sample(0), ("001.npy", npy(1)), ("001.npy", npy(9)), ("001.cls", b"1"))
    with pytest.raises(DataError, match=r"a\.tar, record 1: The member 001\.npy is there twice"):
        inputs_of(tars(tmp_path, content))
    read = read_all(tars(tmp_path, content, bad_records="skip"))
    assert read.batch.weights.tolist() == [1.0, 0.0]


def test_hidden_folders_and_files_are_no_classes_and_images(tmp_path: Path):
    """.ipynb_checkpoints is no class, and ._1.png no image."""
    image = pytest.importorskip("PIL.Image")
    for name in ("a/1.png", "b/1.png", ".ipynb_checkpoints/1.png", "b/.trash/1.png"):
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(tmp_path / "root" / name)
    (tmp_path / "root" / "a" / "._1.png").write_bytes(b"junk")
    dataset = built({"kind": "images", "folder": str(tmp_path / "root")}, tmp_path / "cache")
    assert dataset.facts["classes"] == 2
    assert read_all(dataset).batch.targets.tolist() == [0, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_images_of_16_bits_keep_their_values(tmp_path: Path, channels: int):
    """Pillow's own conversions cut them off at 255."""
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "root" / "a").mkdir(parents=True)
    grey = np.array([[0, 13107], [26214, 65535]], np.uint16)
    image.fromarray(grey).save(tmp_path / "root" / "a" / "1.png")
    table = {"kind": "images", "folder": str(tmp_path / "root"), "image_channels": channels}
    found = np.array(inputs_of(built(table, tmp_path / "cache")))
    assert found.shape == (1, channels, 2, 2)
    assert np.allclose(found, grey / 65535)


def test_a_damaged_header_of_a_tar_is_named(tmp_path: Path):
    """Where tarfile stops before the end mark, nothing is said of an end mark."""
    content = bytearray(tar(*sample(0), *sample(1)))
    content[2048 + 150] ^= 1  # the checksum of the third member
    with pytest.raises(DataError, match="damaged header at byte 2048"):
        tars(tmp_path, bytes(content))


def test_numbers_that_have_no_place_are_refused_in_words():
    """Whole numbers of 400 digits; an image of 32 bits, whose white is unknown."""
    image = pytest.importorskip("PIL.Image")
    with pytest.raises(DataError, match="has 1329 bits, and whole numbers have 64"):
        decoded(10**400, "x", ImageForm())
    with pytest.raises(DataError, match="beyond 16 bits"):
        image_array(image.fromarray(np.full((2, 2), 10**6, dtype=np.int32)), ImageForm())
