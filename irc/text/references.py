"""Parses weight references: `@ckpt["key"][0:64, :].cast(f32)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import Error
from ..weights import (
    BytesRef,
    Cast,
    ConcatRef,
    Cyclic,
    FileRef,
    Pad,
    ProductRef,
    QuantizedRef,
    RandomRef,
    ReciprocalRef,
    Ref,
    RepeatedRef,
    Shard,
    Slice,
    SortingRef,
    Step,
    TakenRef,
    Transpose,
    UnboundRef,
    UnpackedRef,
    Unsqueeze,
    ZerosRef,
)
from .cursor import Cursor
from .literals import parse_type

_DEEPEST = 16
_MOST_STEPS = 256


def parse_ref(c: Cursor, files: Mapping[str, str], depth: int = 0) -> Ref:
    """The reference at the cursor."""
    if depth > _DEEPEST:
        c.fail("this reference is nested too deeply")
    ref = _source(c, files, depth)
    while c.token in ("[", "."):
        if len(ref.steps) == _MOST_STEPS:
            c.fail(f"this reference has more than {_MOST_STEPS} steps")
        ref = ref.then(_slice(c) if c.token == "[" else _step(c))
    return ref


def _source(c: Cursor, files: Mapping[str, str], depth: int) -> Ref:
    if c.token[:1] == "@":
        file = _file(c, files)
        c.expect("[")
        key = c.string()
        c.expect("]")
        return FileRef(file, key)

    def inner() -> Ref:
        return parse_ref(c, files, depth + 1)

    if c.accept("bytes"):
        return _bytes(c, files)
    if c.accept("concat"):
        return _concat(c, files, depth)
    if c.accept("quantized"):
        return _quantized(c, inner)
    if c.accept("multiply"):
        return _along(c, ProductRef, inner)
    if c.accept("taken"):
        return _along(c, TakenRef, inner)
    if c.accept("unpacked"):
        return _unpacked(c, inner)
    if c.accept("repeated"):
        return RepeatedRef(*_arguments(c, inner, lambda: _shape(c), lambda: _shape(c)))
    if c.accept("reciprocal"):
        return ReciprocalRef(*_arguments(c, inner))
    if c.accept("sorting"):
        return SortingRef(*_arguments(c, inner))
    if c.accept("random"):
        arguments = _arguments(c, c.string, c.integer, lambda: _number(c), optional=_shape)
        return RandomRef(*arguments)
    if c.accept("zeros"):
        return ZerosRef(*_arguments(c, lambda: _shape(c), c.word))
    if not c.accept("unbound"):
        kinds = "@file[...], bytes, concat, zeros, random, unbound, quantized, multiply, unpacked, "
        kinds += "repeated, reciprocal, sorting or taken"
        c.fail(f"expected {kinds}, found {c.shown}")
    return UnboundRef(*_arguments(c, c.string, optional=_shape))


def _arguments(
    c: Cursor, *readers: Callable[[], Any], optional: Callable[[Cursor], Any] | None = None
) -> list[Any]:
    """Arguments in parentheses, one per reader, and one more if there is an optional one."""
    values: list[Any] = []
    for i, read in enumerate(readers):
        c.expect("," if i else "(")
        values.append(read())
    if optional is not None and c.accept(","):
        values.append(optional(c))
    c.expect(")")
    return values


def _file(c: Cursor, files: Mapping[str, str]) -> str:
    file = c.symbol()
    if file not in files:
        c.fail(f"there is no file @{file}", back=1)
    return file


def _bytes(c: Cursor, files: Mapping[str, str]) -> Ref:
    file, offset, (dtype, sizes) = _arguments(
        c, lambda: _file(c, files), c.integer, lambda: _tensor(c)
    )
    return _checked(c, BytesRef, file, offset, dtype, sizes)


def _tensor(c: Cursor) -> tuple[str, tuple[int, ...]]:
    """(dtype, sizes) of a type."""
    type = parse_type(c)
    sizes = tuple(size for size in type.shape if isinstance(size, int))
    if type.sharded or len(sizes) != type.ndim:
        c.fail(f"{type} is no dtype with sizes, such as f32[8, 16]")
    c.advance()
    return type.dtype, sizes


def _concat(c: Cursor, files: Mapping[str, str], depth: int) -> Ref:
    c.expect("(")
    parts = [parse_ref(c, files, depth + 1)]
    while c.accept(","):
        parts.append(parse_ref(c, files, depth + 1))
    c.expect(";")
    dim = c.integer()
    c.expect(")")
    return ConcatRef(tuple(parts), dim)


def _along(c: Cursor, kind: type[Ref], inner: Callable[[], Ref]) -> Ref:
    """A reference of two others and a dimension."""
    c.expect("(")
    source = inner()
    c.expect(",")
    other = inner()
    c.expect(";")
    dim = c.integer()
    c.expect(")")
    return _checked(c, kind, source, other, dim)


def _quantized(c: Cursor, inner: Callable[[], Ref]) -> Ref:
    c.expect("(")
    arguments: list[Any] = [inner()]
    for read in (c.string, c.string, lambda: _shape(c)):
        c.expect(",")
        arguments.append(read())
    for read in (c.string, c.word):
        if c.accept(","):
            arguments.append(read())
    c.expect(")")
    return _checked(c, QuantizedRef, *arguments)


def _unpacked(c: Cursor, inner: Callable[[], Ref]) -> Ref:
    source, packing, (dtype, sizes) = _arguments(c, inner, c.string, lambda: _tensor(c))
    return _checked(c, UnpackedRef, source, packing, dtype, sizes)


def _checked(c: Cursor, kind: type[Ref], *arguments: Any) -> Ref:
    """A reference that checks its arguments; its Error gets the place in the text."""
    try:
        return kind(*arguments)
    except Error as error:
        c.fail(error.message, back=1)


def _shape(c: Cursor) -> tuple[int, ...]:
    sizes: list[int] = []
    for _ in c.items("[", "]"):
        sizes.append(c.integer())
        if sizes[-1] < 0:
            c.fail("a size cannot be negative", back=1)
    return tuple(sizes)


def _number(c: Cursor) -> float:
    try:
        value = float(c.token)
    except ValueError:
        c.fail(f"expected a number, found {c.shown}")
    c.advance()
    return value


def _slice(c: Cursor) -> Slice:
    ranges: list[tuple[int, int] | None] = []
    for _ in c.items("[", "]"):
        if c.accept(":"):
            ranges.append(None)
        else:
            begin = c.integer()
            c.expect(":")
            ranges.append((begin, c.integer()))
    return Slice(tuple(ranges))


def _step(c: Cursor) -> Step:
    c.expect(".")
    name = c.word()
    if name not in _STEPS:
        c.fail(f"no step called {name!r}; there are {', '.join(_STEPS)}", back=1)
    return _STEPS[name](c)


_STEPS: dict[str, Callable[[Cursor], Step]] = {
    "cast": lambda c: Cast(*_arguments(c, c.word)),
    "cyclic": lambda c: Cyclic(*_arguments(c, c.integer, c.integer)),
    "pad": lambda c: Pad(*_arguments(c, c.integer, c.integer)),
    "shard": lambda c: Shard(*_arguments(c, c.integer, lambda: _separated(c, ".", c.word))),
    "transpose": lambda c: Transpose(*_arguments(c, lambda: _separated(c, ",", c.integer))),
    "unsqueeze": lambda c: Unsqueeze(*_arguments(c, c.integer)),
}


def _separated(c: Cursor, separator: str, read: Callable[[], Any]) -> tuple[Any, ...]:
    """One or more items."""
    items = [read()]
    while c.accept(separator):
        items.append(read())
    return tuple(items)
