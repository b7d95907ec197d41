"""What codecs cost and save in a step: bytes on the wire, seconds of coding, bytes of residuals.

With m numbers in b buckets over n ranks, w the payload of a bucket, E, D and p the seconds of an encoding, a decoding
and a pass over m numbers (`comm.exchanges.coded_sum` makes the sums):

    way          wire                                                 coding, with error feedback
    all-reduce   b all-reduces of each payload                        3 p + E + D
    gather       b gathers of n w                                     3 p + E + (D + 3 p) + n (D + 3 p) + 3 p
    two-shot     b all-to-alls and b gathers of n w(m / b n)          3 p + E + (D + 5 p) + (D + 3 p)
                                                                      + (E + D + 3 p) / n + D + 2 p

E and D are those that `shoal bench codec` measured on this machine, else the codec's passes over memory at its rate: a
lower bound. Where a group has several ranks on a node, they sum as they are, and their node codes each bucket once.

Coding is done by the device that computes, so that nothing hides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.codec.config import AutoConfig, BlockwiseConfig, CastConfig, CodecConfig, DGCConfig, NoCodec
from shoal.codec.costs import Matrices, Stated, is_stated, label, stated
from shoal.cost.alpha_beta import Group, Links
from shoal.cost.plan import Plan
from shoal.planner.predict.machine import Machine, replica_group, shard_group
from shoal.topology.calibration import CodecTime

FLOAT_BYTES = 4.0
RESIDUAL_BYTES, VELOCITY_BYTES = 8.0, 8.0
"""Of a number: the residual and the next one, float32; Deep Gradient Compression has two velocities beside them."""
MANY = 1 << 20
"""Numbers by which the payload of one is reckoned where nobody knows how many travel together."""


@dataclass(frozen=True, kw_only=True)
class GradientSum:
    """The sum of gradients over replicas, once: `sent_bytes` are those that a rank (of a node, the one that codes)
    sends, `residual_bytes` those that it keeps from step to step."""

    codec: CodecConfig
    wire_s: float
    coding_s: float = 0.0
    sent_bytes: float = 0.0
    residual_bytes: float = 0.0


def gradient_sum(
    plan: Plan, machine: Machine, codec: CodecConfig, *, numbers: float, matrices: Sequence[Matrices] = ()
) -> GradientSum:
    """The sum of the gradients of `numbers` parameters over shard x context, unless each microbatch did, and over
    replicas; `codec` codes what replicas send each other, `matrices` are those of the numbers that lie whole in it."""
    if not is_stated(codec):
        return _plain(plan, machine, numbers=numbers)
    own = _scattered_s(plan, machine, numbers)
    if plan.zero:
        numbers = numbers / plan.state_ranks
        matrices = [m._replace(copies=m.copies / plan.state_ranks) for m in matrices] if codec.codes_matrices else ()
    group, stride = _summing_group(plan, machine)
    if group.ranks == 1 or not numbers:
        return replace(_plain(plan, machine, numbers=numbers), codec=codec)
    levels = _levels(plan, machine, group, stride)
    buckets = max(1, -(-int(FLOAT_BYTES * numbers) // int(machine.stack.codecs.bucket_bytes)))
    if levels is None:
        one = _coded(codec, group, machine, numbers=numbers, matrices=matrices, buckets=buckets, world=plan.world_size)
        return replace(one, wire_s=own + one.wire_s)
    inside, between, local = levels
    one = _coded(codec, between, machine, numbers=numbers, matrices=matrices, buckets=buckets, world=plan.world_size)
    near_s = buckets * inside.all_reduce(FLOAT_BYTES * numbers / buckets)
    return replace(
        one,
        wire_s=own + near_s + one.wire_s,
        coding_s=one.coding_s / local,
        residual_bytes=one.residual_bytes / local,
    )


def chosen_codec(
    plan: Plan, machine: Machine, *, numbers: float, matrices: Sequence[Matrices], beside_s: float
) -> CodecConfig:
    """The codec of sums of gradients. `kind = "auto"` measures links in the run; here it is what costs least by these
    prices, with `beside_s` seconds of backward beside the wire, and none inside a node."""
    config = machine.stack.codecs.gradients
    if not isinstance(config, AutoConfig):
        return config
    if not _summing_group(plan, machine)[0].spans_nodes:
        return NoCodec()
    candidates = [NoCodec(), *config.codecs.values()]

    def cost_s(one: CodecConfig) -> float:
        found = gradient_sum(plan, machine, one, numbers=numbers, matrices=matrices)
        return found.coding_s + max(0.0, found.wire_s - beside_s)

    return min(candidates, key=cost_s)


def residual_bytes(plan: Plan, machine: Machine, *, numbers: float, matrices: Sequence[Matrices]) -> float:
    """What error feedback keeps; of `kind = "auto"`, that of what it would choose if no backward hid the wire."""
    codec = chosen_codec(plan, machine, numbers=numbers, matrices=matrices, beside_s=0.0)
    return gradient_sum(plan, machine, codec, numbers=numbers, matrices=matrices).residual_bytes


def pieces_coding_s(plan: Plan, machine: Machine, *, numbers: float) -> float:
    """One microbatch under ZeRO-2 and -3, one step under ZeRO-1: a rank codes its share of gathered weights, and the
    gradients of all others' shares, and decodes as many."""
    pieces, ranks = machine.stack.codecs.pieces, plan.state_ranks
    if not plan.zero or ranks == 1:
        return 0.0
    seconds = 0.0
    gradients, weights = pieces.codec("gradients"), pieces.codec("weights")
    if gradients is not None:
        encode_s, decode_s, pass_s = _rates(gradients, machine, numbers=int(numbers), world=plan.world_size)
        seconds += numbers * (encode_s + decode_s + 3 * pass_s) * (ranks - 1) / ranks
    if weights is not None and plan.zero == 3:
        encode_s, decode_s, _ = _rates(weights, machine, numbers=int(numbers), world=plan.world_size)
        seconds += 2 * numbers * (encode_s / ranks + decode_s)
    return seconds


def boundary_coding_s(machine: Machine, *, numbers: float, world: int) -> float:
    """One activation, or its gradient: encoded by one stage or decoded by the next, the mean of both."""
    config = machine.stack.codecs.stages
    if config is None:
        return 0.0
    encode_s, decode_s, _ = _rates(config, machine, numbers=int(numbers), world=world)
    return numbers * (encode_s + decode_s) / 2


def number_bytes(config: CastConfig | BlockwiseConfig | None, plain_bytes: float) -> float:
    """On the wire, of one of many numbers: `plain_bytes` without a codec."""
    return plain_bytes if config is None else stated(config, MANY).payloads[0] / MANY


def _plain(plan: Plan, machine: Machine, *, numbers: float) -> GradientSum:
    group, replicas = shard_group(plan, machine), replica_group(plan, machine)
    size = numbers * machine.stack.state.wire
    if plan.zero == 0:
        ranks = group.ranks * replicas.ranks
        seconds = group.all_reduce(size) + replicas.all_reduce(size)
        return GradientSum(codec=NoCodec(), wire_s=seconds, sent_bytes=2 * (ranks - 1) / ranks * size)
    seconds = _scattered_s(plan, machine, numbers) + replicas.all_reduce(size / group.ranks)
    sent = 2 * (replicas.ranks - 1) / replicas.ranks * size / group.ranks
    return GradientSum(codec=NoCodec(), wire_s=seconds, sent_bytes=sent)


def _scattered_s(plan: Plan, machine: Machine, numbers: float) -> float:
    """ZeRO-1 divides the sum once a step; what it sends may be coded as ZeRO's pieces are."""
    group, config = shard_group(plan, machine), machine.stack.codecs.pieces.codec("gradients")
    if plan.zero != 1:
        return 0.0
    if config is None:
        return group.all_gather(numbers * machine.stack.state.wire)
    return group.all_to_all(numbers * number_bytes(config, 0.0))


def _summing_group(plan: Plan, machine: Machine) -> tuple[Links, int]:
    """The ranks whose buckets are summed coded, and how far apart they lie: replicas, and without ZeRO also the context
    ranks that see other parts of the same samples."""
    layout = plan.layout
    if plan.zero or layout.context == 1:
        return replica_group(plan, machine), layout.pipeline * plan.state_ranks * layout.tensor
    stride = layout.tensor * (layout.pipeline if layout.replicate > 1 else 1)
    return machine.group(layout.replicate * layout.context, stride=stride, world=plan.world_size), stride


def _levels(plan: Plan, machine: Machine, group: Links, stride: int) -> tuple[Links, Links, int] | None:
    """(ranks of a node, one rank of each node, ranks of a node); None unless both levels have several."""
    if not isinstance(group, Group) or not group.spans_nodes or group.local == 1:
        return None
    inside = machine.group(group.local, stride=stride, world=plan.world_size)
    far = machine.group(-(-group.ranks // group.local), stride=stride * group.local, world=plan.world_size)
    if not isinstance(far, Group):
        return None
    latency_s, bytes_s = far.outside
    rate = min(bytes_s * group.local, group.inside[1])  # one of the node's ranks at a time has the others' share
    return inside, replace(far, bytes_s=rate, outside=(latency_s, rate)), group.local


def _coded(
    codec: CodecConfig,
    group: Links,
    machine: Machine,
    *,
    numbers: float,
    matrices: Sequence[Matrices],
    buckets: int,
    world: int,
) -> GradientSum:
    ranks, feedback = group.ranks, float(codec.feedback)
    each = -(-int(numbers) // buckets)
    encode_s, decode_s, pass_s = (
        numbers * rate for rate in _rates(codec, machine, numbers=int(numbers), world=world, matrices=matrices)
    )
    whole, bucket, part = (
        stated(codec, int(numbers), matrices),
        stated(codec, each),
        stated(codec, -(-each // ranks)),
    )
    residual = feedback * RESIDUAL_BYTES + (VELOCITY_BYTES if isinstance(codec, DGCConfig) else 0.0)
    if whole.linear:
        wire_s = sum(buckets * group.all_reduce(payload / buckets) for payload in whole.payloads if payload)
        sent = 2 * (ranks - 1) / ranks * sum(whole.payloads)
        coding_s = encode_s + decode_s + 3 * feedback * pass_s
    elif 2 * part.payloads[0] < bucket.payloads[0]:
        size = ranks * part.payloads[0]
        wire_s = buckets * (group.all_to_all(size) + group.all_gather(size))
        sent = buckets * 2 * (ranks - 1) * part.payloads[0]
        first = encode_s + feedback * (3 * pass_s + decode_s + 5 * pass_s)
        middle = decode_s + 3 * pass_s + (encode_s + feedback * (decode_s + 3 * pass_s)) / ranks
        coding_s = first + middle + decode_s + 2 * pass_s
    else:
        wire_s = buckets * group.all_gather(ranks * bucket.payloads[0])
        sent = buckets * (ranks - 1) * bucket.payloads[0]
        first = encode_s + feedback * (3 * pass_s + decode_s + 3 * pass_s)
        coding_s = first + ranks * (decode_s + 3 * pass_s) + 3 * pass_s
    return GradientSum(
        codec=codec, wire_s=wire_s, coding_s=coding_s, sent_bytes=sent, residual_bytes=residual * numbers
    )


def _rates(
    config: CodecConfig, machine: Machine, *, numbers: int, world: int, matrices: Sequence[Matrices] = ()
) -> tuple[float, float, float]:
    """(encode, decode, one pass over memory) seconds of a number, with `world` ranks at work."""
    measured = machine.measured
    crowd = 1.0 if measured is None else measured.factor * measured.crowding(world)
    rate = machine.rates.memory_bytes_s if measured is None else measured.copy_bytes_s
    pass_s = crowd * FLOAT_BYTES / rate
    time = measured_time(config, machine.stack.codecs.times if measured is None else measured.codecs)
    if time is not None:
        return crowd * time.encode_s / time.numbers, crowd * time.decode_s / time.numbers, pass_s
    one: Stated = stated(config, numbers, matrices)
    return one.encode_passes * pass_s, one.decode_passes * pass_s, pass_s


def measured_time(config: CodecConfig, times: Sequence[CodecTime]) -> CodecTime | None:
    """What was measured of a codec; None: nothing."""
    wanted = label(config)
    return next((one for one in times if one.codec == wanted), None)
