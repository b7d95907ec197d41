"""Tables of the optimizers beside AdamW, SGD and Adagrad, but for those of whole matrices: RMSProp, NAdam, RAdam, Lion,
Adan and Adafactor; LARS and LAMB; the schedule-free ones; Newton-CG and L-BFGS. Imports no torch.

Lion and Adan have their equations here (`Elementwise`): a new optimizer that treats every number alone is such a class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from shoal.config.check import Positive, PositiveFloat, says
from shoal.optim.declared import Common, Described, Elementwise, Granularity, Slot, counter

if TYPE_CHECKING:
    from torch import Tensor


class RMSprop(Common, frozen=True, tag_field="kind", tag="rmsprop"):
    """RMSProp (Hinton, lecture 6e of the 2012 course), PyTorch's."""

    implemented_by: ClassVar[str] = "shoal.optim.adaptive:rmsprop"
    steps_alone: ClassVar[bool] = True

    lr: Annotated[float, says("Peak learning rate.", ge=0, le=1e3)] = 0.01
    alpha: Annotated[float, says("Decay of the mean square.", ge=0, lt=1)] = 0.99
    eps: Annotated[float, says("Added to the root of the mean square.", gt=0)] = 1e-8
    momentum: Annotated[float, says("Momentum of the scaled gradients.", ge=0, lt=1)] = 0.0
    centered: Annotated[bool, says("Scale by the variance: the mean square less the square of the mean.")] = False

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The mean square, the number of steps, and the velocity and the mean if they are asked for."""
        momentum = (Slot("momentum_buffer"),) if self.momentum else ()
        return (Slot("square_avg"), counter("step"), *momentum, *((Slot("grad_avg"),) if self.centered else ()))


class _Adam(Common, frozen=True):
    """Keys of Adam's relatives; the decay of weights is apart from the gradient, as in AdamW."""

    width_rule: ClassVar[Literal["adam", "sgd"] | None] = "adam"

    lr: Annotated[float, says("Peak learning rate.", ge=0, le=1e3)] = 3e-4
    beta1: Annotated[float, says("Decay of the first moment.", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, says("Decay of the second moment.", ge=0, lt=1)] = 0.999
    eps: Annotated[float, says("Added to the root of the second moment.", gt=0)] = 1e-8

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Both moments, and the number of steps."""
        return (Slot("exp_avg"), Slot("exp_avg_sq"), counter("step"))


class NAdam(_Adam, frozen=True, tag_field="kind", tag="nadam"):
    """NAdam (Dozat, ICLR workshop 2016), Adam with Nesterov's momentum; PyTorch's."""

    implemented_by: ClassVar[str] = "shoal.optim.adaptive:nadam"
    steps_alone: ClassVar[bool] = True

    momentum_decay: Annotated[float, says("How fast the momentum reaches `beta1`.", ge=0)] = 4e-3

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Both moments, the number of steps, and the product of the momenta."""
        return (*super().slots, counter("mu_product"))


class RAdam(_Adam, frozen=True, tag_field="kind", tag="radam"):
    """RAdam (arXiv:1908.03265), Adam that waits for its variance to be known; PyTorch's."""

    implemented_by: ClassVar[str] = "shoal.optim.adaptive:radam"
    steps_alone: ClassVar[bool] = True


class Lion(Elementwise, frozen=True, tag_field="kind", tag="lion"):
    """Lion (arXiv:2302.06675): the sign of a momentum. It wants a third to a tenth of AdamW's rate, and 3 to 10 times
    its decay.
    """

    width_rule: ClassVar[Literal["adam", "sgd"] | None] = "adam"

    lr: Annotated[float, says("Peak learning rate.", ge=0, le=1e3)] = 1e-4
    beta1: Annotated[float, says("Share of the momentum in what the sign is taken of.", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, says("Decay of the momentum.", ge=0, lt=1)] = 0.99

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The momentum."""
        return (Slot("exp_avg"),)

    @staticmethod
    def update(x: Tensor, g: Tensor, state: dict[str, Tensor], options: dict[str, Any], t: Tensor) -> None:
        """x <- (1 - lr w) x - lr sign(b1 m + (1 - b1) g),     m <- b2 m + (1 - b2) g     (algorithm 2)."""
        momentum, lr = state["exp_avg"], options["lr"]
        direction = momentum.lerp(g, 1 - options["beta1"]).sign_()
        momentum.lerp_(g, 1 - options["beta2"])
        x.mul_(1 - lr * options["weight_decay"]).add_(direction, alpha=-lr)


class Adan(Elementwise, frozen=True, tag_field="kind", tag="adan"):
    """Adan (arXiv:2208.06677): Adam with Nesterov's momentum, from the change of the gradient. It takes larger rates
    than AdamW, and is in use for vision transformers and diffusion models.
    """

    width_rule: ClassVar[Literal["adam", "sgd"] | None] = "adam"

    lr: Annotated[float, says("Peak learning rate; often 2 to 5 times AdamW's.", ge=0, le=1e3)] = 1e-3
    beta1: Annotated[float, says("Decay of the mean gradient.", ge=0, lt=1)] = 0.98
    beta2: Annotated[float, says("Decay of the mean change of the gradient.", ge=0, lt=1)] = 0.92
    beta3: Annotated[float, says("Decay of the second moment.", ge=0, lt=1)] = 0.99
    eps: Annotated[float, says("Added to the root of the second moment.", gt=0)] = 1e-8

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Three moments, the gradient of the last update, and the number of updates."""
        moments = (Slot("exp_avg"), Slot("exp_avg_diff"), Slot("exp_avg_sq"))
        return (*moments, Slot("previous_gradient"), counter("step"))

    @staticmethod
    def update(x: Tensor, g: Tensor, state: dict[str, Tensor], options: dict[str, Any], t: Tensor) -> None:
        """With d = g - g_before, 0 in the first update, and moments corrected for their start from zero,

            m <- b1 m + (1 - b1) g,     v <- b2 v + (1 - b2) d,     n <- b3 n + (1 - b3) (g + b2 d)^2
            x <- (x - lr (m + b2 v) / (sqrt(n) + eps)) / (1 + lr w)                                    (algorithm 1)

        where the paper's betas are 1 less these.
        """
        beta1, beta2, beta3 = (options[f"beta{n}"] for n in (1, 2, 3))
        change = (g - state["previous_gradient"]).mul_(t > 1)
        state["previous_gradient"].copy_(g)
        ahead = g.add(change, alpha=beta2)
        mean = state["exp_avg"].lerp_(g, 1 - beta1) / (1 - beta1**t)
        mean_change = state["exp_avg_diff"].lerp_(change, 1 - beta2) / (1 - beta2**t)
        square = state["exp_avg_sq"].mul_(beta3).addcmul_(ahead, ahead, value=1 - beta3) / (1 - beta3**t)
        mean.add_(mean_change, alpha=beta2).div_(square.sqrt_().add_(options["eps"]))
        x.sub_(mean, alpha=options["lr"]).div_(1 + options["lr"] * options["weight_decay"])


class Adafactor(Common, frozen=True, tag_field="kind", tag="adafactor"):
    """Adafactor (arXiv:1804.04235), as PyTorch has it: the second moment of a matrix is kept as a row and a column."""

    implemented_by: ClassVar[str] = "shoal.optim.adaptive:adafactor"
    works_on: ClassVar[Granularity] = "matrices"
    asks_for_whole: ClassVar[bool] = True

    lr: Annotated[float, says("Largest learning rate, beside 1 / sqrt(step).", ge=0, le=1e3)] = 0.01
    beta2_decay: Annotated[float, says("The power of the step in the decay of the second moment.", le=0)] = -0.8
    eps1: Annotated[PositiveFloat | None, says("Least root of the second moment; without it, that of the dtype.")] = (
        None
    )
    eps2: Annotated[float, says("Least root mean square of a parameter, which its step follows.", gt=0)] = 1e-3
    threshold: Annotated[float, says("Largest root mean square of a step, before the rate.", gt=0)] = 1.0

    def options(self, parameter: Described) -> dict[str, Any]:
        """Its state is on one rank."""
        return {"whole": True}

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The number of steps; a row and a column, or of a vector the second moment itself."""
        return (
            counter("step"),
            Slot("row_var", lambda shape: (*shape[:-1], 1) if len(shape) > 1 else (0,), whole=True),
            Slot("col_var", lambda shape: (*shape[:-2], 1, *shape[-1:]) if len(shape) > 1 else (0,), whole=True),
            Slot("variance", lambda shape: shape if len(shape) < 2 else (0,), whole=True),
        )


# Rates that follow the norm of each parameter.


class _Layerwise(Common, frozen=True):
    """Keys of both."""

    asks_for_whole: ClassVar[bool] = True

    trust: Annotated[
        Literal["decayed", "all"],
        says('Which parameters have a rate of their own: those that decay, and so no bias and no norm; or "all".'),
    ] = "decayed"
    max_trust: Annotated[PositiveFloat | None, says("Largest factor of a parameter's rate; without it, none.")] = None

    def options(self, parameter: Described) -> dict[str, Any]:
        """`trust`: whether the rate follows the norms."""
        return {"trust": parameter.decays or self.trust == "all"}

    def own_width_factor(self, parameter: Described, grows: str, times: float) -> float | None:
        """Under muP first values of inner weights fall as 1 / sqrt(m), and updates with them; they should as 1 / m."""
        if not self.options(parameter)["trust"]:
            return None
        return times**-0.5 if grows == "hidden" else 1.0


class LARS(_Layerwise, frozen=True, tag_field="kind", tag="lars"):
    """LARS (arXiv:1708.03888): SGD with momentum whose rate, for each parameter, follows the ratio of two norms."""

    width_rule: ClassVar[Literal["adam", "sgd"] | None] = "sgd"

    implemented_by: ClassVar[str] = "shoal.optim.layerwise:lars"

    lr: Annotated[float, says("Peak learning rate.", ge=0, le=1e3)] = 1.0
    momentum: Annotated[float, says("Momentum.", ge=0, lt=1)] = 0.9
    nesterov: Annotated[bool, says("Nesterov's form of the momentum.")] = False
    coefficient: Annotated[float, says("What the ratio of the norms is multiplied by.", gt=0, le=1)] = 1e-3
    eps: Annotated[float, says("Added to the norm of the gradient.", ge=0)] = 1e-8
    weight_decay: Annotated[float, says("Weight decay, on parameters of two dimensions or more only.", ge=0, le=1)] = (
        1e-4
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The velocity."""
        return (Slot("momentum_buffer"),)


class LAMB(_Layerwise, frozen=True, tag_field="kind", tag="lamb"):
    """LAMB (arXiv:1904.00962): AdamW whose steps are as long as each parameter's norm asks for."""

    width_rule: ClassVar[Literal["adam", "sgd"] | None] = "adam"

    implemented_by: ClassVar[str] = "shoal.optim.layerwise:lamb"

    lr: Annotated[float, says("Peak learning rate.", ge=0, le=1e3)] = 4e-3
    beta1: Annotated[float, says("Decay of the first moment.", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, says("Decay of the second moment.", ge=0, lt=1)] = 0.999
    eps: Annotated[float, says("Added to the root of the second moment.", gt=0)] = 1e-6
    bias_correction: Annotated[bool, says("Correct moments for their start from zero.")] = True
    decay_in_norm: Annotated[
        bool, says("Whether the decay counts in the norm of the step, as in the paper; else it is apart, as in AdamW.")
    ] = True
    weight_decay: Annotated[float, says("Weight decay, on parameters of two dimensions or more only.", ge=0, le=1)] = (
        0.01
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Both moments, and the number of steps."""
        return (Slot("exp_avg"), Slot("exp_avg_sq"), counter("step"))


# An average in the place of a schedule.


class _ScheduleFree(Common, frozen=True):
    """What both have in common."""

    keeps_average: ClassVar[bool] = True


class ScheduleFreeAdamW(_ScheduleFree, frozen=True, tag_field="kind", tag="schedule_free_adamw"):
    """Schedule-free AdamW (arXiv:2405.15682): an average in the place of a decay of the rate."""

    width_rule: ClassVar[Literal["adam", "sgd"] | None] = "adam"

    implemented_by: ClassVar[str] = "shoal.optim.average:adamw"

    lr: Annotated[float, says("Learning rate; often 1 to 10 times AdamW's.", ge=0, le=1e3)] = 2.5e-3
    beta1: Annotated[float, says("The share of the average in the weights.", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, says("Decay of the second moment.", ge=0, lt=1)] = 0.999
    eps: Annotated[float, says("Added to the root of the second moment.", gt=0)] = 1e-8

    @property
    def slots(self) -> tuple[Slot, ...]:
        """z, the average, the second moment, the number of steps, and the sum of squared rates."""
        return (Slot("z"), Slot("average"), Slot("exp_avg_sq"), counter("step"), counter("squared_rates"))


class ScheduleFreeSGD(_ScheduleFree, frozen=True, tag_field="kind", tag="schedule_free_sgd"):
    """Schedule-free SGD (arXiv:2405.15682): an average in the place of a decay of the rate."""

    width_rule: ClassVar[Literal["adam", "sgd"] | None] = "sgd"

    implemented_by: ClassVar[str] = "shoal.optim.average:sgd"

    lr: Annotated[float, says("Learning rate; often 10 times that of SGD with momentum.", ge=0, le=1e3)] = 1.0
    beta: Annotated[float, says("The share of the average in the weights.", ge=0, lt=1)] = 0.9

    @property
    def slots(self) -> tuple[Slot, ...]:
        """z, the average, the number of steps, and the sum of squared rates."""
        return (Slot("z"), Slot("average"), counter("step"), counter("squared_rates"))


# Searches: they evaluate loss and gradient of the same samples several times in one step, at other weights.


class Searching(Common, frozen=True):
    """Keys of both."""

    asks_for_whole: ClassVar[bool] = True
    steps_alone: ClassVar[bool] = True

    lr: Annotated[
        float, says("The length of a step that is tried first, as a share of the direction; 1 is Newton's.", gt=0, le=1)
    ] = 1.0
    decrease: Annotated[
        float, says("Wolfe's first constant: the share of the expected decrease that a step must reach.", gt=0, lt=0.5)
    ] = 1e-4
    curvature: Annotated[
        float, says("Wolfe's second constant: the share of the slope that may be left after a step.", gt=0, lt=1)
    ] = 0.9
    evaluations: Annotated[Positive, says("Most evaluations of the loss in one line search.")] = 25

    @property
    def backwards(self) -> float:
        """At the start of a step, and of one length, which a search mostly takes."""
        return 2.0

    def __post_init__(self) -> None:
        if self.decrease >= self.curvature:
            raise ValueError(
                f"decrease = {self.decrease:g} must be below curvature = {self.curvature:g}, or no step may exist"
            )
        for key, value in self._against_the_loss():
            raise ValueError(
                f"{key} = {value} with a line search: the gradient must be that of the loss that is compared; leave "
                f"{key} out"
            )

    def _against_the_loss(self) -> list[tuple[str, Any]]:
        """Keys that make another gradient, or another direction, of the loss's."""
        rates = [f"{pattern!r}: rate = {group.rate:g}" for pattern, group in self.groups.items() if group.rate != 1]
        rates += [f"{pattern!r}: kind = {group.kind}" for pattern, group in self.groups.items() if group.kind]
        kinds = [transform.variant for transform in self.transforms]
        layers = self.layer_decay if self.layer_decay != 1 else None
        found = [("clip_norm", self.clip_norm), ("transforms", kinds), ("groups", rates), ("layer_decay", layers)]
        return [(key, value) for key, value in found if value]


class NewtonCG(Searching, frozen=True, tag_field="kind", tag="newton_cg"):
    """Newton's method with truncated conjugate gradients and a line search, for full or large batches."""

    implemented_by: ClassVar[str] = "shoal.optim.newton:newton_cg"

    hessian: Annotated[
        Literal["differences", "exact"],
        says(
            "How the Hessian is multiplied by a vector: as the difference of two gradients, in every layout; or "
            "exactly, by a backward through the backward, which replicas and ZeRO-1 and -2 can."
        ),
    ] = "differences"
    cg_iterations: Annotated[
        Positive, says("Most Hessian-vector products in one step, each as dear as two gradients.")
    ] = 50
    cg_tolerance: Annotated[
        PositiveFloat, says("What may be left of the linear system, relative: the smaller of this and sqrt(|g|).")
    ] = 0.01
    damping: Annotated[float, says("Added to every eigenvalue of the Hessian.", ge=0)] = 0.0

    @property
    def backwards(self) -> float:
        """Two for each product, or what costs as much, and those of the line search."""
        return 2.0 * self.cg_iterations + super().backwards


class LBFGS(Searching, frozen=True, tag_field="kind", tag="lbfgs"):
    """L-BFGS with a line search, for full or large batches: an inverse Hessian from the last steps."""

    implemented_by: ClassVar[str] = "shoal.optim.newton:lbfgs"

    history: Annotated[int, says("Pairs of steps and changes of the gradient that are kept.", ge=1, le=100)] = 10

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The pairs, a ring, and how many there have been since the last that was no use."""
        return (*(Slot(f"{of}_{n}") for of in ("moved", "changed") for n in range(self.history)), counter("pairs"))
