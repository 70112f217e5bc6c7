"""Symbolic dimensions: one canonical form, exact arithmetic, exact division."""

import random

import pytest

from irc.errors import Error
from irc.ir.dims import Dim, DimLike, bind, exact_divide, product, symbol
from tests.fresh import session_seed

B, S = symbol("B"), symbol("S")


def random_dim(rng: random.Random) -> DimLike:
    total: DimLike = rng.randint(-3, 3)
    for _ in range(rng.randint(1, 4)):
        term: DimLike = rng.randint(-3, 3)
        for _ in range(rng.randint(0, 3)):
            term = term * rng.choice((B, S))
        total = total + term
    return total


def test_equal_polynomials_are_one_object() -> None:
    assert (B + S) * (B + S) is B * B + 2 * B * S + S * S
    assert S + 1 - 1 is S
    assert S - S == 0 and type(S - S) is int


def test_products_of_long_sums_are_refused_at_once() -> None:
    total: DimLike = 0
    for i in range(100):
        total = total + symbol(f"D{i}")
    with pytest.raises(Error, match="a sum of more than 256 terms"):
        product((total, total, total))


def test_arithmetic_agrees_with_integers() -> None:
    rng = random.Random(session_seed())
    for _ in range(500):
        a, b = random_dim(rng), random_dim(rng)
        sizes = {"B": rng.randint(0, 9), "S": rng.randint(0, 9)}
        x, y = bind(a, sizes), bind(b, sizes)
        assert isinstance(x, int) and isinstance(y, int)
        assert bind(a + b, sizes) == x + y
        assert bind(a * b, sizes) == x * y
        assert bind(a - b, sizes) == x - y
        assert bind(3 - a, sizes) == 3 - x


def test_division_is_exact_or_refused() -> None:
    assert exact_divide(4 * S, 2) is 2 * S
    assert exact_divide(B * S * 6, B * 2) is 3 * S
    assert exact_divide(S + 1, 2) is None
    assert exact_divide(S, B) is None
    assert exact_divide(S + 1, S + 1) == 1
    with pytest.raises(ValueError, match="cannot be shown to be divisible by 2"):
        _ = S // 2


@pytest.mark.parametrize(
    ("dim", "text"), [(B * S + 1, "B*S + 1"), (2 * S - 3, "2*S - 3"), (-S, "-S"), (1 - S, "-S + 1")]
)
def test_text(dim: Dim, text: str) -> None:
    assert str(dim) == text


def test_partial_binding_keeps_the_rest() -> None:
    assert bind(B * S + 2, {"B": 3}) is 3 * S + 2
    both = B * S + S
    assert isinstance(both, Dim)
    assert list(both.symbols()) == ["B", "S"]
    assert product((2, S, 3)) is 6 * S
