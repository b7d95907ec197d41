"""The kinds of `[data]` whose samples are records with named fields. Imports neither torch nor numpy."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from shoal.config.check import Positive, Table, says

# The keys that every kind of `[data]` has. Imports neither torch nor numpy.


ReaderKind = Literal["threads", "processes"]


class Reading(Table, frozen=True):
    """What every kind of data has: the order of its samples, and how far ahead they are read."""

    shuffle: Annotated[bool, says("Draw a new order of the samples in each epoch.")] = True
    shuffle_window: Annotated[
        Annotated[int, msgspec.Meta(ge=16)] | None,
        says(
            "Shuffle locally: this many positions in a row draw from 16 runs of neighbours in the files. Default: "
            "shuffle over all samples."
        ),
    ] = None
    stratify: Annotated[
        str | None,
        says(
            "Give every stretch of the run each class in its proportion: the classes are the data set's attribute "
            '"targets", or what package.module:function returns for data=the training data, one for each sample.'
        ),
    ] = None
    prefetch_steps: Annotated[
        int,
        says(
            "Steps that are read ahead of the one that trains; where they are small (256 KiB), one more, and "
            "seven where no code of yours makes them.",
            ge=1,
            le=1024,
        ),
    ] = 2
    readers: Annotated[int, says("Threads or processes in each rank that read samples.", ge=1, le=256)] = 1
    reader_kind: Annotated[
        ReaderKind, says("Read in threads, or in processes of their own where decoding is Python's own work.")
    ] = "threads"
    augment: Annotated[
        list[str],
        says(
            'What changes the training samples, in order: "flip", "crop", or package.module:function, called with '
            "(sample, generator)."
        ),
    ] = msgspec.field(default_factory=list)
    crop_padding: Annotated[int, says('Pixels of zeros around an image that "crop" cuts from.', ge=1, le=4096)] = 4

    def __post_init__(self) -> None:
        if self.stratify is not None:
            if self.stratify != "targets" and ":" not in self.stratify:
                raise ValueError(
                    f'stratify is {self.stratify!r}: it takes "targets" or a function, as package.module:function'
                )
            if not self.shuffle or self.shuffle_window is not None:
                raise ValueError(
                    "stratify draws an order of its own over all samples: leave out shuffle and shuffle_window"
                )
        for name in self.augment:
            if name not in ("flip", "crop") and ":" not in name:
                raise ValueError(
                    f'augment names {name!r}: it takes "flip", "crop" or a function, as package.module:function'
                )


class Sampling(Reading, frozen=True):
    """What data with a known number of samples has beside: which of its samples are trained on, and how often."""

    subset: Annotated[
        str | float | None,
        says(
            "Train on some of the samples: a share above 0 and below 1, drawn from run.seed, or "
            "package.module:function, which returns their numbers for data=the training data."
        ),
    ] = None
    weights: Annotated[
        str | None,
        says(
            "Draw each sample with replacement, in proportion to its weight: package.module:function returns one for "
            'each sample for data=the training data; "balanced" draws each class of the attribute "targets" as often.'
        ),
    ] = None
    draws: Annotated[
        Annotated[int, msgspec.Meta(ge=1)] | None,
        says("Draws of an epoch by weights. Default: as many as there are samples."),
    ] = None
    group_by_length: Annotated[
        str | None,
        says(
            "Put samples of like length into one step, so that little is padded: package.module:function returns the "
            "length of each sample for data=the training data."
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("subset", "weights", "group_by_length"):
            value = getattr(self, key)
            if isinstance(value, str) and ":" not in value and not (key == "weights" and value == "balanced"):
                field = "; a field that weighs losses is loss_weights" if hasattr(self, f"loss_{key}") else ""
                raise ValueError(f"{key} is {value!r}: it names a function, as package.module:function{field}")
        if isinstance(self.subset, float) and not 0 < self.subset < 1:
            raise ValueError(f"subset is {self.subset}: a share lies above 0 and below 1; leave it out to train on all")
        if self.draws is not None and self.weights is None:
            raise ValueError("draws says how often an epoch draws by weights, and there are none: leave it out")
        orders = [key for key in ("stratify", "weights", "group_by_length") if getattr(self, key) is not None]
        if len(orders) > 1:
            raise ValueError(f"{orders[0]} and {orders[1]} each draw an order of their own: leave one of them out")
        if orders and (not self.shuffle or self.shuffle_window is not None):
            raise ValueError(f"{orders[0]} draws an order of its own: leave out shuffle and shuffle_window")


Packing = Literal["concatenate", "pad", "documents"]
PACKING = (
    "Windows over the joined documents (concatenate), pieces of one document each (pad), or windows in which no token "
    "sees another document and positions restart (documents)."
)
TOKENIZER = "A tokenizer's JSON file, as the package `tokenizers` saves it; default: bytes of UTF-8."
END_TOKEN = "The token that ends each document; default: none, and byte 0 without a tokenizer."


class Records(Sampling, frozen=True, kw_only=True):
    """What every kind with fields has: which of them make a sample."""

    inputs: Annotated[
        str | list[str] | None, says("The field of the inputs; several become keyword arguments of the model.")
    ] = None
    targets: Annotated[str | list[str] | None, says("The field of the targets, or several.")] = None
    loss_weights: Annotated[str | None, says("The field that weighs each sample's loss.")] = None
    text: Annotated[str | None, says("The field of text to train a language model on, instead of the three above.")] = (
        None
    )
    tokenizer: Annotated[str | None, says(TOKENIZER)] = None
    end_token: Annotated[str | None, says(END_TOKEN)] = None
    packing: Annotated[Packing, says(PACKING)] = "concatenate"
    image_size: Annotated[Positive | None, says("Resize images to so many pixels each way; default: leave them.")] = (
        None
    )
    image_channels: Annotated[Literal[1, 3], says("Channels of decoded images: 1 for grey, 3 for colour.")] = 3
    bad_records: Annotated[
        Literal["stop", "skip"],
        says("A record that cannot be read stops the run, or is left out (with weight 0), named and counted."),
    ] = "stop"

    def __post_init__(self) -> None:
        super().__post_init__()
        fields = self.inputs is not None and self.targets is not None
        if fields == (self.text is not None):
            raise ValueError("name either inputs and targets, or text: a sample is made of fields or of tokens")
        if self.text is None and (self.tokenizer or self.end_token):
            raise ValueError("a tokenizer needs text: name the field that holds it")


class RecordFiles(Records, frozen=True, kw_only=True):
    """What every kind of files of records has."""

    files: Annotated[list[str], says("Paths, globs (** goes down folders) or URLs of the files.", min_length=1)]
    held_out_files: Annotated[list[str], says("Files to evaluate on.")] = msgspec.field(default_factory=list)
    cache_bytes: Annotated[int, says("Memory in each rank for neighbouring records that were read.", ge=1)] = 2**28
    remote_cache_bytes: Annotated[int, says("Disk for files fetched from URLs.", ge=1)] = 2**34
    remote_attempts: Annotated[int, says("How often a failed request is tried before the run stops.", ge=1, le=100)] = 8
    remote_options: Annotated[
        dict[str, Any], says("Keywords of fsspec's file system, such as an endpoint; keep secrets in the environment.")
    ] = msgspec.field(default_factory=dict)

    implemented_by: ClassVar[str] = "shoal.data.build_records:record_files"


class Parquet(RecordFiles, frozen=True, kw_only=True, tag_field="kind", tag="parquet"):
    """Parquet files; a field is a column, and row groups are read when one of their rows is needed (extra `data`)."""


class Arrow(RecordFiles, frozen=True, kw_only=True, tag_field="kind", tag="arrow"):
    """Arrow IPC files and streams, mapped into memory; a field is a column (extra `data`)."""


class JSONL(RecordFiles, frozen=True, kw_only=True, tag_field="kind", tag="jsonl"):
    """Files with a JSON object in each line; a field is a key of it."""


class WebDataset(RecordFiles, frozen=True, kw_only=True, tag_field="kind", tag="webdataset"):
    """Tar files in WebDataset's form: neighbours that share a name are a sample, a field is a file's extension."""


class ImageFolders(Sampling, frozen=True, kw_only=True, tag_field="kind", tag="images"):
    """A folder for each class with its images (extra `data`); samples are (image, number of the class)."""

    folder: Annotated[str, says("The folder that holds the classes' folders.")]
    held_out_folder: Annotated[str | None, says("The same for the images to evaluate on.")] = None
    image_size: Annotated[Positive | None, says("Resize images to so many pixels each way; default: leave them.")] = (
        None
    )
    image_channels: Annotated[Literal[1, 3], says("Channels of decoded images: 1 for grey, 3 for colour.")] = 3
    bad_records: Annotated[
        Literal["stop", "skip"], says("An image that cannot be read stops the run, or is left out, named and counted.")
    ] = "stop"

    implemented_by: ClassVar[str] = "shoal.data.build_records:image_folders"


class HuggingFace(Records, frozen=True, kw_only=True, tag_field="kind", tag="datasets"):
    """A data set that Hugging Face's `datasets` saved to disk (extra `data`); nothing is fetched from the network."""

    folder: Annotated[str, says("The folder that `save_to_disk` wrote.")]
    split: Annotated[str | None, says("The split to train on, where the folder holds several.")] = None
    held_out_split: Annotated[str | None, says("The split to evaluate on.")] = None

    implemented_by: ClassVar[str] = "shoal.data.build_records:hugging_face"


class Stream(Reading, frozen=True, kw_only=True, tag_field="kind", tag="stream"):
    """JSON lines without end: a file that grows, a socket, or a Kafka topic (extra `kafka`). Each sample is taken once,
    in the order of arrival."""

    path: Annotated[
        str, says("The file that grows; with a socket or a topic, where lines are kept for a run that resumes.")
    ]
    socket: Annotated[
        Annotated[str, msgspec.Meta(pattern=r".+:\d+")] | None,
        says("host:port of a sender of lines, which is told how many have arrived."),
    ] = None
    kafka: Annotated[
        Annotated[str, msgspec.Meta(pattern=r"^[^,\s]+:\d+(,[^,\s]+:\d+)*$")] | None,
        says("host:port of Kafka brokers, several with commas, with `topic`."),
    ] = None
    topic: Annotated[str | None, says("The topic, whose messages are JSON; read from its beginning.")] = None
    kafka_options: Annotated[
        dict[str, str], says("librdkafka's properties; $NAME in one is a variable of the environment.")
    ] = msgspec.field(default_factory=dict)
    inputs: Annotated[str | list[str], says("The field of the inputs; several become keyword arguments.")]
    targets: Annotated[str | list[str], says("The field of the targets, or several.")]
    loss_weights: Annotated[str | None, says("The field that weighs each sample's loss.")] = None
    patience_s: Annotated[float, says("Longest wait for a new line, after which the run stops.", gt=0)] = 600.0

    bad_records: Annotated[
        Literal["stop", "skip"], says("A line that cannot be read stops the run, or is left out, named and counted.")
    ] = "stop"

    implemented_by: ClassVar[str] = "shoal.data.stream:build_stream"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.augment or self.shuffle_window is not None:
            raise ValueError("a stream is taken as it comes: leave out augment and shuffle_window")
        if (self.kafka is None) != (self.topic is None):
            raise ValueError("kafka names brokers and topic what they hold: give both, or none")
        if self.kafka is not None and self.socket is not None:
            raise ValueError("socket and kafka: a stream comes from one of them")
        if self.kafka_options and self.kafka is None:
            raise ValueError("kafka_options without kafka: name the brokers, or leave them out")


RecordData = Parquet | Arrow | JSONL | WebDataset | ImageFolders | HuggingFace
