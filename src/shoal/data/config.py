"""The tables `[data]` and `[batch]` of the run file. Imports neither torch nor numpy: a bad key is refused early."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from shoal.config.check import Positive, Table, says
from shoal.data.record_config import (
    END_TOKEN,
    PACKING,
    TOKENIZER,
    Packing,
    Reading,
    RecordData,
    Records,
    Sampling,
    Stream,
)

Denominator = Literal["auto", "samples", "tokens", "weights"]
EpochEnd = Literal["straddle", "short", "drop"]
TokenType = Literal["uint8", "uint16", "uint32"]


class StdlibText(Sampling, frozen=True, kw_only=True, tag_field="kind", tag="stdlib"):
    """The source of this interpreter's standard library as bytes: a corpus that is already on the machine."""

    held_out_fraction: Annotated[float, says("Share of the files kept for evaluation.", gt=0, lt=1)] = 0.05
    packing: Annotated[Packing, says(PACKING)] = "concatenate"


class TextFiles(Sampling, frozen=True, kw_only=True, tag_field="kind", tag="text"):
    """The user's own text files, as bytes or as a tokenizer's tokens."""

    files: Annotated[list[str], says("Paths or globs (** goes down folders) of the files.", min_length=1)]
    held_out_fraction: Annotated[float, says("Share of the files kept for evaluation; 0: none.", ge=0, lt=1)] = 0.05
    packing: Annotated[Packing, says(PACKING)] = "concatenate"
    tokenizer: Annotated[str | None, says(TOKENIZER)] = None
    end_token: Annotated[str | None, says(END_TOKEN)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end_token is not None and self.tokenizer is None:
            raise ValueError("end_token names a token of a tokenizer: give the tokenizer too")


class Tokens(Sampling, frozen=True, kw_only=True, tag_field="kind", tag="tokens"):
    """Files of token ids without a header, little-endian, mapped into memory."""

    path: Annotated[str, says("The token file to train on.")]
    held_out: Annotated[str | None, says("The token file to evaluate on.")] = None
    dtype: Annotated[TokenType | None, says("Type of one id; default: the smallest that holds the vocabulary.")] = None


class ArrayFiles(Sampling, frozen=True, kw_only=True, tag_field="kind", tag="arrays"):
    """Arrays in .npy files, mapped into memory; the first dimension counts samples."""

    inputs: Annotated[str, says("The .npy file of the inputs, [samples, ...].")]
    targets: Annotated[str, says("The .npy file of the targets, [samples, ...].")]
    held_out_inputs: Annotated[str | None, says("The .npy file of the inputs to evaluate on.")] = None
    held_out_targets: Annotated[str | None, says("The .npy file of the targets to evaluate on.")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.held_out_inputs is None) != (self.held_out_targets is None):
            raise ValueError("only one of held_out_inputs and held_out_targets is given: give both or neither")


class Digits(Sampling, frozen=True, kw_only=True, tag_field="kind", tag="digits"):
    """The 1,797 handwritten digits that scikit-learn carries (extra `vision`); a fixed fifth is held out."""


class PythonData(Sampling, frozen=True, kw_only=True, tag_field="kind", tag="python"):
    """The user's own data sets."""

    build: Annotated[
        str,
        says(
            "package.module:function that returns a data set or an iterable, or a pair (train, held out).",
            pattern=".+:.+",
        ),
    ]
    arguments: Annotated[dict[str, Any], says("Keywords the function is called with.")] = msgspec.field(
        default_factory=dict
    )


SourceData = StdlibText | TextFiles | Tokens | ArrayFiles | Digits | RecordData


class Mixture(Reading, frozen=True, kw_only=True, tag_field="kind", tag="mixture"):
    """Several sources in fixed proportions, each with its own table `[data.sources.NAME]`."""

    sources: Annotated[dict[str, SourceData], says("The sources by name, each a table of another kind.", min_length=1)]
    weights: Annotated[
        dict[str, float], says("Each source's share of the samples, over the sum of the weights; default: by its size.")
    ] = msgspec.field(default_factory=dict)
    window: Annotated[
        Positive, says("Samples in which the proportions are exact: positions 0 to window - 1, and so on.")
    ] = 1000

    implemented_by: ClassVar[str] = "shoal.data.build:mixture"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights and set(self.weights) != set(self.sources):
            raise ValueError(
                f"weights are given for {sorted(self.weights)}, and the sources are {sorted(self.sources)}: give one "
                "for each, or none"
            )
        if any(not 0 < weight < float("inf") for weight in self.weights.values()):
            raise ValueError(f"weights are {self.weights}: each must be above 0")
        tokenizers = {
            name: source.tokenizer
            for name, source in self.sources.items()
            if isinstance(source, TextFiles | Records) and (isinstance(source, TextFiles) or source.text is not None)
        }
        if len(set(tokenizers.values())) > 1:
            raise ValueError(
                f"the sources have the tokenizers {tokenizers}: a token id means one thing to the model, give all of "
                "them the same"
            )
        if self.stratify is not None:
            raise ValueError("a mixture has weights in place of stratify: make each class a source, or leave it out")


BuiltInData = SourceData | Mixture | Stream
DataConfig = BuiltInData | PythonData


ENDLESS = 1 << 62
"""A position that no run reaches."""


class BatchPhase(Table, frozen=True):
    """Steps of `samples` samples, until so many samples have been trained on."""

    samples: Annotated[Positive, says("Samples in one optimizer step, over all ranks.")]
    until: Annotated[Positive, says("Steps that begin before so many samples of the run are of this size.")]


class AdaptiveBatch(Table, frozen=True):
    """Steps begin with `first` samples and double, up to `batch.global_samples`, as the gradient's noise grows."""

    first: Annotated[Positive, says("Samples in the first steps, over all ranks.")]
    share: Annotated[
        float,
        says(
            "Steps double when this share of the gradient noise scale is twice their size or more; by the model of "
            "arXiv:1812.06162 it is also the share of samples that large steps waste.",
            gt=0,
            le=100,
        ),
    ] = 0.1
    readings: Annotated[Positive, says("Fewest readings of the noise before each decision.")] = 5


class BatchConfig(Table, frozen=True):
    """How many samples a step takes, and what its loss is averaged over."""

    global_samples: Annotated[int, says("Samples in one optimizer step, over all ranks.", ge=1, le=2**40)]
    schedule: Annotated[
        tuple[BatchPhase, ...],
        says(
            "Phases of smaller steps at the start of the run (AdaBatch, arXiv:1712.02029); all steps after them have "
            "`global_samples`."
        ),
    ] = ()
    adaptive: Annotated[
        AdaptiveBatch | None,
        says(
            "Small steps first, which double as the measured noise of the gradient grows; it wants "
            "`observe.noise_every_steps`. Default: none."
        ),
    ] = None
    micro_samples: Annotated[
        Annotated[int, msgspec.Meta(ge=1)] | None,
        says(
            "Samples of one forward and backward on one replica; default: all of its share. `memory.fit_microbatch` "
            "finds the largest that fits."
        ),
    ] = None
    division: Annotated[
        Literal["even", "by_speed"],
        says(
            "How the samples of a step are divided among replicas. by_speed: in proportion to the speed measured of "
            "each, at least one sample each; the samples of the step stay the same."
        ),
    ] = "even"
    sequence: Annotated[int, says("Tokens in one sample, for token data.", ge=1, le=2**30)] = 256
    epoch_end: Annotated[
        EpochEnd,
        says(
            "The samples at the end of an epoch that fill no step: the step goes on into the next epoch (straddle), "
            "it has these samples alone (short), or they are left out (drop)."
        ),
    ] = "straddle"
    denominator: Annotated[
        Denominator,
        says(
            "What the loss is averaged over: samples, tokens, or the data set's weights. auto: weights if it gives "
            "any, else tokens for integer sequences, else samples. samples and tokens pass the data set's weights over."
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        if self.micro_samples is not None and self.micro_samples > self.global_samples:
            raise ValueError(
                f"micro_samples = {self.micro_samples} is more than global_samples = {self.global_samples}: a "
                "microbatch is a part of the step, lower it or leave it out"
            )
        self._check_schedule()

    @property
    def smaller_sizes(self) -> tuple[int, ...]:
        """Samples of the steps that are smaller than the largest, by `schedule` or `adaptive`."""
        if self.adaptive is None:
            return tuple(phase.samples for phase in self.schedule)
        sizes = []
        size = self.adaptive.first
        while size < self.global_samples:
            sizes.append(size)
            size *= 2
        return tuple(sizes)

    def phases(self, samples: int | None = None) -> tuple[BatchPhase, ...]:
        """Those of `schedule`; under `adaptive` one without end, of steps of `samples`, or of the first size."""
        return self.schedule if self.adaptive is None else (BatchPhase(samples or self.adaptive.first, ENDLESS),)

    def samples_at(self, position: int) -> int:
        """Samples of the step that begins at `position`, which counts the samples before it; under `adaptive` those of
        the first steps. Pure.
        """
        return next((phase.samples for phase in self.phases() if position < phase.until), self.global_samples)

    def steps_to(self, position: int) -> int:
        """Steps until at least so many samples are trained on, without `adaptive`: then the noise decides."""
        steps = begins = 0
        for phase in (*self.schedule, BatchPhase(self.global_samples, max(1, position))):
            own = max(0, -(-(min(phase.until, position) - begins) // phase.samples))
            steps, begins = steps + own, begins + own * phase.samples
        return steps

    def samples_of(self, step: int) -> int:
        """Samples of step `step` (1 is the first), without `adaptive`."""
        before = begins = 0
        for phase in self.schedule:
            own = max(0, -(-(phase.until - begins) // phase.samples))
            if step <= before + own:
                return phase.samples
            before, begins = before + own, begins + own * phase.samples
        return self.global_samples

    def _check_adaptive(self, adaptive: AdaptiveBatch) -> None:
        if self.schedule:
            raise ValueError("schedule and adaptive: either the position or the noise decides how large steps are")
        if adaptive.first >= self.global_samples:
            raise ValueError(
                f"adaptive.first = {adaptive.first}, and global_samples = {self.global_samples} is the largest step: "
                "lower the one, or raise the other"
            )

    def _check_schedule(self) -> None:
        if self.adaptive is not None:
            self._check_adaptive(self.adaptive)
        ends = [phase.until for phase in self.schedule]
        if ends != sorted(set(ends)):
            raise ValueError(f"schedule has phases until {ends}: give them in ascending order, each once")
        for phase in self.schedule:
            if phase.samples > self.global_samples:
                raise ValueError(
                    f"schedule has a phase of {phase.samples} samples, and global_samples = {self.global_samples} is "
                    "the largest step: raise global_samples, or lower the phase"
                )
        if self.smaller_sizes and self.epoch_end != "straddle":
            raise ValueError(
                f'{"schedule" if self.schedule else "adaptive"} with epoch_end = "{self.epoch_end}": steps of several '
                "sizes go on into the next epoch; leave epoch_end out"
            )
