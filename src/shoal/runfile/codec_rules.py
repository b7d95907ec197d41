"""The rules between `[codec]`, `[shard_codec]`, `pipeline.codec` and the other tables. Imports no torch."""

from __future__ import annotations

from shoal.runfile import facts
from shoal.runfile.facts import Fact
from shoal.runfile.rule import Rule, against, axes, in_order, only
from shoal.runfile.run_file import RunFile

_DECODED_APART = "copies of a parameter along {axis} would decode to different bits"


def _coded(run_file: RunFile) -> str | None:
    """`shoal train` checks a run file of clients once more, without them: there `[codec]` is of their uploads."""
    of_uploads = run_file.federated is not None
    return facts.SENDS_MOMENTUM(run_file) or (None if of_uploads else facts.CODEC(run_file))


def _shards_alone(run_file: RunFile) -> str | None:
    layout, processes = run_file.layout, run_file.stated_processes
    alone = layout.shard > 1 and layout.context == 1 and processes == layout.shard * layout.pipeline
    return f"layout.shard = {layout.shard} and one replica" if alone else None


def _keeps_residuals(run_file: RunFile) -> bool:
    return run_file.codec.feedback or run_file.optimizer.sends_momentum


def _float16_repair(run_file: RunFile) -> str:
    return "use bfloat16" if run_file.optimizer.sends_momentum else "use bfloat16, or set codec.feedback = false"


_MOMENTA = against(
    facts.SENDS_MOMENTUM,
    Rule(facts.CODEC, "the optimizer has a codec of its own", "leave [codec] out"),
    Rule(facts.CLIP_NORM, "it would clip momenta", "leave optimizer.clip_norm out"),
    Rule(
        facts.NOT_LOCKSTEP, "its momentum is summed in every step", 'use sync.kind = "allreduce", or another optimizer'
    ),
    Rule(facts.PRIORITY, "its momenta are summed bucket by bucket", "leave the schedule out"),
    Rule(facts.CANONICAL, "what ranks send depends on how many there are", "leave one of the two out"),
)

# A codec works on whole buckets, in which ranks of one replica may hold copies of a parameter beside different others;
# copies decode to the same bits only where there are none. Residuals count what was not sent of the gradient itself, so
# its unit may not change from step to step.
_CODECS = against(
    Fact("[codec], or an optimizer that sends its momentum", _coded),
    *axes("tensor expert", _DECODED_APART, "leave one of them out"),
    Rule(
        facts.kind("sync", lambda sync: not sync.takes_codec, "that takes no codec"),
        "it codes gradients, or outer gradients, that replicas sum or push",
        "leave one of the two out",
    ),
    Rule(
        facts.WORKERS.where(
            lambda run_file: run_file.codec.of_all_ranks, "sync.kind of workers, where all ranks encode"
        ),
        "its ranks choose or compute together what they send, and workers push alone",
        "use blockwise or top_k",
    ),
    *only(
        facts.kinds("codec", "dgc"),
        Rule(facts.NOT_SGD, "it would take velocities for gradients", 'use optimizer.kind = "sgd", or another codec'),
        Rule(facts.MOMENTUM, "the codec has the momentum", "set optimizer.momentum = 0"),
        Rule(facts.CLIP_NORM, "it would clip sums of velocities", "set codec.clip_norm instead"),
        Rule(
            facts.NOT_LOCKSTEP,
            "outer gradients have a momentum of their own",
            'use sync.kind = "allreduce", or another codec',
        ),
    ),
    Rule(
        Fact("layout.shard > 1 and one replica", _shards_alone),
        "it codes what replicas send each other, and there is one",
        "use [shard_codec], or more replicas",
    ),
    *only(
        facts.kinds("codec", "auto"),
        Rule(facts.NOT_LOCKSTEP, "it chooses for sums of every step", "name a codec"),
        Rule(facts.PRIORITY, "it looks at the link between two steps, when that is busy", "name a codec"),
        Rule(
            facts.key("run.device", lambda device: device not in ("auto", "cpu"), 'other than "cpu"'),
            "it measures processors and their links so far",
            "name a codec",
        ),
    ),
    Rule(
        facts.PIPEDREAM,
        "its stages update after each microbatch, and count residuals by step",
        "choose another schedule",
    ),
    Rule(facts.BUCKET_SEARCH, "residuals lie as the buckets do, and stay", "leave gradients.bucket out"),
    Rule(
        facts.FLOAT16.where(_keeps_residuals, f"{facts.FLOAT16.name}, where residuals are kept"),
        "residuals are in units of the loss scale, which changes",
        _float16_repair,
    ),
    Rule(facts.NOISE, "the noise needs the gradient itself, and a codec changes it", "measure it without a codec"),
)

codec_refusal = in_order(_MOMENTA, _CODECS)


def _shard_codecs(run_file: RunFile) -> str | None:
    chosen = ((name, getattr(run_file.shard_codec, name)) for name in ("weights", "gradients"))
    return " and ".join(f'shard_codec.{name} = "{value}"' for name, value in chosen if value != "none") or None


shard_codec_refusal = in_order(
    against(
        Fact("[shard_codec]", _shard_codecs),
        Rule(
            facts.equal("layout.shard", 1), "no rank divides the model with another", "set layout.shard, or use [codec]"
        ),
        *axes("tensor expert", _DECODED_APART, "leave one of them out"),
    ),
    against(
        facts.other_than("shard_codec.weights", "none"),
        Rule(
            facts.equal("memory.zero", 1, 2),
            "ranks update the parameters that they compute with, which have to stay exact",
            "set memory.zero = 3, or leave weights out",
        ),
    ),
    against(
        facts.other_than("shard_codec.gradients", "none"),
        Rule(facts.NOISE, "the noise needs the gradient itself", "measure it without a codec"),
    ),
)

pipeline_codec_refusal = against(
    facts.other_than("pipeline.codec", "none"),
    Rule(
        facts.equal("layout.pipeline", 1).where(lambda run_file: not run_file.layout.auto),
        "no activation leaves a rank",
        "set layout.pipeline, or use [codec] for gradients",
    ),
)
