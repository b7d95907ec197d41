"""Seconds of a trace's operators on a device, unit by unit: by the roofline, or by measured operators (`cost.prices`).

Products run at the rate of their shapes, fused attention at its own, everything else at the rate of memory. The device
waits where the host takes longer to launch a phase's operators than the device to run them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.cost.alpha_beta import Links
from shoal.cost.prices import Heads, Prices
from shoal.planner.trace.operator import Message, Operator
from shoal.planner.trace.trace import Trace


@dataclass(kw_only=True)
class UnitSeconds:
    """One unit of one microbatch; `items` as in a bill. `forward_s`, `input_s` (with what is computed again) and
    `weight_s` are the same seconds by phase."""

    items: dict[str, float]
    forward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.input_s + self.weight_s

    def add(self, item: str, seconds: float) -> None:
        """To one item of the bill."""
        self.items[item] = self.items.get(item, 0.0) + seconds


def operator_s(operator: Operator, prices: Prices) -> float:
    """Seconds of one operator on the device."""
    if operator.products:
        size = operator.outputs[0].element_bytes
        return sum(prices.product(product.matmul, element_bytes=size) for product in operator.products)
    if operator.attention_flops:
        samples, heads, tokens, features = operator.inputs[0].dims
        shape = Heads(samples * heads, tokens, features)
        return prices.fused_attention(operator.attention_flops, shape, backward=operator.phase == "backward")
    return prices.passed(operator.moved_bytes)


def unit_seconds(trace: Trace, prices: Prices, tensor: Links, *, dispatch_s: float) -> dict[int | None, UnitSeconds]:
    """Every unit that has operators; None: what lies outside of units. `tensor` links the ranks of the messages."""
    found: dict[int | None, UnitSeconds] = {}
    for unit in {one.unit for one in trace.operators}:
        operators = [one for one in trace.operators if one.unit == unit]
        found[unit] = _seconds(operators, prices, dispatch_s)
    for message in trace.messages:
        _say(found.setdefault(message.unit, UnitSeconds(items={})), message, tensor)
    return found


def _seconds(operators: Iterable[Operator], prices: Prices, dispatch_s: float) -> UnitSeconds:
    unit = UnitSeconds(items={})
    host = {"forward": 0.0, "backward": 0.0}
    for one in operators:
        seconds = operator_s(one, prices)
        unit.add(_item(one), seconds)
        host["forward" if one.phase == "forward" else "backward"] += dispatch_s
        weight = _weight_share(one) * seconds
        unit.weight_s += weight
        if one.phase == "forward":
            unit.forward_s += seconds
        else:
            unit.input_s += seconds - weight
    ahead = max(0.0, host["forward"] - unit.forward_s)
    behind = max(0.0, host["backward"] - unit.input_s - unit.weight_s)
    unit.add("launches", ahead + behind)
    unit.forward_s += ahead
    unit.input_s += behind
    return unit


def _item(operator: Operator) -> str:
    if operator.phase == "recompute":
        return "recomputation"
    if operator.products:
        return "matrix products"
    return "attention" if operator.attention_flops else "memory passes"


def _weight_share(operator: Operator) -> float:
    """How much of an operator's work gives a weight's gradient."""
    own = sum(product.matmul.flops for product in operator.products if product.gives == "weight")
    return own / operator.flops if own else 0.0


def _say(unit: UnitSeconds, message: Message, links: Links) -> None:
    """Tensor ranks wait for each collective."""
    seconds = links.all_reduce(message.size) if message.kind == "all_reduce" else links.all_gather(message.size)
    unit.add("tensor", seconds)
    if message.phase == "forward":
        unit.forward_s += seconds
    else:
        unit.input_s += seconds
