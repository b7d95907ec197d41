"""From the tables of records, images and saved data sets to their sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.data.blocks import BlockFiles, Format, JSONLines
from shoal.data.dataset import Dataset, Facts, Surroundings, with_sizes
from shoal.data.decode import ImageFolder, ImageForm
from shoal.data.parquet import ArrowFormat, ParquetFormat, SavedDataset
from shoal.data.record_config import JSONL, HuggingFace, ImageFolders, Parquet, RecordFiles, Records, WebDataset
from shoal.data.records import Fields, RecordSamples, RecordSource
from shoal.data.remote import RemoteStore, is_remote
from shoal.data.shard_files import LocalStore, ShardFile, Store
from shoal.data.tars import TarSamples
from shoal.data.tokenised import prepare_records
from shoal.errors import ConfigError


def record_files(config: RecordFiles, around: Surroundings) -> Dataset:
    """Parquet, Arrow, JSONL and WebDataset tars. Raises DataError, MissingExtra: see `BlockFiles`."""
    store = _store(config, around)
    formats = _format_of(config)

    def opened(patterns: Sequence[str], key: str) -> tuple[BlockFiles, list[ShardFile]]:
        files = store.listed(patterns, key=key)
        source = BlockFiles(files, formats, store=store, cache=around.cache, cache_bytes=config.cache_bytes)
        return source, files

    train, files = opened(config.files, "data.files")
    held_out = None
    if config.held_out_files:
        held_out, more = opened(config.held_out_files, "data.held_out_files")
        files = [*files, *more]
    return _dataset(config, train, held_out, around, version="".join(file.fingerprint for file in files))


def _store(config: RecordFiles, around: Surroundings) -> Store:
    remote = {is_remote(pattern) for pattern in (*config.files, *config.held_out_files)}
    if remote == {True, False}:
        raise ConfigError("data.files mixes URLs and paths: make it all one, or a mixture of two sources.")
    if remote == {False}:
        return LocalStore()
    folder = around.cache / "remote"
    return RemoteStore(
        folder, limit_bytes=config.remote_cache_bytes, attempts=config.remote_attempts, options=config.remote_options
    )


def _format_of(config: RecordFiles) -> Format:
    if isinstance(config, JSONL):
        return JSONLines()
    if isinstance(config, WebDataset):
        return TarSamples()
    columns = [config.text] if config.text is not None else _fields(config).names
    return ParquetFormat(columns) if isinstance(config, Parquet) else ArrowFormat(columns)


def hugging_face(config: HuggingFace, around: Surroundings) -> Dataset:
    """What `datasets` saved. Raises DataError, MissingExtra: see `SavedDataset`."""
    columns = [config.text] if config.text is not None else _fields(config).names
    train = SavedDataset(config.folder, split=config.split, columns=columns)
    held_out = None
    if config.held_out_split is not None:
        held_out = SavedDataset(config.folder, split=config.held_out_split, columns=columns)
    version = train.version + (held_out.version if held_out is not None else "")
    return _dataset(config, train, held_out, around, version=version)


def image_folders(config: ImageFolders, around: Surroundings) -> Dataset:
    """Images in folders. Raises DataError, MissingExtra: see `ImageFolder`."""
    form = ImageForm(config.image_channels, config.image_size)
    fields, skips = Fields("image", "class", images=form), config.bad_records == "skip"
    train = ImageFolder(config.folder)
    held_out = None
    if config.held_out_folder is not None:
        held_out = RecordSamples(ImageFolder(config.held_out_folder, classes=train.classes), fields, skips_bad=skips)
    facts: Facts = {"classes": len(train.classes)}
    return with_sizes(RecordSamples(train, fields, skips_bad=skips), held_out, facts)


def _fields(config: Records) -> Fields:
    assert config.inputs is not None
    assert config.targets is not None
    form = ImageForm(config.image_channels, config.image_size)
    return Fields(config.inputs, config.targets, config.loss_weights, images=form)


def _dataset(
    config: Records, train: RecordSource, held_out: RecordSource | None, around: Surroundings, *, version: str
) -> Dataset:
    """Samples of fields, or of the tokens of a field of text."""
    if config.text is not None:
        return prepare_records(config, train, held_out, around, version=version)
    fields, skips = _fields(config), config.bad_records == "skip"
    samples: Callable[[RecordSource], RecordSamples] = lambda records: RecordSamples(records, fields, skips_bad=skips)  # noqa: E731
    return with_sizes(samples(train), None if held_out is None else samples(held_out))
