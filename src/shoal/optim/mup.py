"""How rates follow the width of a model: the maximal update parametrisation (muP).

Yang et al., arXiv:2203.03466, table 3. A model that is m times as wide as the one whose rates were found has, relative
to that, the rates

    what grows              Adam and its relatives      SGD
    outputs ("input")       1                           m
    both ("hidden")         1 / m                       1
    inputs ("output")       1 / m                       1 / m

so that every layer's outputs change by as much in a step at every width. First values are the model's
(`shoal.models.gpt`). Adam's updates are as large whatever the gradient's size; SGD's are as large as the gradient. The
decay of weights is divided by the same factor: what a step takes off a weight, rate times decay, stays as it was. So
the rules are for optimizers whose decay is apart from the gradient, or that take gradients as they are.

Updates with a size of their own have a rule of their own (`Common.own_width_factor`), by the condition that the table
comes to (Yang et al., arXiv:2310.17813): the spectral norm of an update follows sqrt(outputs / inputs).

    Muon        that, over the scale that it gives to an orthogonal matrix of this shape
    Dion        1, as its updates have that norm
    LARS, LAMB  1 / sqrt(m) where both grow, else 1: updates are as large as weights, which begin by the width's law
"""

from __future__ import annotations

from shoal.models.roles import Widened
from shoal.optim.declared import Common, Described

_HIDDEN_OR_OUTPUT = ("hidden", "output")


def factor_of(config: Common, parameter: Described, widened: Widened | None) -> float:
    """What the rate of `parameter` is multiplied by. `config` has a `width_rule` where `widened` is not None."""
    if widened is None:
        return 1.0
    own = config.own_width_factor(parameter, widened.grows, widened.times)
    if own is not None:
        return own
    if config.width_rule == "adam":
        return 1.0 / widened.times if widened.grows in _HIDDEN_OR_OUTPUT else 1.0
    assert config.width_rule == "sgd", "the rules ask for an optimizer of which it is known"
    return {"input": widened.times, "hidden": 1.0, "output": 1.0 / widened.times}[widened.grows]
