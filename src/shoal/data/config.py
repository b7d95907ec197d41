"""The tables `[data]` and `[batch]` of the run file. Imports neither torch nor numpy: a bad key is refused early."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from shoal.config.table import Table, says

Denominator = Literal["auto", "samples", "tokens", "weights"]
Packing = Literal["concatenate", "pad"]
TokenType = Literal["uint8", "uint16", "uint32"]


class Reading(Table, frozen=True):
    """What every kind of data has: the order of its samples, and how far ahead they are read."""

    shuffle: Annotated[bool, says("Draw a new order of the samples in each epoch.")] = True
    prefetch_steps: Annotated[int, says("Steps that are read ahead of the one that trains.", ge=1, le=1024)] = 2
    readers: Annotated[int, says("Threads in each rank that read samples.", ge=1, le=256)] = 1


class StdlibText(Reading, frozen=True, kw_only=True, tag_field="kind", tag="stdlib"):
    """The source of this interpreter's standard library as bytes: a corpus that is already on the machine."""

    held_out_fraction: Annotated[float, says("Share of the files kept for evaluation.", gt=0, lt=1)] = 0.05
    packing: Annotated[
        Packing, says("Windows over the joined files (concatenate), or pieces of one file each (pad).")
    ] = "concatenate"


class TextFiles(Reading, frozen=True, kw_only=True, tag_field="kind", tag="text"):
    """The user's own text files, as bytes."""

    files: Annotated[list[str], says("Paths or globs (** goes down folders) of the files.", min_length=1)]
    held_out_fraction: Annotated[float, says("Share of the files kept for evaluation; 0: none.", ge=0, lt=1)] = 0.05
    packing: Annotated[
        Packing, says("Windows over the joined files (concatenate), or pieces of one file each (pad).")
    ] = "concatenate"


class Tokens(Reading, frozen=True, kw_only=True, tag_field="kind", tag="tokens"):
    """Files of token ids without a header, little-endian, mapped into memory."""

    path: Annotated[str, says("The token file to train on.")]
    held_out: Annotated[str | None, says("The token file to evaluate on.")] = None
    dtype: Annotated[TokenType | None, says("Type of one id; default: the smallest that holds the vocabulary.")] = None


class ArrayFiles(Reading, frozen=True, kw_only=True, tag_field="kind", tag="arrays"):
    """Arrays in .npy files, mapped into memory; the first dimension counts samples."""

    inputs: Annotated[str, says("The .npy file of the inputs, [samples, ...].")]
    targets: Annotated[str, says("The .npy file of the targets, [samples, ...].")]
    held_out_inputs: Annotated[str | None, says("The .npy file of the inputs to evaluate on.")] = None
    held_out_targets: Annotated[str | None, says("The .npy file of the targets to evaluate on.")] = None

    def __post_init__(self) -> None:
        if (self.held_out_inputs is None) != (self.held_out_targets is None):
            raise ValueError("only one of held_out_inputs and held_out_targets is given: give both or neither")


class Digits(Reading, frozen=True, kw_only=True, tag_field="kind", tag="digits"):
    """The 1,797 handwritten digits that scikit-learn carries (extra `vision`); a fixed fifth is held out."""


class PythonData(Reading, frozen=True, kw_only=True, tag_field="kind", tag="python"):
    """The user's own data sets."""

    build: Annotated[
        str, says("package.module:function that returns a data set, or a pair (train, held out).", pattern=".+:.+")
    ]
    arguments: Annotated[dict[str, Any], says("Keywords the function is called with.")] = msgspec.field(
        default_factory=dict
    )


BuiltInData = StdlibText | TextFiles | Tokens | ArrayFiles | Digits
DataConfig = BuiltInData | PythonData


class BatchConfig(Table, frozen=True):
    """How many samples a step takes, and what its loss is averaged over."""

    global_samples: Annotated[int, says("Samples in one optimizer step, over all ranks.", ge=1, le=2**40)]
    micro_samples: Annotated[
        Annotated[int, msgspec.Meta(ge=1)] | None,
        says("Samples of one forward and backward on one replica; default: all of its share."),
    ] = None
    sequence: Annotated[int, says("Tokens in one sample, for token data.", ge=1, le=2**30)] = 256
    denominator: Annotated[
        Denominator,
        says(
            "What the loss is averaged over: samples, tokens, or the data set's weights. auto: weights if it gives "
            "any, else tokens for integer sequences, else samples."
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        if self.micro_samples is not None and self.micro_samples > self.global_samples:
            raise ValueError(
                f"micro_samples = {self.micro_samples} is more than global_samples = {self.global_samples}: a "
                "microbatch is a part of the step, lower it or leave it out"
            )
