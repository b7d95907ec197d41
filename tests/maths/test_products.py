"""Products by the faster library are those of float64, whatever lies how."""

from __future__ import annotations

import pytest
import torch

from shoal.maths.products import dense, product, symmetric_product

FLOAT32 = 1e-6
"""Of a product with some hundred terms, relative to the norm."""


@pytest.mark.parametrize("shape", [(70, 90, 80), (3, 200, 65), (2, 3, 66, 70, 64)])
def test_products_are_those_of_float64(shape: tuple[int, ...]) -> None:
    """Of matrices and of stacks, however their numbers lie, by whichever library."""
    generator = torch.Generator().manual_seed(0)
    *stack, rows, inner, columns = shape
    for turned_a, turned_b in ((False, False), (True, False), (False, True), (True, True)):
        a = torch.randn(*stack, *((inner, rows) if turned_a else (rows, inner)), generator=generator)
        b = torch.randn(*stack, *((columns, inner) if turned_b else (inner, columns)), generator=generator)
        a, b = a.mT if turned_a else a, b.mT if turned_b else b
        wanted = a.double() @ b.double()
        assert float((product(a, b) - wanted).norm() / wanted.norm()) < FLOAT32


@pytest.mark.parametrize("shape", [(600, 40), (1100, 300), (30, 50), (2, 40, 70)])
def test_symmetric_products_are_whole(shape: tuple[int, ...]) -> None:
    """Both halves of a @ a.mT, and of a product of two powers of a matrix, also where one half alone is computed."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(shape, generator=generator)
    wanted = a.double() @ a.double().mT
    found = symmetric_product(a, a)
    assert float((found - wanted).norm() / wanted.norm()) < FLOAT32
    assert torch.equal(symmetric_product(a.mT.contiguous().mT, a), found)
    cube = wanted @ wanted @ wanted
    assert float((symmetric_product((wanted @ wanted).float(), found) - cube).norm() / cube.norm()) < 3 * FLOAT32


def test_matrices_are_multiplied_without_gaps() -> None:
    """Rows of one that lies by columns, and columns of one that lies by rows, are copied; whole ones are not."""
    x = torch.randn(6, 8)
    for whole in (x, x.mT, x[2:4], x.mT[:, 1:3]):
        assert dense(whole) is whole
    for part in (x[:, 2:4], x.mT[1:3], x.mT[:2]):
        assert dense(part).is_contiguous()
        assert torch.equal(dense(part), part)


def test_a_product_of_no_matrices_is_none() -> None:
    """Of sides that oneDNN would multiply."""
    assert product(torch.zeros(0, 64, 70), torch.zeros(0, 70, 80)).shape == (0, 64, 80)
