"""Matrix products, Einsum as products of two operands at a time, and normalization."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import NamedTuple

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder, ImportedValue, Node
from irc.frontends.onnx.fold import scalar
from irc.frontends.onnx.rules import MICROSOFT, Results, imports, produced_by
from irc.frontends.onnx.shapes import diagonal
from irc.ir.dims import Dim, DimLike, Shape, product
from irc.ir.dtypes import is_float


@imports("Gemm", attributes="alpha beta transA transB")
def gemm(b: Builder, node: Node) -> Results:
    """alpha * x @ y + beta * bias, as one Linear where it is that."""
    x, weight, bias = node.shaped(0, 2, 2), node.shaped(1, 2, 2), node.optional(2)
    alpha, beta = node.real("alpha", 1.0), node.real("beta", 1.0)
    if not is_float(x.dtype) and {alpha, beta} - {0.0, 1.0}:
        raise Error(f"Gemm of {x.dtype} with a factor that is not an integer")
    if node.integer("transA", 0):
        x = b.op(ops.Transpose, x, order=(1, 0))
    turned = bool(node.integer("transB", 0))
    if turned and is_float(x.dtype):
        if bias is not None and bias.shape == weight.shape[:1] and alpha == beta == 1:
            return b.op(ops.Linear, x, weight, bias=bias)
        result = b.op(ops.Linear, x, weight)
    else:
        weight = b.op(ops.Transpose, weight, order=(1, 0)) if turned else weight
        result = b.op(ops.Matmul, x, weight)
    result = _scaled(b, result, alpha)
    return result if bias is None or not beta else result + _scaled(b, bias, beta)


def _scaled(b: Builder, x: ImportedValue, factor: float) -> ImportedValue:
    return x if factor == 1 else x * factor


@imports("MatMul")
def matmul(b: Builder, node: Node) -> Results:
    """Matmul, also with vectors, and Linear where y is a transposed matrix."""
    x, y = node.shaped(0, 1), node.shaped(1, 1)
    turned = produced_by(y, "Transpose")
    if turned is not None and turned.ints("perm") == [1, 0] and is_float(x.dtype) and x.ndim > 1:
        return b.op(ops.Linear, x, turned.input(0))
    gone = tuple(dim for dim, operand in ((-2, x), (-1, y)) if operand.ndim == 1)
    x = b.op(ops.Unsqueeze, x, dims=(0,)) if x.ndim == 1 else x
    y = b.op(ops.Unsqueeze, y, dims=(1,)) if y.ndim == 1 else y
    result = b.op(ops.Matmul, x, y)
    return b.op(ops.Squeeze, result, dims=gone) if gone else result


@imports("FusedMatMul", domain=MICROSOFT, attributes="alpha transA transB")
def fused_matmul(b: Builder, node: Node) -> Results:
    """alpha * x @ y, each of them transposed where its attribute says so."""
    operands: list[ImportedValue] = []
    for i, flag in ((0, "transA"), (1, "transB")):
        x = node.shaped(i, 2)
        if node.integer(flag, 0):
            x = b.transposed(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))
        operands.append(x)
    return _scaled(b, b.op(ops.Matmul, *operands), node.real("alpha", 1.0))


class _Term(NamedTuple):
    """An operand of an Einsum and a letter for each of its dimensions."""

    x: ImportedValue
    letters: str

    def size(self, letter: str) -> DimLike:
        """The size of the dimension of a letter."""
        return self.x.shape[self.letters.index(letter)]


@imports("Einsum", attributes="equation")
def einsum(b: Builder, node: Node) -> Results:
    """Sums and diagonals of each operand, then products of two operands at a time."""
    operands = node.present()
    words, out = _parsed(node.text("equation"), [x.ndim for x in operands])
    terms = [_diagonal(b, x, word) for x, word in zip(operands, words, strict=True)]
    wide = {c for term in terms for c in term.letters if term.size(c) != 1}
    terms = [_without_ones(b, term, wide) for term in terms]
    total = _summed(b, terms[0], out + "".join(term.letters for term in terms[1:]))
    for i, term in enumerate(terms[1:], 1):
        kept = out + "".join(later.letters for later in terms[i + 1 :])
        total = _product(b, total, _summed(b, term, kept + total.letters), kept)
    if set(out) - set(total.letters):
        raise Error(f"the Einsum {node.text('equation')!r} has a result of unknown size")
    return b.transposed(total.x, [total.letters.index(c) for c in out])


def _parsed(equation: str, ndims: Sequence[int]) -> tuple[list[str], str]:
    """(the letters of each operand, those of the result), with letters for every ellipsis."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    words = left.split(",")
    if len(words) != len(ndims):
        raise Error(f"the Einsum {equation!r} has {len(words)} terms for {len(ndims)} operands")
    hidden = [n - len(word) + 3 for word, n in zip(words, ndims, strict=True) if "..." in word]
    free = [c for c in ascii_letters if c not in equation]
    ellipsis = "".join(free[: max(hidden, default=0)])
    if not arrow:  # letters that occur once, in alphabetical order
        plain = left.replace(",", "").replace("...", "")
        out = "..." * bool(hidden) + "".join(sorted(c for c in plain if plain.count(c) == 1))
    terms: list[str] = []
    for word, n in zip(words, ndims, strict=True):
        count = n - len(word) + 3
        if "..." in word and count >= 0:
            word = word.replace("...", ellipsis[len(ellipsis) - count :])
        if len(word) != n or (word and not word.isalpha()):
            raise Error(f"the term {word!r} of the Einsum {equation!r} does not fit {n} dimensions")
        terms.append(word)
    out = out.replace("...", ellipsis)
    if len(set(out)) != len(out) or (out and not out.isalpha()):
        raise Error(f"the Einsum {equation!r} has a result that is not a list of subscripts")
    return terms, out


def _diagonal(b: Builder, x: ImportedValue, word: str) -> _Term:
    """The elements whose places along dimensions of one letter are equal."""
    for letter in dict.fromkeys(word):
        while word.count(letter) > 1:
            first, second = word.index(letter), word.rindex(letter)
            size = x.shape[first]
            if x.shape[second] != size:
                raise Error(f"Einsum: the letter {letter} has two sizes in {b.get(x).type}")
            shape = tuple(size if i in (first, second) else 1 for i in range(x.ndim))
            equal = b.reshaped(diagonal(b, size, size, 0, ops.Eq), shape)
            x = b.op(ops.ReduceSum, b.where(equal, x, 0), dims=(second,))
            word = word[:second] + word[second + 1 :]
    return _Term(x, word)


def _without_ones(b: Builder, term: _Term, wide: set[str]) -> _Term:
    """Without dimensions of size 1 that broadcast over those of another operand."""
    gone = tuple(i for i, c in enumerate(term.letters) if c in wide and term.size(c) == 1)
    if not gone:
        return term
    letters = "".join(c for i, c in enumerate(term.letters) if i not in gone)
    return _Term(b.op(ops.Squeeze, term.x, dims=gone), letters)


def _summed(b: Builder, term: _Term, kept: str) -> _Term:
    """The sum over dimensions whose letters are nowhere else."""
    gone = tuple(i for i, c in enumerate(term.letters) if c not in kept)
    if not gone:
        return term
    letters = "".join(c for c in term.letters if c in kept)
    return _Term(b.op(ops.ReduceSum, term.x, dims=gone), letters)


def _product(b: Builder, x: _Term, y: _Term, kept: str) -> _Term:
    """The product of two operands, summed over shared letters that are not kept."""
    sizes = {c: term.size(c) for term in (y, x) for c in term.letters}
    shared = [c for c in x.letters if c in y.letters]
    if any(x.size(c) != y.size(c) for c in shared):
        types = f"{b.get(x.x).type} and {b.get(y.x).type}"
        raise Error(f"Einsum of {types}, whose sizes do not agree")
    batch, inner = [c for c in shared if c in kept], [c for c in shared if c not in kept]
    rows = [c for c in x.letters if c not in y.letters]
    columns = [c for c in y.letters if c not in x.letters]

    def matrix(term: _Term, *sides: list[str]) -> ImportedValue:
        """A tensor as [batch..., rows, columns], by the letters of these."""
        order = [term.letters.index(c) for letters in (batch, *sides) for c in letters]
        counts = [product(tuple(sizes[c] for c in letters)) for letters in sides]
        return b.reshaped(b.transposed(term.x, order), (*(sizes[c] for c in batch), *counts))

    result = b.op(ops.Matmul, matrix(x, rows, inner), matrix(y, inner, columns))
    order = [*batch, *rows, *columns]
    return _Term(b.reshaped(result, tuple(sizes[c] for c in order)), "".join(order))


def _vector(b: Builder, node: Node, x: ImportedValue, inner: Shape) -> ImportedValue:
    """A scale or bias as a vector over the joined dimensions."""
    width, number = product(inner), scalar(x)
    if x.shape != inner and number is not None and not isinstance(width, Dim):
        return b.op(ops.Full, value=number, shape=(width,), dtype=x.dtype)
    wide = (1,) * (len(inner) - x.ndim) + x.shape
    if len(wide) != len(inner) or any(a not in (1, n) for a, n in zip(wide, inner, strict=True)):
        raise Error(
            f"{node.kind} has a scale or bias of shape {list(x.shape)}, which does not fit the "
            f"normalised dimensions {list(inner)}"
        )
    x = x if x.shape == inner else b.op(ops.Expand, x, shape=inner)
    return b.reshaped(x, (width,))


_NORM = "axis epsilon stash_type"


@imports("RMSNormalization", "SimplifiedLayerNormalization", attributes=_NORM)
@imports("SimplifiedLayerNormalization", domain=MICROSOFT, attributes=_NORM)
def rms_normalization(b: Builder, node: Node) -> Results:
    """RmsNorm; the statistics that ONNX Runtime's operator may return as well are not computed."""
    return _normalized(b, node, [node.input(0), node.input(1)])


@imports(
    "SkipSimplifiedLayerNormalization",
    "SkipLayerNormalization",
    domain=MICROSOFT,
    attributes="epsilon",
)
def skip_normalization(b: Builder, node: Node) -> Results:
    """The norm of the sum of the first two inputs and of an optional bias, and that sum."""
    layer = node.kind == "SkipLayerNormalization"
    total = node.input(0) + node.input(1)
    if node.has(3 + layer):
        total = total + node.input(3 + layer)
    shift = node.optional(3) if layer else None
    return [_normalized(b, node, [total, node.input(2), shift], layer), None, None, total]


def _normalized(
    b: Builder, node: Node, operands: Sequence[ImportedValue | None], layer: bool = False
) -> ImportedValue:
    """LayerNorm or RmsNorm of x over all dimensions from `axis` on, with a scale and a bias."""
    x, scale, bias = (*operands, None)[:3]
    assert x is not None and scale is not None
    axis = node.axis(x.ndim, -1)
    inner = x.shape[axis:]
    flat = b.reshaped(x, (*x.shape[:axis], product(inner)))
    weight, eps = _vector(b, node, scale, inner), _epsilon(node)
    if layer:
        shift = None if bias is None else _vector(b, node, bias, inner)
        result = b.op(ops.LayerNorm, flat, weight=weight, bias=shift, eps=eps)
    else:
        result = b.op(ops.RmsNorm, flat, weight, eps=eps)
    return b.reshaped(result, x.shape)


def _epsilon(node: Node) -> float:
    """What is added to the mean square; nodes that add first have another default (schema of
    ONNX Runtime 1.31)."""
    return node.real("epsilon", 1e-12 if node.kind.startswith("Skip") else 1e-5)


@imports("LayerNormalization", attributes=_NORM)
def layer_normalization(b: Builder, node: Node) -> Results:
    """LayerNorm, and its statistics where they are wanted."""
    x = node.input(0)
    results = [_normalized(b, node, [x, node.input(1), node.optional(2)], layer=True)]
    if node.wants(1) or node.wants(2):
        dims = tuple(range(node.axis(x.ndim, -1), x.ndim))
        wide = b.cast(x, "f64" if x.dtype == "f64" else "f32")
        mean = b.op(ops.ReduceMean, wide, dims=dims, keep=True)
        centered = wide - mean
        variance = b.op(ops.ReduceMean, centered * centered, dims=dims, keep=True)
        results += [mean, b.op(ops.Rsqrt, variance + _epsilon(node))]
    return results


@imports("InstanceNormalization", attributes="epsilon")
@imports("GroupNormalization", attributes="epsilon num_groups stash_type")
def group_normalization(b: Builder, node: Node) -> Results:
    """GroupNorm, whose groups are single channels for InstanceNormalization."""
    x, single = node.shaped(0, 2), node.kind == "InstanceNormalization"
    if not single and node.opset < 21:
        raise Error("GroupNormalization before opset 21 has a scale per group; export it anew")
    groups = x.shape[1] if single else node.integer("num_groups", 1)
    if isinstance(groups, Dim):
        raise Error("InstanceNormalization of a symbolic number of channels")
    scale, bias, eps = node.input(1), node.input(2), node.real("epsilon", 1e-5)
    return b.op(ops.GroupNorm, x, groups=groups, weight=scale, bias=bias, eps=eps)


def _trains(node: Node) -> str | None:
    if node.integer("training_mode", 0) or len([name for name in node.outputs if name]) > 1:
        return "it computes the statistics of a batch (training)"
    return None


@imports("BatchNormalization", attributes="epsilon momentum training_mode", refuses=_trains)
def batch_normalization(b: Builder, node: Node) -> Results:
    """x * factor + shift for each channel, in f32 (f64 of f64) and rounded once."""
    x, wide = node.shaped(0, 2), "f64" if node.input(0).dtype == "f64" else "f32"
    scale, bias, mean, variance = (b.cast(node.shaped(i, 1, 1), wide) for i in range(1, 5))
    factor = scale * b.op(ops.Rsqrt, variance + node.real("epsilon", 1e-5))
    shift = bias - mean * factor
    column = (x.shape[1], *(1,) * (x.ndim - 2))
    if factor.shape != column[:1] or shift.shape != column[:1]:
        raise Error(f"BatchNormalization of {x.shape[1]} channels has other parameters")
    factor, shift = b.reshaped(factor, column), b.reshaped(shift, column)
    return b.cast(b.cast(x, wide) * factor + shift, x.dtype)
