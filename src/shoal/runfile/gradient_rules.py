"""The rules between `[gradients]`, `[wire]` and the other tables. Imports no torch."""

from __future__ import annotations

import math

from shoal.runfile import facts
from shoal.runfile.rule import Rule, against, axes, in_order

# With `schedule = "priority"` parameters are updated one after the other while other gradients are on the wire, so
# whatever needs the whole gradient before any update is refused, and whatever has more than one group of ranks.
gradients_refusal = in_order(
    against(
        facts.BUCKET_SEARCH,
        Rule(facts.axis("shard"), "there optimizer state lies as its buckets do, and stays"),
        Rule(facts.PIPEDREAM, "its stages have no step in common to be timed"),
        Rule(facts.PRIORITY, "it has partitions (gradients.partition_bytes) and no buckets"),
        repair="leave gradients.bucket out",
    ),
    against(
        facts.PRIORITY,
        *axes(facts.ALL_AXES, "it is for replicas of one rank", "use layout.replicate"),
        Rule(
            facts.key("optimizer.clip_norm", lambda norm: norm is not None and math.isfinite(norm), "finite"),
            "the norm of the whole gradient is known only when updates are made",
            "set optimizer.clip_norm = inf",
        ),
        Rule(
            facts.kind("optimizer", lambda optimizer: optimizer.works_on == "matrices", "of matrices"),
            "it updates whole matrices in buckets, and here parameters come one by one",
            'use "order"',
        ),
        Rule(facts.FOLLOWS_UPDATES, "they follow whole updates", "leave them out"),
        Rule(facts.FLOAT16, "an overflow shows only when updates are made", "use bfloat16"),
        Rule(
            facts.NOISE,
            "the noise needs the norm of the step that it was measured in",
            "measure it under the schedule by order",
        ),
        Rule(
            facts.equal("wire.check_collectives", True),
            "it looks at one wait of a rank at a time, and here a second thread waits",
            "leave it out",
        ),
        Rule(facts.COMPILED, "a compiled model does not say which module it comes to", "leave run.compile out"),
        Rule(facts.CUDA, "a credit of bytes on the wire is kept between processors only so far"),
    ),
)

_OTHERS_SEND = "its ranks send tensors to each other, and Gloo sends those of the CPU alone"

wire_refusal = in_order(
    against(
        facts.equal("run.share_gpus", True),
        Rule(
            facts.other_than("wire.transport", "gloo"),
            "NCCL refuses two ranks on one GPU",
            'set wire.transport = "gloo"',
        ),
        *axes("pipeline context", _OTHERS_SEND, "set it to 1, or give each rank a GPU"),
    ),
    against(
        facts.other_than("wire.algorithm", "backend"),
        Rule(
            facts.key("wire.transport", lambda name: name not in ("auto", "gloo"), 'other than "gloo"'),
            "algorithms are for groups over Gloo",
            'set wire.transport = "gloo", or leave one of them out',
        ),
    ),
)
