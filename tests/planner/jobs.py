"""Small workloads, clusters and plans that the tests of this room share."""

from __future__ import annotations

from hypothesis import strategies as st

from shoal.cost.plan import Plan
from shoal.cost.transformer import Transformer, llama
from shoal.planner.predict.predictor import Predictor, Workload
from shoal.planner.predict.stack import MODERN, Stack
from shoal.planner.predict.workload import Constants
from shoal.topology.cluster import Cluster
from shoal.topology.cluster_file import known_cluster
from shoal.topology.layout import Layout

MODEL = llama(8, 1024, 16, kv_heads=8, feed_forward=4096, vocabulary=32000)
LARGE = llama(80, 8192, 64, kv_heads=8, feed_forward=28672, vocabulary=128256)
MIXTURE = Transformer(
    layers=8, hidden=1024, heads=16, kv_heads=8, head_size=64, feed_forward=2048, vocabulary=32000,
    gated=True, tied=False, experts=16, experts_per_token=2,
)  # fmt: skip
CLUSTER = known_cluster("dgx-h100", 4)


def predictor(
    model: Transformer = MODEL,
    cluster: Cluster = CLUSTER,
    *,
    samples: int = 64,
    sequence: int = 2048,
    stack: Stack = MODERN,
    constants: Constants | None = None,
) -> Predictor:
    """A predictor of a small job."""
    workload = Workload(model=model, global_samples=samples, sequence=sequence)
    return Predictor(workload, cluster, stack=stack, constants=constants)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of `MODEL` for 64 samples on 32 devices."""
    tensor = draw(st.sampled_from([1, 2, 4, 8]))
    pipeline = draw(st.sampled_from([1, 2, 4]))
    context = draw(st.sampled_from([size for size in (1, 2) if tensor * pipeline * size <= 32]))
    ranks = 32 // (tensor * pipeline * context)
    zero = draw(st.sampled_from([0, 1, 2, 3])) if ranks > 1 else 0
    micro = draw(st.sampled_from([size for size in (1, 2, 4) if 64 // ranks % size == 0]))
    return Plan(
        layout=Layout(
            replicate=1 if zero else ranks,
            shard=ranks if zero else 1,
            pipeline=pipeline,
            context=context,
            tensor=tensor,
        ),
        microbatch=micro,
        microbatches=64 // ranks // micro,
        schedule=draw(st.sampled_from(["1F1B", "GPipe", "ZB-H1"])) if pipeline > 1 else "1F1B",
        zero=zero,
        recompute=draw(st.sampled_from(["none", "full"])),
        sequence_parallel=tensor > 1 and draw(st.booleans()),
    )
