"""Shapes: reshape, squeeze, expand, transpose, and where sizes are computed in the graph."""

from __future__ import annotations

from irc import ops
from irc.core import Value
from irc.dims import Dim, DimLike, Shape, exact_divide, product
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.fold import content_of, folded
from irc.frontends.onnx.rules import Made, reads


def sizes_of(node: Node, index: int, what: str = "shape") -> tuple[DimLike, ...]:
    """The elements of an input that says sizes; an Error where they depend on the data."""
    content = content_of(node.input(index))
    if content is None:
        raise Error(
            f"the {what} of this {node.kind} depends on the data, and irc needs shapes that follow "
            "from those of the inputs"
        )
    found = tuple(content.reshape(-1).tolist())
    if not all(isinstance(n, (int, Dim)) for n in found):
        raise Error(f"the {what} of this {node.kind} is not made of integers")
    return found


def single(node: Node, index: int, what: str) -> DimLike:
    """The only element of an input that says a size."""
    found = sizes_of(node, index, what)
    if len(found) != 1:
        raise Error(f"the {what} of this {node.kind} is {len(found)} numbers, not one")
    return found[0]


def whole_numbers(node: Node, index: int, what: str) -> list[int]:
    """The elements of an input that are known numbers."""
    found = sizes_of(node, index, what)
    return [n for n in found if not isinstance(n, Dim)] if not _symbolic(found) else _no(node, what)


def _symbolic(found: tuple[DimLike, ...]) -> bool:
    return any(isinstance(n, Dim) for n in found)


def _no(node: Node, what: str) -> list[int]:
    raise Error(f"the {what} of this {node.kind} has a symbol, and irc needs numbers there")


def axes_of(node: Node, rank: int) -> list[int] | None:
    """The axes, an input in newer opsets and an attribute before, counted from the front."""
    given = node.ints("axes")
    if given is None and node.has(1):
        given = whole_numbers(node, 1, "axes")
    if given is None:
        return None
    for axis in given:
        if not -rank <= axis < rank:
            raise Error(f"{node.kind} names axis {axis} of {rank} dimensions")
    found = [axis % rank for axis in given]
    if len(set(found)) != len(found):
        raise Error(f"{node.kind} names one of the axes {given} twice")
    return found


def new_shape(node: Node) -> Shape:
    """The shape that a node gives the elements of its first input."""
    old = node.input(0).shape
    match node.kind:
        case "Reshape":
            return resolved(old, sizes_of(node, 1), bool(node.integer("allowzero", 0)))
        case "Flatten":
            axis = node.integer("axis", 1)
            axis = axis + len(old) if axis < 0 else axis
            return product(old[:axis]), product(old[axis:])
        case "Squeeze":
            gone = axes_of(node, len(old))
            if gone is None:
                gone = [i for i, size in enumerate(old) if size == 1]
            return tuple(size for i, size in enumerate(old) if i not in gone)
        case _:
            given = node.ints("axes")
            count = len(given) if given is not None else len(sizes_of(node, 1, "axes"))
            places = axes_of(node, len(old) + count) or []
            rest = iter(old)
            return tuple(1 if i in places else next(rest) for i in range(len(old) + count))


def resolved(old: Shape, wanted: tuple[DimLike, ...], allowzero: bool) -> Shape:
    """The shape that Reshape means: 0 copies a size, -1 is what is left."""
    kept = [
        old[i] if size == 0 and not allowzero and i < len(old) else size
        for i, size in enumerate(wanted)
    ]
    if kept.count(-1) > 1 or any(isinstance(size, int) and size < -1 for size in kept):
        raise Error(f"a Reshape to [{', '.join(map(str, wanted))}], which is no shape")
    if -1 not in kept:
        return tuple(kept)
    left, divisor = [*old], [size for size in kept if not (isinstance(size, int) and size == -1)]
    for size in [*divisor]:
        if size in left:  # also sums, which nothing else can be divided by
            left.remove(size)
            divisor.remove(size)
    rest = exact_divide(product(tuple(left)), product(tuple(divisor)))
    if rest is None:
        raise Error(
            f"a Reshape of [{', '.join(map(str, old))}] to [{', '.join(map(str, wanted))}] leaves "
            "open what the -1 is; give the sizes of the inputs fewer symbols"
        )
    return tuple(rest if isinstance(size, int) and size == -1 else size for size in kept)


@reads("Reshape", "Squeeze", "Unsqueeze", "Flatten", known="allowzero axes axis")
def reshape(b: Builder, node: Node) -> Made:
    x, shape = node.input(0), new_shape(node)
    if product(x.shape) != product(shape):
        raise Error(
            f"{node.kind} of [{', '.join(map(str, x.shape))}] to {list(shape)} does not fit"
        )
    if node.own and node.final and node.opname == node.kind.lower():
        return _literal(b, node, shape)
    repeated = _repeated(b, node, shape)
    if repeated is not None:
        return repeated
    unknown = x.base is None and x.value is None and x.tokens is None and x.data is None
    if unknown:
        return Entry(x.dtype, shape, make=lambda: _literal(b, node, shape))
    found = b.viewed(b.based(x), shape)
    if node.kind in ("Squeeze", "Unsqueeze"):
        found.make = lambda: _literal(b, node, shape)
    return found


def _repeated(b: Builder, node: Node, shape: Shape) -> Value | None:
    """Every element several times in a row: a new dimension, expanded and merged with the last."""
    expand = made_by(node.input(0), "Expand")
    added = made_by(expand.input(0), "Unsqueeze") if expand is not None else None
    if expand is None or added is None or node.kind != "Reshape":
        return None
    if node.own and node.opname != "repeat":
        return None
    x, wide = added.input(0), node.input(0).shape
    places = axes_of(added, x.rank + 1)
    if places is None or len(places) != 1 or not places[0]:
        return None
    at = places[0]
    count = wide[at]
    same = wide == (*x.shape[:at], count, *x.shape[at:])
    if not same or isinstance(count, Dim) or count < 1:
        return None
    if shape != (*x.shape[: at - 1], x.shape[at - 1] * count, *x.shape[at:]):
        return None
    return b.value(ops.Repeat(b.get(x), dim=at - 1, count=count))


def made_by(entry: Entry | None, kind: str) -> Node | None:
    """The standard node that made a value, if it is of this kind."""
    node = entry.node if entry is not None else None
    return node if node is not None and node.kind == kind and not node.domain else None


def _literal(b: Builder, node: Node, shape: Shape) -> Value:
    """The operation that is as the node is."""
    x = b.get(node.input(0))
    given = node.ints("axes")
    if node.kind in ("Squeeze", "Unsqueeze"):
        given = whole_numbers(node, 1, "axes") if given is None and node.has(1) else given
        if given:
            cls = ops.Squeeze if node.kind == "Squeeze" else ops.Unsqueeze
            return b.value(cls(x, dims=tuple(given)))
    return b.value(ops.Reshape(x, shape=shape))


@reads("Shape", "Size", known="start end")
def shape_of(b: Builder, node: Node) -> Made:
    found = folded(node)
    assert found is not None
    return found


@reads("Identity")
def identity(b: Builder, node: Node) -> Made:
    return node.input(0)


@reads("Expand")
def expand(b: Builder, node: Node) -> Made:
    x, wanted = node.input(0), sizes_of(node, 1)
    old = (1,) * (len(wanted) - x.rank) + x.shape
    wanted = (1,) * (len(old) - len(wanted)) + wanted
    shape = tuple(a if b_ == 1 else b_ for a, b_ in zip(old, wanted, strict=True))
    if shape == x.shape and not (node.own and node.final):
        return x
    return b.value(ops.Expand(b.get(x), shape=shape))


@reads("Transpose", known="perm")
def transpose(b: Builder, node: Node) -> Made:
    x = node.input(0)
    order = tuple(node.ints("perm") or reversed(range(x.rank)))
    if sorted(order) != list(range(x.rank)):
        raise Error(f"Transpose by {list(order)} of {x.rank} dimensions")
    literal = node.own and node.final and node.opname == "transpose"
    shape = tuple(x.shape[i] for i in order)
    if not literal and order == (0, 2, 1, 3):
        if x.tokens is not None:
            return b.viewed(x.tokens, shape)
        batch, tokens, heads, width = x.shape
        if x.base is not None and x.base.type.shape == (batch, tokens, heads * width):
            return Entry(
                x.dtype,
                shape,
                tokens=x.base,
                make=lambda: b.value(ops.Transpose(b.get(x), order=order)),
            )
    return b.value(ops.Transpose(b.get(x), order=order))


def by_heads(b: Builder, value: Value, shape: Shape) -> Entry:
    """[B, S, H*D] as an entry [B, H, S, D], which is made only where it is needed."""
    batch, heads, count, width = shape

    def make() -> Value:
        split = b.value(ops.Reshape(value, shape=(batch, count, heads, width)))
        return b.value(ops.Transpose(split, order=(0, 2, 1, 3)))

    return Entry(value.type.dtype, shape, tokens=value, make=make)
