"""Tables of the optimizers of whole matrices, which leave the rest to AdamW: Muon, Dion, SOAP, Shampoo and K-FAC.

Imports no torch.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import prod
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from shoal.config.check import Positive, PositiveFloat, says
from shoal.errors import ConfigError
from shoal.optim.declared import Common, Described, Dims, Granularity, Slot, counter

HIDDEN = ("column", "row", "packed", "replicated", "expert")
"""Roles of parameters whose matrices map activations to activations."""
AT_THE_ENDS = ("*embed*", "*head*")
"""Names of embeddings and heads, where a model does not tell roles."""


def is_hidden(parameter: Described, others: tuple[str, ...] = AT_THE_ENDS) -> bool:
    """Whether it is such a matrix, and fits none of these patterns."""
    matrix = parameter.decays and parameter.kind in HIDDEN and len(parameter.shape) > 1
    return matrix and not any(fnmatchcase(parameter.name, pattern) for pattern in others)


class HiddenMatrices(Common, frozen=True):
    """Keys of optimizers of hidden matrices that leave the rest to AdamW."""

    works_on: ClassVar[Granularity] = "matrices"
    asks_for_whole: ClassVar[bool] = True

    adamw: Annotated[
        tuple[str, ...], says("Patterns of parameter names that AdamW steps, beside embeddings and heads it knows.")
    ] = AT_THE_ENDS
    adamw_lr: Annotated[PositiveFloat | None, says("Peak learning rate of the others; without it, `lr`.")] = None
    beta1: Annotated[float, says("Decay of AdamW's first moment.", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, says("Decay of AdamW's second moment.", ge=0, lt=1)] = 0.95
    eps: Annotated[float, says("Added to the root of AdamW's second moment.", gt=0)] = 1e-8
    clip_norm: Annotated[
        PositiveFloat | None, says("Largest global gradient norm; larger gradients are scaled down.")
    ] = 1.0

    def takes(self, parameter: Described) -> bool:
        """Whether it is one of the matrices, if no pattern of `adamw` fits it."""
        return is_hidden(parameter, ())

    def options(self, parameter: Described) -> dict[str, Any]:
        """`whole`: it is one of the matrices; `rate`: what the others' rate is of theirs."""
        whole = self.takes(parameter) and not any(fnmatchcase(parameter.name, pattern) for pattern in self.adamw)
        rate = 1.0 if whole or self.adamw_lr is None or self.lr == 0 else self.adamw_lr / self.lr
        return {"whole": whole, **({} if rate == 1 else {"rate": rate})}


class Muon(HiddenMatrices, frozen=True, tag_field="kind", tag="muon"):
    """Muon (Jordan et al., 2024): momentum whose singular values are made equal, for hidden matrices; AdamW for
    embeddings, heads, biases and norms.
    """

    width_rule: ClassVar[Literal["adam", "sgd"] | None] = "adam"

    implemented_by: ClassVar[str] = "shoal.optim.muon:muon"
    lr: Annotated[float, says("Peak learning rate of matrices.", ge=0, le=1e3)] = 3e-4
    momentum: Annotated[float, says("Momentum of matrices.", ge=0, lt=1)] = 0.95
    nesterov: Annotated[bool, says("Nesterov's form of the momentum.")] = True
    iterations: Annotated[int, says("Newton-Schulz iterations in an update.", ge=1, le=50)] = 5
    polish: Annotated[
        int, says("Iterations after them that bring singular values from 0.68 to 1.14 nearer to 1.", ge=0, le=50)
    ] = 0
    precision: Annotated[
        Literal["parameter", "bfloat16"],
        says("What iterations are computed in; with bfloat16 two layouts agree to 3 digits of an update alone."),
    ] = "parameter"
    adjust: Annotated[
        Literal["match_rms_adamw", "original"],
        says(
            "What the rate of a matrix is multiplied by: 0.2 sqrt(max(rows, columns)), so that AdamW's rate and decay "
            "fit (arXiv:2502.16982), or sqrt(max(1, rows / columns))."
        ),
    ] = "match_rms_adamw"
    heads: Annotated[
        dict[str, Positive],
        says(
            "Numbers by patterns of parameter names (`*.query.weight`): the rows of such a matrix belong to so many "
            "heads, and each head's are orthogonalised by themselves."
        ),
    ] = msgspec.field(default_factory=dict)
    weight_decay: Annotated[float, says("Weight decay, on parameters of two dimensions or more only.", ge=0, le=1)] = (
        0.1
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The momentum of matrices; both moments of the others, and their number of steps."""
        return (
            Slot("momentum_buffer", of="hidden"),
            Slot("exp_avg", of="rest"),
            Slot("exp_avg_sq", of="rest"),
            counter("step"),
        )

    def options(self, parameter: Described) -> dict[str, Any]:
        """Also `stacked`: each of the matrices that its first dimension counts is orthogonalised; and `heads`, those of
        its rows. Raises `ConfigError` for rows that cannot be divided by them.
        """
        options = super().options(parameter)
        heads = next((n for pattern, n in self.heads.items() if fnmatchcase(parameter.name, pattern)), 1)
        if heads > 1 and (not options["whole"] or parameter.kind == "expert" or parameter.shape[0] % heads):
            raise ConfigError(
                f"optimizer.heads: {parameter.name} of shape {parameter.shape} has no rows of {heads} heads that Muon "
                "orthogonalises; give a divisor of its rows, or a pattern of other names"
            )
        return {**options, "stacked": options["whole"] and parameter.kind == "expert", "heads": heads}

    def matrix_flops(self, rows: int, columns: int) -> float:
        iterations = self.iterations + self.polish
        return orthogonalising_flops(rows, columns, iterations=iterations, precision=self.precision)

    def own_width_factor(self, parameter: Described, grows: str, times: float) -> float | None:
        """Of matrices sqrt(outputs / inputs) over the scale of updates, each beside its value at the base width."""
        options = self.options(parameter)
        if not options["whole"]:
            return None
        shape, heads = parameter.shape[1:] if options["stacked"] else parameter.shape, options["heads"]
        rows, columns = shape[0] / heads, float(prod(shape[1:]))
        before = (
            rows / times if grows in ("input", "hidden") and heads == 1 else rows,
            columns / times if grows in ("hidden", "output") else columns,
        )
        wanted = (rows / columns * before[1] / before[0]) ** 0.5
        return wanted * muon_scale(self.adjust, *before) / muon_scale(self.adjust, rows, columns)


FOLLOWED, WIDE = 3, 2
"""Iterations for which the Gram matrix is followed in the place of a matrix that is so many times as wide as high."""


def followed(short: int, long: int, *, precision: str) -> int:
    """Iterations from one product with the matrix itself to the next."""
    return FOLLOWED if long >= WIDE * short and precision != "bfloat16" else 1


def orthogonalising_flops(rows: int, columns: int, *, iterations: int, precision: str = "parameter") -> float:
    """Of Newton-Schulz: two products with the matrix whenever it is computed; of its Gram matrix one in each iteration,
    and three between two in which it is followed.
    """
    short, long = min(rows, columns), max(rows, columns)
    times = -(-iterations // followed(short, long, precision=precision))
    return times * 4.0 * short * short * long + (4 * iterations - 3 * times) * 2.0 * short**3


def muon_scale(adjust: str, rows: float, columns: float) -> float:
    """What Muon multiplies an orthogonal matrix `[rows, columns]` by."""
    return 0.2 * max(rows, columns) ** 0.5 if adjust == "match_rms_adamw" else max(1.0, rows / columns) ** 0.5


def dion_rank(shape: Dims, fraction: float) -> int:
    """The columns of Dion's factors for a matrix of this shape."""
    return max(1, round(fraction * min(shape[0], prod(shape[1:]))))


class Dion(HiddenMatrices, frozen=True, tag_field="kind", tag="dion"):
    """Dion (arXiv:2504.05295): orthonormal updates of low rank, for hidden matrices; AdamW for everything else."""

    width_rule: ClassVar[Literal["adam", "sgd"] | None] = "adam"

    implemented_by: ClassVar[str] = "shoal.optim.muon:dion"

    lr: Annotated[float, says("Peak learning rate of matrices.", ge=0, le=1e3)] = 0.01
    momentum: Annotated[float, says("The share of an update that the momentum forgets is 1 less this.", ge=0, lt=1)] = (
        0.95
    )
    rank_fraction: Annotated[float, says("The rank of updates, as a share of the shorter side.", gt=0, le=1)] = 0.25
    weight_decay: Annotated[float, says("Weight decay, on parameters of two dimensions or more only.", ge=0, le=1)] = (
        0.01
    )

    def own_width_factor(self, parameter: Described, grows: str, times: float) -> float | None:
        """1 for matrices: their updates have the spectral norm sqrt(rows / columns) as they are."""
        return 1.0 if self.options(parameter)["whole"] else None

    def matrix_flops(self, rows: int, columns: int) -> float:
        return 8.0 * rows * columns * dion_rank((rows, columns), self.rank_fraction)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The momentum and the right factor of matrices, on the owner; both moments of the others."""

        def factor(shape: Dims) -> Dims:
            return (prod(shape[1:]), dion_rank(shape, self.rank_fraction)) if len(shape) > 1 else (0, 0)

        return (
            Slot("dion_momentum", of="hidden", planned=1.0, whole=True),
            Slot("right_factor", factor, of="hidden", planned=self.rank_fraction, whole=True),
            Slot("exp_avg", of="rest"),
            Slot("exp_avg_sq", of="rest"),
            counter("step"),
        )


def sides(shape: Dims) -> tuple[int, int]:
    """Rows and columns, of which there are as many as the further dimensions make."""
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))


class _Preconditioned(HiddenMatrices, frozen=True):
    """Keys of both."""

    lr: Annotated[float, says("Peak learning rate of matrices.", ge=0, le=1e3)] = 1e-3
    beta1: Annotated[float, says("Decay of the first moment.", ge=0, lt=1)] = 0.95
    beta2: Annotated[float, says("Decay of the second moment.", ge=0, lt=1)] = 0.95
    eps: Annotated[float, says("Added to the root of the second moment.", gt=0)] = 1e-8
    every: Annotated[Positive, says("Updates between two decompositions of the sides.")] = 10
    precision: Annotated[
        Literal["parameter", "bfloat16"],
        says(
            "What the products of a step are computed in; decompositions keep the parameter's precision. With bfloat16 "
            "two layouts agree to 2 digits of an update alone."
        ),
    ] = "parameter"
    weight_decay: Annotated[float, says("Weight decay, on parameters of two dimensions or more only.", ge=0, le=1)] = (
        0.01
    )


class SOAP(_Preconditioned, frozen=True, tag_field="kind", tag="soap"):
    """SOAP (arXiv:2409.11321): Adam in the eigenbasis of Shampoo's preconditioners, for hidden matrices; AdamW for
    everything else.
    """

    implemented_by: ClassVar[str] = "shoal.optim.preconditioned:soap"

    shampoo_beta: Annotated[float, says("Decay of both sides.", ge=0, lt=1)] = 0.95
    largest_side: Annotated[Positive, says("Sides of more rows or columns stay as they are.")] = 4096

    def matrix_flops(self, rows: int, columns: int) -> float:
        """Three products with each side, and its share of two more, of one of the side and of a QR decomposition."""
        lengths = [length for length in (rows, columns) if length <= self.largest_side]
        products = 6.0 + 4.0 / self.every
        return products * rows * columns * sum(lengths) + 5.0 * sum(n**3 for n in lengths) / self.every

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Both moments, the number of steps, and the mean and the eigenbasis of each side, on the owner."""

        def side(number: int) -> Any:
            def shape(whole: Dims) -> Dims:
                length = sides(whole)[number]
                return (length, length) if length <= self.largest_side else (0, 0)

            return shape

        return (
            Slot("exp_avg", of="rest"),
            Slot("exp_avg_sq", of="rest"),
            counter("step"),
            Slot("turned_avg", of="hidden", planned=1.0, whole=True),
            Slot("turned_avg_sq", of="hidden", planned=1.0, whole=True),
            *(Slot(f"{of}_{name}", side(n), of="hidden", planned=1.0, whole=True)
              for n, name in enumerate(("rows", "columns")) for of in ("mean", "basis")),
        )  # fmt: skip


class Shampoo(_Preconditioned, frozen=True, tag_field="kind", tag="shampoo"):
    """Shampoo (arXiv:1802.09568, arXiv:2309.06497): a gradient between inverse roots of both sides' squares, block by
    block, whose length is that of Adam's step; AdamW for everything else.
    """

    implemented_by: ClassVar[str] = "shoal.optim.preconditioned:shampoo"

    block: Annotated[Positive, says("Largest rows and columns of a block; blocks have sides of their own.")] = 1024
    root_eps: Annotated[
        float, says("Added to each side's eigenvalues, as a share of the largest, before the root is taken.", gt=0)
    ] = 1e-6
    start: Annotated[int, says("First updates, of AdamW.", ge=0)] = 10

    def matrix_flops(self, rows: int, columns: int) -> float:
        """Two products with each side of a block, and its share of the roots by eigenvalues."""
        own = [min(self.block, length) for length in (rows, columns)]
        blocks = rows * columns / prod(own)
        return 4.0 * rows * columns * sum(own) + 11.0 * blocks * sum(n**3 for n in own) / self.every

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Both moments, the number of steps, and the mean and the inverse root of each block's sides, on the owner."""

        def side(number: int) -> Any:
            def shape(whole: Dims) -> Dims:
                lengths = sides(whole)
                own = min(self.block, lengths[number])
                return (*(-(-length // min(self.block, length)) for length in lengths), own, own)

            return shape

        return (
            Slot("exp_avg", of="rest"),
            Slot("exp_avg_sq", of="rest"),
            counter("step"),
            Slot("graft_avg", of="hidden", planned=1.0, whole=True),
            Slot("graft_avg_sq", of="hidden", planned=1.0, whole=True),
            *(Slot(f"{of}_{name}", side(n), of="hidden", planned=1.0, whole=True)
              for n, name in enumerate(("rows", "columns")) for of in ("mean", "root")),
        )  # fmt: skip


class KFAC(HiddenMatrices, frozen=True, tag_field="kind", tag="kfac"):
    """K-FAC (arXiv:1503.05671): the gradient of a layer times the inverse of its Fisher block, which is the product of
    two factors, of its inputs and of its outputs' gradients; AdamW for what is no linear, convolution or embedding.
    """

    implemented_by: ClassVar[str] = "shoal.optim.kfac:build"

    lr: Annotated[float, says("Peak learning rate of preconditioned weights.", ge=0, le=1e3)] = 0.02
    adamw_lr: Annotated[PositiveFloat | None, says("Peak learning rate of the others; without it, `lr`.")] = 1e-3
    momentum: Annotated[float, says("Momentum of preconditioned gradients.", ge=0, lt=1)] = 0.9
    damping: Annotated[PositiveFloat, says("Added to every eigenvalue of a Fisher block before it is inverted.")] = 1e-3
    kl_clip: Annotated[
        PositiveFloat | None,
        says("The most that an update may change the model's outputs, as a divergence (arXiv:2007.00784, 3.3)."),
    ] = 1e-3
    fisher: Annotated[
        Literal["empirical", "sampled"],
        says(
            "Whose targets the Fisher matrix is of: the data's own; or drawn from what the model predicts, by a second "
            "backward in the steps that measure, for classes."
        ),
    ] = "empirical"
    every: Annotated[Positive, says("Steps between two measurements of the factors, and decompositions.")] = 10
    factor_beta: Annotated[float, says("Decay of the factors, for each measurement.", ge=0, lt=1)] = 0.95
    weight_sharing: Annotated[
        Literal["expand", "reduce"],
        says("Positions of a sample count one by one, or as their mean and sum (arXiv:2311.00636, 3.2 and 3.3)."),
    ] = "expand"
    decompositions: Annotated[
        Literal["owner", "all"],
        says(
            "Who keeps them (arXiv:2107.01739): one rank for each matrix, which sends its update to replicas in every "
            "step; or every rank that has the matrix, which takes more memory and sends no updates."
        ),
    ] = "owner"
    inverse: Annotated[
        Literal["eigenvalues", "cholesky"],
        says(
            "How Fisher blocks are inverted: exactly, by the eigenvalues of both factors; or with the damping split "
            "over the factors (arXiv:1503.05671, 6.3), which costs half in every step, and a third every `every` steps."
        ),
    ] = "eigenvalues"
    largest_side: Annotated[Positive, says("Sides of more rows or columns are not preconditioned.")] = 4096
    weight_decay: Annotated[float, says("Weight decay, on parameters of two dimensions or more only.", ge=0, le=1)] = (
        0.01
    )
    clip_norm: Annotated[
        PositiveFloat | None, says("Largest global gradient norm; larger gradients are scaled down.")
    ] = None

    def takes(self, parameter: Described) -> bool:
        """Also embeddings, where no pattern of `adamw` fits them."""
        return parameter.decays and parameter.kind in (*HIDDEN, "embedding") and len(parameter.shape) > 1

    def matrix_flops(self, rows: int, columns: int) -> float:
        """Products of a step, and its share of inverses; not that of the factors, which follows from the batch."""
        lengths = [length for length in (rows, columns) if length <= self.largest_side]
        products, cubes = (4.0, 9.0) if self.inverse == "eigenvalues" else (2.0, 2.0)
        return products * rows * columns * sum(lengths) + cubes * sum(n**3 for n in lengths) / self.every

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The momentum, and the mean of each factor with its eigenvalues and eigenbasis or its inverse, on the owner;
        both moments of AdamW's.
        """

        def side(number: int, dims: int) -> Any:
            def shape(whole: Dims) -> Dims:
                length = sides(whole)[number]
                return (length,) * dims if length <= self.largest_side else (0,) * dims

            return shape

        by_values = self.inverse == "eigenvalues"
        return (
            Slot("exp_avg", of="rest"),
            Slot("exp_avg_sq", of="rest"),
            counter("step"),
            Slot("kfac_momentum", of="hidden", planned=1.0, whole=True),
            *(Slot(f"{of}_tokens", lambda whole: whole[:1], of="hidden", planned=0.0, whole=True)
              for of in ("mean", *(() if by_values else ("inverse",)))),
            *(Slot(f"{of}_{name}", side(n, dims), of="hidden", planned=float(dims - 1), whole=True)
              for n, name in enumerate(("rows", "columns"))
              for of, dims in (("mean", 2), *((("basis", 2), ("values", 1)) if by_values else (("inverse", 2),)))),
        )  # fmt: skip
