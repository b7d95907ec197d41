"""Text of every origin becomes documents, and packed documents are trained as if each stood alone."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.collate import IGNORED, collate
from shoal.data.tokens import Documents, PackedDocuments
from shoal.errors import DataError
from shoal.models.config import GPTConfig
from shoal.models.gpt import GPT
from tests.data.sources import built

TEXTS = ["a cat sat", "on", "the mat and looked at another cat", "é", "x" * 40]


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), sequence=st.integers(1, 8))
def test_pieces_are_told_apart_and_targets_stay_inside(lengths: list[int], sequence: int):
    """In every window, tokens of one document share a number and count up from 0; each token but the last of its
    document has the following one as target, and that one has none."""
    ends = np.cumsum(lengths)
    if ends[-1] < sequence + 1:
        return
    owners = np.repeat(np.arange(len(lengths)), lengths)
    packed = PackedDocuments(Documents(np.arange(ends[-1], dtype=np.uint32), ends), sequence)
    for index in range(len(packed)):
        inputs, targets = packed[index]
        for i, token in enumerate(inputs["tokens"].tolist()):
            assert token == index * sequence + i
            previous = i > 0 and owners[token - 1] == owners[token]
            assert inputs["positions"][i] == (inputs["positions"][i - 1] + 1 if previous else 0)
            assert inputs["documents"][i] == (0 if i == 0 else inputs["documents"][i - 1] + (not previous))
            inside = token + 1 < len(owners) and owners[token + 1] == owners[token]
            assert targets[i] == (token + 1 if inside else IGNORED)


def test_attention_does_not_cross_documents():
    """A GPT's losses over a packed window are those of each piece by itself (float64: to rounding), and differ from
    those of a window without document masks."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=32, layers=2, width=16, heads=2)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    lengths = [5, 1, 7, 12]
    tokens = np.random.default_rng(0).integers(0, 32, sum(lengths)).astype(np.uint8)
    packed = PackedDocuments(Documents(tokens, np.cumsum(lengths)), 20)
    batch = collate([packed[0]], np.array([0]))
    assert isinstance(batch.inputs, dict)
    assert isinstance(batch.targets, torch.Tensor)

    def losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")

    together = losses(model(**batch.inputs), batch.targets)
    start, apart = 0, []
    for length in [5, 1, 7, 7]:
        piece = batch.inputs["tokens"][:, start : start + length]
        apart.append(losses(model(piece), batch.targets[:, start : start + length]))
        start += length
    assert torch.allclose(together, torch.cat(apart), rtol=1e-12, atol=1e-12)
    assert batch.weight == 20 - 3  # three documents end within the window
    unmasked = losses(model(batch.inputs["tokens"]), batch.targets)
    assert not torch.allclose(together, unmasked, rtol=1e-3)


def text_files(folder: Path, kind: str) -> dict:
    folder.mkdir()
    if kind == "jsonl":
        (folder / "t.jsonl").write_text("\n".join(json.dumps({"t": text}) for text in TEXTS))
    elif kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"t": TEXTS}), folder / "t.parquet")
    else:
        import io
        import tarfile

        with tarfile.open(folder / "t.tar", "w") as tar:
            for number, text in enumerate(TEXTS):
                member = tarfile.TarInfo(f"{number}.t")
                member.size = len(text.encode())
                tar.addfile(member, io.BytesIO(text.encode()))
    return {"kind": kind, "files": [f"{folder}/*"], "text": "t", "packing": "documents"}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "webdataset"])
def test_bytes_are_the_tokenizer_of_last_resort(kind: str, tmp_path: Path):
    """Without a tokenizer a field of text is its UTF-8 with a 0 after each document, from every kind of file."""
    dataset = built(text_files(tmp_path / "data", kind), tmp_path / "cache", sequence=8, vocabulary=256)
    stream = b"".join(text.encode() + b"\0" for text in TEXTS)
    joined = np.concatenate([dataset.train[i][0]["tokens"] for i in range(len(dataset.train))])
    assert bytes(joined.astype(np.uint8)) == stream[: len(joined)]
    assert dataset.facts["train/documents"] == len(TEXTS)
    assert dataset.facts["train/tokens"] == len(stream)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Whole words as tokens, and an end."""
    tokenizers = pytest.importorskip("tokenizers")
    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = {word: number for number, word in enumerate([*words, "[UNK]", "<end>"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_from_a_file(tmp_path: Path, tokenizer: Path):
    """Its ids, with the end token after each document, from a field or from text files; the model has to know them."""
    words = sorted({word for text in TEXTS for word in text.split()})
    end = len(words) + 1
    wanted = [i for text in TEXTS for i in [*(words.index(word) for word in text.split()), end]]
    table = text_files(tmp_path / "data", "jsonl") | {"tokenizer": str(tokenizer), "end_token": "<end>"}
    dataset = built(table, tmp_path / "cache", sequence=5, vocabulary=end + 1)
    joined = np.concatenate([dataset.train[i][0]["tokens"] for i in range(len(dataset.train))])
    assert joined.tolist() == wanted[: len(joined)]
    assert dataset.facts["vocabulary"] == end + 1
    with pytest.raises(DataError, match=f"has {end + 1} ids and the model's vocabulary is {end}: set model.vocabulary"):
        built(table, tmp_path / "cache", sequence=5, vocabulary=end)
    with pytest.raises(DataError, match="has no token '<eos>'"):
        built(table | {"end_token": "<eos>"}, tmp_path / "cache")
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    files = {
        "kind": "text",
        "files": [f"{tmp_path}/texts/*.txt"],
        "tokenizer": str(tokenizer),
        "end_token": "<end>",
        "held_out_fraction": 0.0,
    }
    windows = built(files, tmp_path / "cache", sequence=5).train
    assert np.concatenate([windows[i][0] for i in range(len(windows))]).tolist() == wanted[: 5 * len(windows)]
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(DataError, match=r"broken\.json is no tokenizer"):
        built(files | {"tokenizer": str(tmp_path / "broken.json")}, tmp_path / "cache")


def test_bad_texts_stop_or_are_left_out(tmp_path: Path):
    """A field that is missing or no text is named; with skip, the others are the documents, and they are counted."""
    (tmp_path / "t.jsonl").write_text('{"t": "one two"}\n{"t": 3}\nnonsense\n{"u": ""}\n{"t": "three four"}\n')
    table = {"kind": "jsonl", "files": [str(tmp_path / "t.jsonl")], "text": "t", "packing": "pad"}
    with pytest.raises(DataError, match=r"t\.jsonl, record 1: the field 't' is an int, not text"):
        built(table, tmp_path / "cache")
    dataset = built(table | {"bad_records": "skip"}, tmp_path / "cache")
    assert len(dataset.train) == 2
    assert dataset.facts["train/skipped"] == 3
