"""The run file's root: every table of a run, and what several of them say together.

Reading it imports no torch, so that a wrong key is refused at once and the launcher starts at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shoal.checkpoint.config import CheckpointConfig
from shoal.codec.config import CodecConfig, NoCodec, ShardCodecConfig
from shoal.comm.config import WireConfig
from shoal.config.check import Table, says
from shoal.data.config import BatchConfig, DataConfig
from shoal.engine.config import (
    CrossEntropy,
    DistillationConfig,
    Float32,
    HooksConfig,
    LossConfig,
    PrecisionConfig,
    StopWhen,
)
from shoal.federated.config import (
    DeviceConfig,
    FederatedConfig,
    Iid,
    PartitionConfig,
    PrivacyConfig,
    SecureAggregationConfig,
)
from shoal.gradients.config import GradientsConfig
from shoal.memory.config import MemoryConfig
from shoal.models.config import AdapterConfig, ModelConfig, QuantisationConfig
from shoal.models.huggingface.config import ForeignKeys
from shoal.observe.config import ObserveConfig
from shoal.optim.config import AdamW, OptimizerConfig, Schedule
from shoal.parallel.config import ContextConfig, PipelineConfig
from shoal.resilience.config import ElasticConfig
from shoal.sparsity.config import FreezeConfig, SparsityConfig
from shoal.sync.config import AllReduceConfig, SyncConfig
from shoal.topology.config import LayoutConfig


class RunConfig(Table, frozen=True):
    """What the run is called, how long it is, and where it runs."""

    name: Annotated[
        str,
        says(
            "Name of the run, of letters, digits, `.`, `_` and `-`, the first a letter or a digit; "
            "its folder is `runs/<name>`.",
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
            max_length=128,
        ),
    ]
    steps: Annotated[int, says("Optimizer steps in the whole run.", ge=1, le=10**9)]
    seed: Annotated[int, says("Parameters, order of the data and dropout follow from it.", ge=0, le=2**63 - 1)] = 0
    processes: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None,
        says(
            "Ranks; default: the layout's product, else one per GPU, else two. Of an elastic run: ranks that start, of "
            "`elastic.min` to `elastic.max` replicas; default: of `max`."
        ),
    ] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda", "xpu", "mps"],
        says(
            "Where the ranks compute; auto: GPUs of NVIDIA or AMD if there are any. xpu (Intel) and mps (Apple) take "
            "one rank, and are untested."
        ),
    ] = "auto"
    share_gpus: Annotated[
        bool,
        says(
            'Several ranks may compute on one GPU, and talk over Gloo (wire.transport = "gloo"): a test of a layout '
            "where GPUs are too few, and slow."
        ),
    ] = False
    directory: Annotated[
        Annotated[str, msgspec.Meta(pattern=r"^[^~]")] | None,
        says("The run's folder, which does not begin with `~`; default `runs/<name>`."),
    ] = None
    start_timeout_s: Annotated[
        float,
        says(
            "Longest wait for the other ranks before the first step, while they load data and build; and for the "
            "imports of each rank, or in an elastic run until it is ready to join.",
            gt=0,
            le=86400,
        ),
    ] = 600.0
    compile: Annotated[
        bool | Literal["model", "blocks"],
        says(
            'What `torch.compile` compiles: true or "model", the model and the loss together; "blocks", each block by '
            "itself, which starts faster and goes with ZeRO-3."
        ),
    ] = False
    compile_mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
        says(
            "The `mode` of `torch.compile`. reduce-overhead launches programs as CUDA graphs, with one microbatch a "
            "step; max-autotune does so too, and times several kernels for each product, which takes minutes; "
            "max-autotune-no-cudagraphs does that alone."
        ),
    ] = "default"
    compile_dynamic: Annotated[
        bool | None,
        says(
            "The `dynamic` of `torch.compile`. true: programs for inputs of all sizes; false: one for each size; "
            "default: one for the first size, and one for all when another comes."
        ),
    ] = None
    warm_start: Annotated[str | None, says("A run directory or checkpoint whose weights alone start this run.")] = None
    warm_start_data: Annotated[
        bool, says("And begin with the samples that came next in the run of `warm_start`, not with the first ones.")
    ] = False
    stop_when: Annotated[
        StopWhen | None,
        says(
            "End the run before `steps` when evaluations have stopped improving: their number is "
            "`observe.evaluate_every_steps`. Default: none."
        ),
    ] = None
    nonfinite_limit: Annotated[
        int, says("Non-finite steps in a row, each skipped, after which the run stops with exit 4.", ge=1)
    ] = 5
    preemption_file: Annotated[
        str | None,
        says(
            "File whose appearance says that this host is about to be taken away: the run saves, and stops with 75; "
            "of an elastic run, the replicas of this host hand over and leave."
        ),
    ] = None
    preemption_url: Annotated[
        str | None, says("URL of the cloud's metadata that says so; asked every 2 s. 404, FALSE and NONE mean nothing.")
    ] = None

    @property
    def compile_said(self) -> str:
        """What the run file says about compiling, for sentences."""
        return f"run.compile = {json.dumps(self.compile)}"

    @property
    def compile_options(self) -> dict[str, Any]:
        """What `torch.compile` is called with."""
        mode = None if self.compile_mode == "default" else self.compile_mode
        return {"mode": mode, "dynamic": self.compile_dynamic}

    @property
    def graphs_programs(self) -> bool:
        """Whether compiled programs are launched as CUDA graphs, on devices that have them."""
        return self.compile_mode in ("reduce-overhead", "max-autotune")

    def __post_init__(self) -> None:
        for key in ("compile_mode", "compile_dynamic") if self.compile is False else ():
            if (said := getattr(self, key)) not in ("default", None):
                raise ValueError(f"{key} = {json.dumps(said)} without compile: set run.compile, or leave it out")
        if self.warm_start_data and self.warm_start is None:
            raise ValueError("warm_start_data = true without warm_start: name the run whose samples go on")
        if self.preemption_url is not None and not self.preemption_url.startswith(("http://", "https://")):
            raise ValueError(f"preemption_url = {self.preemption_url!r} is no URL of HTTP: give http://HOST/PATH")


class RunFile(Table, frozen=True):
    """One run, whole."""

    run: RunConfig
    model: Annotated[ModelConfig, says("The model.")]
    data: Annotated[DataConfig, says("The data.")]
    batch: BatchConfig
    loss: LossConfig = CrossEntropy()
    distillation: Annotated[
        DistillationConfig | None, says("A teacher beside the targets; without this table, none.")
    ] = None
    optimizer: OptimizerConfig = AdamW()
    schedule: Schedule = Schedule()
    adapter: Annotated[
        AdapterConfig | None, says("Small trained parameters in a frozen model; without this table, none.")
    ] = None
    quantisation: Annotated[
        QuantisationConfig | None, says("Forwards with rounded weights; without this table, none.")
    ] = None
    freeze: Annotated[FreezeConfig | None, says("Layers that are not trained; without this table, all are.")] = None
    sparsity: Annotated[SparsityConfig | None, says("Weights that are masked; without this table, none is.")] = None
    precision: PrecisionConfig = Float32()
    layout: LayoutConfig = LayoutConfig()
    pipeline: PipelineConfig = PipelineConfig()
    context: ContextConfig = ContextConfig()
    wire: WireConfig = WireConfig()
    gradients: GradientsConfig = GradientsConfig()
    codec: CodecConfig = NoCodec()
    shard_codec: ShardCodecConfig = ShardCodecConfig()
    sync: SyncConfig = AllReduceConfig()
    elastic: Annotated[
        ElasticConfig | None, says("Replicas come and go while the run trains; without this table, none does.")
    ] = None
    federated: Annotated[
        FederatedConfig | None,
        says("Clients keep their data and send updates: `shoal federate`; other verbs pass it over."),
    ] = None
    partition: PartitionConfig = Iid()
    devices: DeviceConfig = DeviceConfig()
    secure_aggregation: Annotated[
        SecureAggregationConfig | None,
        says("The server learns sums of updates alone; without this table, each of them."),
    ] = None
    privacy: Annotated[PrivacyConfig | None, says("Differential privacy; without this table, none.")] = None
    memory: MemoryConfig = MemoryConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()
    hooks: HooksConfig = HooksConfig()

    @property
    def stated_processes(self) -> int | None:
        """Ranks of the run, as `run.processes` or the axes of the layout say; None where neither does."""
        return self.run.processes or self.layout.default_processes

    @property
    def batch_shares(self) -> int:
        """Into how many shares (replicate x shard) the samples of a step are split; 1 where no processes are stated."""
        ranks_a_share = self.layout.replica_size // self.layout.shard
        return max(1, (self.stated_processes or 1) // ranks_a_share)


def run_directory(run_file: RunFile) -> Path:
    """The folder of the run, relative to where `shoal` was called unless given absolute."""
    return Path(run_file.run.directory or f"runs/{run_file.run.name}")


def statistics_group(model: ModelConfig) -> int:
    """Consecutive samples that belong together: by batch statistics, or by a user's loss; 1 where each is alone."""
    return declared_group(model) or 1


def declared_group(model: ModelConfig) -> int | None:
    """The same as the table states it; None where it states nothing."""
    if isinstance(model, ForeignKeys) or getattr(model, "norm", None) == "batch":
        return getattr(model, "group_samples", None)
    return None


def synchronises_norms(model: ModelConfig) -> bool:
    """Whether batch norms take their statistics over a microbatch of all ranks."""
    return isinstance(model, ForeignKeys) and model.batch_norm == "synchronised"


def default_micro_samples(run_file: RunFile) -> int | None:
    """`batch.micro_samples`, a logical shard of canonical order, or one group of a user's model that states groups.

    None: nothing asks for a size.
    """
    model, sync = run_file.model, run_file.sync
    if isinstance(sync, AllReduceConfig) and sync.in_canonical_order:
        return run_file.batch.global_samples // sync.logical_shards
    one_group = model.group_samples if isinstance(model, ForeignKeys) and model.batch_norm == "refused" else None
    return run_file.batch.micro_samples or one_group


def with_processes(run_file: RunFile, processes: int) -> RunFile:
    """The same run on a known number of ranks."""
    return msgspec.structs.replace(run_file, run=msgspec.structs.replace(run_file.run, processes=processes))
