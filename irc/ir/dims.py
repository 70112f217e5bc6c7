"""Symbolic dimensions: integer polynomials over named symbols, in one canonical interned form."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from numbers import Integral
from operator import index
from typing import NoReturn, TypeAlias, cast
from weakref import WeakValueDictionary

from ..argument_checks import check_kind
from ..errors import Error, did_you_mean

Monomial: TypeAlias = tuple[str, ...]  # symbol names in order; () is the constant term
Terms: TypeAlias = tuple[tuple[Monomial, int], ...]

LARGEST = (1 << 63) - 1  # the largest size that files and kernels can hold
MOST_TERMS = 256  # far more than a model has; products of longer sums would take for ever


class Dim:
    """A dimension that is not a constant, such as `S`, `2*S` or `B*S + 1`.

    Equal polynomials are the same object, so `is` compares them. Arithmetic with ints and other
    dims gives a Dim, or an int where the symbols cancel.
    """

    __slots__ = ("__weakref__", "_hash", "_text", "terms")
    terms: Terms

    def __new__(cls, terms: Terms) -> Dim:
        interned = _INTERNED.get(terms)
        if interned is not None:
            return interned
        self = object.__new__(cls)
        self.terms, self._hash, self._text = terms, hash(terms), _render(terms)
        _INTERNED[terms] = self
        return self

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Dim], tuple[Terms]]:
        return Dim, (self.terms,)

    def __repr__(self) -> str:
        return self._text

    def __format__(self, spec: str) -> str:
        return format(self._text, spec)

    def __add__(self, other: DimLike) -> DimLike:
        total = dict(self.terms)
        for monomial, coefficient in _terms(other):
            total[monomial] = total.get(monomial, 0) + coefficient
        return _make(total)

    def __mul__(self, other: DimLike) -> DimLike:
        total: dict[Monomial, int] = {}
        for left, a in self.terms:
            for right, b in _terms(other):
                monomial = tuple(sorted(left + right))
                total[monomial] = total.get(monomial, 0) + a * b
        return _make(total)

    def __neg__(self) -> DimLike:
        return self * -1

    def __sub__(self, other: DimLike) -> DimLike:
        return self + other * -1

    def __rsub__(self, other: int) -> DimLike:
        return self * -1 + other

    def __floordiv__(self, other: int) -> DimLike:
        quotient = exact_divide(self, other)
        if quotient is None:
            raise ValueError(f"{self} cannot be shown to be divisible by {other}")
        return quotient

    __radd__, __rmul__ = __add__, __mul__

    def _no_value(self, *_: object) -> NoReturn:
        raise TypeError(
            f"{self} has no value while tracing: Python can add, subtract and multiply it, but "
            "neither compare nor convert it; use a number that the script knows"
        )

    __lt__ = __le__ = __gt__ = __ge__ = __index__ = __float__ = _no_value
    __truediv__ = __rtruediv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _no_value

    def symbols(self) -> Iterator[str]:
        """The symbols that occur, each once, in order of first occurrence."""
        return iter(dict.fromkeys(name for monomial, _ in self.terms for name in monomial))

    def bind(self, sizes: Mapping[str, DimLike]) -> DimLike:
        """This dim with the symbols of `sizes` replaced; an int once none is left."""
        total: DimLike = 0
        for monomial, coefficient in self.terms:
            term: DimLike = coefficient
            for name in monomial:
                term = term * (sizes[name] if name in sizes else symbol(name))
            total = total + term
        return total


_INTERNED: WeakValueDictionary[Terms, Dim] = WeakValueDictionary()

DimLike: TypeAlias = int | Dim
Shape: TypeAlias = tuple[DimLike, ...]
Dims: TypeAlias = Mapping[str, tuple[int, int, int] | int]  # ranges, as a user may give them


def checked_ranges(dims: object, symbols: Collection[str]) -> dict[str, tuple[int, int, int]]:
    """The range (min, typical, max) of each symbol, where a user may give one number for all three.

    An Error where that is none, or a symbol is not known.
    """
    check_kind("dims", dims, Mapping, "a mapping, such as {'B': (1, 4, 16)}")
    given = cast("Mapping[str, object]", dims)
    for name in given:
        if name not in symbols:
            raise Error(
                f"the model has no dimension {name!r}{did_you_mean(str(name), symbols)}; "
                f"it has {', '.join(symbols) or 'none with a name'}"
            )
    return {name: _range(name, bounds) for name, bounds in given.items()}


def checked_sizes(
    dims: Mapping[str, tuple[int, int, int]], known: Mapping[str, tuple[int, int, int]]
) -> dict[str, int]:
    """The one size of each symbol; an Error where a module was not compiled for it."""
    for name, (low, size, high) in checked_ranges(dims, known).items():
        least, _, most = known[name]
        if low != high or not least <= size <= most:
            raise Error(
                f"expected one size of {name} from {least} to {most}, found {low}:{size}:{high}; "
                "give another, or compile with another --dims"
            )
    return {name: size for name, (_, size, _) in dims.items()}


def _range(name: str, bounds: object) -> tuple[int, int, int]:
    """The range of a symbol; one number is minimum, typical and maximum."""
    listed = isinstance(bounds, (tuple, list))
    given = cast("Sequence[object]", bounds) if listed else (bounds,) * 3
    whole = [size for size in given if not isinstance(size, bool) and isinstance(size, Integral)]
    if not len(given) == len(whole) == 3:
        raise Error(f"the range of {name} is {bounds!r}; give (min, typical, max), or one number")
    low, typical, high = map(int, whole)
    if not 0 <= low <= typical <= high:
        raise Error(
            f"the range {name}={low}:{typical}:{high} must be in increasing order: min:typical:max"
        )
    if high < 1:
        raise Error(f"the range of {name} ends at 0; expected a maximum of 1 or more")
    return low, typical, high


def symbol(name: str) -> Dim:
    """The dimension called `name`."""
    return Dim((((name,), 1),))


def bind(dim: DimLike, sizes: Mapping[str, DimLike]) -> DimLike:
    """`dim` with the symbols of `sizes` replaced by their values."""
    return dim.bind(sizes) if isinstance(dim, Dim) else dim


def linear(dim: DimLike) -> tuple[str, int, int] | None:
    """(S, a, b) where the dimension is `a*S + b` for one symbol S, else None."""
    if not isinstance(dim, Dim):
        return None
    factors = dict(dim.terms)
    rest = factors.pop((), 0)
    ((names, factor),) = factors.items() if len(factors) == 1 else (((), 0),)
    return (names[0], factor, rest) if len(names) == 1 else None


def product(shape: Shape) -> DimLike:
    """The number of elements of a shape."""
    total: DimLike = 1
    for dim in shape:
        total = total * dim
    return total


def exact_divide(dim: DimLike, by: DimLike) -> DimLike | None:
    """`dim / by` where the quotient is known to be a polynomial, else None.

    A sum is known to divide only itself.
    """
    if not isinstance(by, Dim):
        if by == 0 or any(coefficient % by for _, coefficient in _terms(dim)):
            return None
        return _make({monomial: coefficient // by for monomial, coefficient in _terms(dim)})
    if len(by.terms) != 1:
        return 1 if dim is by else None
    (divisor, factor) = by.terms[0]
    quotient: dict[Monomial, int] = {}
    for monomial, coefficient in _terms(dim):
        rest = _without(monomial, divisor)
        if rest is None or coefficient % factor:
            return None
        quotient[rest] = coefficient // factor
    return _make(quotient)


def _without(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    rest = list(monomial)
    for name in divisor:
        if name not in rest:
            return None
        rest.remove(name)
    return tuple(rest)


def _terms(dim: DimLike) -> Terms:
    if isinstance(dim, Dim):
        return dim.terms
    number = index(dim)
    return (((), number),) if number else ()


def _make(total: dict[Monomial, int]) -> DimLike:
    kept = sorted(((m, c) for m, c in total.items() if c), key=lambda t: (-len(t[0]), t[0]))
    if not kept:
        return 0
    if len(kept) == 1 and kept[0][0] == ():
        return kept[0][1]
    if len(kept) > MOST_TERMS:
        raise Error(f"a dimension is a sum of more than {MOST_TERMS} terms; use fewer symbols")
    return Dim(tuple(kept))


def _render(terms: Terms) -> str:
    text = ""
    for monomial, coefficient in terms:
        size = [str(abs(coefficient))] if abs(coefficient) != 1 or not monomial else []
        body = "*".join(size + list(monomial))
        if text:
            text += (" - " if coefficient < 0 else " + ") + body
        else:
            text = ("-" if coefficient < 0 else "") + body
    return text
