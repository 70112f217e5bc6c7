"""Einsum in all its forms as sums, diagonals and matrix products of two operands at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_letters

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.entry import Node
from irc.frontends.onnx.rules import Made, reads
from irc.frontends.onnx.structure import diagonal
from irc.ir.core import Value
from irc.ir.dims import DimLike, product


@dataclass(frozen=True)
class _Term:
    """An operand and a letter for each of its dimensions."""

    value: Value
    letters: str

    def size(self, letter: str) -> DimLike:
        """The size of the dimension of a letter."""
        return self.value.type.shape[self.letters.index(letter)]


@reads("Einsum", known="equation")
def einsum(b: Builder, node: Node) -> Made:
    """Sums and diagonals of each operand, then products of two operands at a time."""
    values = [b.get(entry) for entry in node.present()]
    words, out = _parsed(node.text("equation", ""), [value.type.ndim for value in values])
    terms = [_diagonal(b, value, word) for value, word in zip(values, words, strict=True)]
    terms = [_without_ones(b, term, terms) for term in terms]
    found = _summed(b, terms[0], out + "".join(term.letters for term in terms[1:]))
    for i, term in enumerate(terms[1:], 1):
        kept = out + "".join(each.letters for each in terms[i + 1 :])
        found = _product(b, found, _summed(b, term, kept + found.letters), kept)
    missing = set(out) - set(found.letters)
    if missing:
        raise Error(f"the Einsum {node.text('equation', '')!r} has a result of unknown size")
    return b.transposed(found.value, [found.letters.index(c) for c in out])


def _parsed(equation: str, ndims: Sequence[int]) -> tuple[list[str], str]:
    """(the letters of each operand, those of the result), with letters for every ellipsis."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    words = left.split(",")
    if len(words) != len(ndims):
        raise Error(f"the Einsum {equation!r} has {len(words)} terms for {len(ndims)} operands")
    free = [c for c in ascii_letters if c not in equation]
    hidden = [n - len(word) + 3 for word, n in zip(words, ndims, strict=True) if "..." in word]
    ellipsis = "".join(free[: max(hidden, default=0)])
    if not arrow:  # letters that occur once, in alphabetical order
        plain = left.replace(",", "").replace("...", "")
        out = "..." * bool(hidden) + "".join(sorted(c for c in plain if plain.count(c) == 1))
    found: list[str] = []
    for word, n in zip(words, ndims, strict=True):
        count = n - len(word) + 3
        if "..." in word and count >= 0:
            word = word.replace("...", ellipsis[len(ellipsis) - count :])
        if len(word) != n or (word and not word.isalpha()):
            raise Error(f"the term {word!r} of the Einsum {equation!r} does not fit {n} dimensions")
        found.append(word)
    out = out.replace("...", ellipsis)
    if len(set(out)) != len(out) or (out and not out.isalpha()):
        raise Error(f"the Einsum {equation!r} has a result that is no list of letters")
    return found, out


def _diagonal(b: Builder, x: Value, word: str) -> _Term:
    """The elements whose places along dimensions of one letter are equal."""
    for letter in dict.fromkeys(word):
        while word.count(letter) > 1:
            first, second = word.index(letter), word.rindex(letter)
            size, ndim = x.type.shape[first], x.type.ndim
            if x.type.shape[second] != size:
                raise Error(f"Einsum: the letter {letter} has two sizes in {x.type}")
            shape = tuple(size if i in (first, second) else 1 for i in range(ndim))
            equal = b.reshaped(b.get(diagonal(b, size, size, 0, ops.Eq)), shape)
            x = b.get(b.op(ops.ReduceSum, b.where(equal, b.entry(x), 0), dims=(second,)))
            word = word[:second] + word[second + 1 :]
    return _Term(x, word)


def _without_ones(b: Builder, term: _Term, terms: Sequence[_Term]) -> _Term:
    """Without dimensions of size 1 that broadcast over those of another operand."""
    many = {c for each in terms for c in each.letters if each.size(c) != 1}
    gone = [i for i, c in enumerate(term.letters) if c in many and term.size(c) == 1]
    if not gone:
        return term
    value = b.value(ops.Squeeze(term.value, dims=tuple(gone)))
    return _Term(value, "".join(c for i, c in enumerate(term.letters) if i not in gone))


def _summed(b: Builder, term: _Term, kept: str) -> _Term:
    """The sum over dimensions whose letters are nowhere else."""
    gone = tuple(i for i, c in enumerate(term.letters) if c not in kept)
    if not gone:
        return term
    value = b.value(ops.ReduceSum(term.value, dims=gone))
    return _Term(value, "".join(c for c in term.letters if c in kept))


def _product(b: Builder, x: _Term, y: _Term, kept: str) -> _Term:
    """The product of two operands, summed over shared letters that are not kept."""
    sizes = {c: term.size(c) for term in (y, x) for c in term.letters}
    if any(x.size(c) != y.size(c) for c in x.letters if c in y.letters):
        raise Error(f"Einsum of {x.value.type} and {y.value.type}, whose sizes do not agree")
    shared = [c for c in x.letters if c in y.letters]
    batch, inner = [c for c in shared if c in kept], [c for c in shared if c not in kept]
    rows = [c for c in x.letters if c not in y.letters]
    columns = [c for c in y.letters if c not in x.letters]
    left = _matrix(b, x, (batch, rows, inner), sizes)
    right = _matrix(b, y, (batch, inner, columns), sizes)
    order = [*batch, *rows, *columns]
    found = b.reshaped(b.value(ops.Matmul(left, right)), tuple(sizes[c] for c in order))
    return _Term(found, "".join(order))


def _matrix(
    b: Builder, x: _Term, parts: tuple[list[str], list[str], list[str]], sizes: dict[str, DimLike]
) -> Value:
    """A tensor as [batch..., rows, columns], by the letters of these."""
    batch, rows, columns = parts
    order = [x.letters.index(c) for c in (*batch, *rows, *columns)]
    counts = [product(tuple(sizes[c] for c in many)) for many in (rows, columns)]
    return b.reshaped(b.transposed(x.value, order), (*(sizes[c] for c in batch), *counts))
