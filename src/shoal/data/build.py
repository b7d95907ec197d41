"""From the table `[data]` to the sources that it names."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.config.check import implementation_of
from shoal.data.config import ArrayFiles, BatchConfig, BuiltInData, Digits, Mixture, StdlibText, TextFiles, Tokens
from shoal.data.corpora import Arrays, digits, stdlib_folder, stdlib_sources
from shoal.data.dataset import Dataset, Facts, Joined, Surroundings, quotas_of, with_sizes
from shoal.data.inputs import AsInputs
from shoal.data.iterable import IterableSource, as_source, held_out_items
from shoal.data.record_config import Packing
from shoal.data.sample import Source, describe
from shoal.data.shard_files import globbed
from shoal.data.text import SEPARATOR, VOCABULARY, TextCorpus, prepare_text
from shoal.data.tokenised import prepare_files
from shoal.data.tokens import Documents, TokenFile, Windows
from shoal.errors import DataError, UserCodeError


def build(config: BuiltInData, *, batch: BatchConfig, vocabulary: int | None, cache: Path) -> Dataset:
    """The data that `config` names; `from_objects` serves `data.kind = "python"`.

    Args:
        batch: its `sequence` cuts token data.
        vocabulary: the model's number of token ids, against which token data is checked; None: unknown.
        cache: where a prepared corpus is kept.

    Raises:
        DataError: a file is missing, empty or not what it should be.
        MissingExtra: an optional package is not installed.
    """
    match config:
        case StdlibText():
            return _stdlib(config, batch.sequence, vocabulary=vocabulary, cache=cache)
        case TextFiles():
            return _text_files(config, batch.sequence, vocabulary=vocabulary, cache=cache)
        case Tokens():
            return _tokens(config, batch.sequence, vocabulary=vocabulary)
        case ArrayFiles():
            return _arrays(config)
        case Digits():
            train, held_out = digits()
            return with_sizes(train, held_out)
        case Mixture():
            return mixture(config, Surroundings(batch.sequence, vocabulary, cache))
        case _:
            return implementation_of(config)(config, Surroundings(batch.sequence, vocabulary, cache))


def from_objects(train: Any, held_out: Any = None) -> Dataset:
    """The data sets that a user's function or script gives: anything with `len(d)` and `d[i]`, an iterable, or a
    function that makes one (`iterable.as_source`, `iterable.held_out_items`).

    Raises:
        UserCodeError: one of them is something else.
        DataError: one of them is empty, or held-out data has no end.
    """
    train = as_source(train)
    _check_source(train, "the training data")
    if held_out is not None:
        held_out = held_out_items(held_out)
        _check_source(held_out, "the held-out data")
    source = train.source if isinstance(train, AsInputs) else train
    if isinstance(source, IterableSource):
        sizes: Facts = {} if held_out is None else {"held_out/samples": len(held_out)}
        return Dataset(train, held_out, {"iterable": source.name} | sizes, endless=True, iterable=source)
    return with_sizes(train, held_out)


def _check_source(source: Any, name: str) -> None:
    sized = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    if not sized or isinstance(source, str | bytes | dict):
        raise UserCodeError(
            f"{name[0].upper()}{name[1:]} is {describe(source)}: give an object with len(d) and d[i], such as a list "
            "of samples or a map-style torch Dataset, an iterable or a generator function."
        )
    if len(source) == 0:
        what = f"the {type(source).__name__} has length 0"
        raise DataError(f"{name[0].upper()}{name[1:]} has no samples ({what}): give at least one.")


def _stdlib(config: StdlibText, sequence: int, *, vocabulary: int | None, cache: Path) -> Dataset:
    root = stdlib_folder()
    corpus = prepare_text(
        stdlib_sources(root), cache, root=root, held_out_fraction=config.held_out_fraction, name="stdlib"
    )
    return _text(corpus, sequence, packing=config.packing, vocabulary=vocabulary)


def _text_files(config: TextFiles, sequence: int, *, vocabulary: int | None, cache: Path) -> Dataset:
    files = globbed(config.files, key="data.files")
    root = Path(os.path.commonpath([path.parent for path in files]))
    if config.tokenizer is not None:
        return prepare_files(config, files, root, Surroundings(sequence, vocabulary, cache))
    corpus = prepare_text(files, cache, root=root, held_out_fraction=config.held_out_fraction)
    return _text(corpus, sequence, packing=config.packing, vocabulary=vocabulary)


def _text(corpus: TextCorpus, sequence: int, *, packing: Packing, vocabulary: int | None) -> Dataset:
    def packed(path: Path) -> Source:
        tokens = TokenFile(path, dtype="uint8", vocabulary=vocabulary).tokens
        return Documents.separated(tokens, SEPARATOR).packed(packing, sequence=sequence)

    meta = corpus.meta
    facts: Facts = {
        "hash": meta.hash,
        "vocabulary": VOCABULARY,
        "train/files": meta.train_files,
        "train/bytes": meta.train_bytes,
        "held_out/files": meta.held_out_files,
        "held_out/bytes": meta.held_out_bytes,
    }
    if meta.bigram_nats_per_byte is not None:
        facts["baseline/bigram_nats_per_byte"] = meta.bigram_nats_per_byte
    return with_sizes(packed(corpus.train), packed(corpus.held_out) if corpus.held_out else None, facts)


def _tokens(config: Tokens, sequence: int, *, vocabulary: int | None) -> Dataset:
    train = TokenFile(config.path, dtype=config.dtype, vocabulary=vocabulary).tokens
    facts: Facts = {"train/tokens": len(train)}
    if config.held_out is None:
        return with_sizes(Windows(train, sequence), None, facts)
    held_out = TokenFile(config.held_out, dtype=config.dtype, vocabulary=vocabulary).tokens
    return with_sizes(Windows(train, sequence), Windows(held_out, sequence), facts | {"held_out/tokens": len(held_out)})


def _arrays(config: ArrayFiles) -> Dataset:
    held_out = None
    if config.held_out_inputs is not None and config.held_out_targets is not None:
        held_out = Arrays(config.held_out_inputs, config.held_out_targets)
    return with_sizes(Arrays(config.inputs, config.targets), held_out)


def mixture(config: Mixture, around: Surroundings) -> Dataset:
    """Several sources in fixed proportions. Held-out samples are those of all sources that have some.

    Raises:
        DataError: a source fails to build, or has no sample in `data.window` samples.
    """
    batch = BatchConfig(global_samples=1, sequence=around.sequence)
    parts: dict[str, Dataset] = {}
    for name, source in config.sources.items():
        try:
            parts[name] = build(source, batch=batch, vocabulary=around.vocabulary, cache=around.cache)
        except DataError as error:
            raise DataError(f"data.sources.{name}: {error}") from error
    sizes = [len(part.train) for part in parts.values()]
    weights = [config.weights.get(name, size) for name, size in zip(parts, sizes, strict=True)]
    quotas = quotas_of(weights, config.window)
    held_out = [part.held_out for part in parts.values() if part.held_out is not None]
    facts: Facts = {f"{name}/{fact}": value for name, part in parts.items() for fact, value in part.facts.items()}
    facts |= {f"{name}/quota": quota for name, quota in zip(parts, quotas, strict=True)}
    train = Joined([part.train for part in parts.values()])
    joined = with_sizes(train, Joined(held_out) if held_out else None, facts)
    return replace(joined, parts=sizes, quotas=quotas)
