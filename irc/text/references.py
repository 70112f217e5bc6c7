"""Weight references in text: `@ckpt["key"][0:64, :].cast(f32)`."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import Error
from ..weights import (
    BytesRef,
    Cast,
    ConcatRef,
    Deal,
    FileRef,
    Pad,
    RandomRef,
    Ref,
    Shard,
    Slice,
    Step,
    Transpose,
    UnboundRef,
    Unsqueeze,
    ZerosRef,
)
from .cursor import Cursor
from .literals import parse_type

_DEEPEST = 16
_STEPS = ("cast", "deal", "pad", "shard", "transpose", "unsqueeze")


def parse_ref(c: Cursor, files: Mapping[str, str], depth: int = 0) -> Ref:
    """A reference at the cursor."""
    if depth > _DEEPEST:
        c.fail("this reference is nested too deeply")
    steps: list[Step] = []
    ref = _source(c, files, depth)
    while c.token in ("[", "."):
        steps.append(_slice(c) if c.accept("[") else _step(c))
    for step in steps:
        ref = ref.then(step)
    return ref


def _source(c: Cursor, files: Mapping[str, str], depth: int) -> Ref:
    if c.token[:1] == "@":
        file = _file(c, files)
        c.expect("[")
        key = c.string()
        c.expect("]")
        return FileRef(file, key)
    if c.accept("bytes"):
        return _bytes(c, files)
    if c.accept("concat"):
        return _concat(c, files, depth)
    if c.accept("random"):
        c.expect("(")
        key = c.string()
        c.expect(",")
        seed = c.integer()
        c.expect(",")
        scale = _number(c)
        shape = _shape(c) if c.accept(",") else None
        c.expect(")")
        return RandomRef(key, seed, scale, shape)
    if c.accept("zeros"):
        return _zeros(c)
    if not c.accept("unbound"):
        c.fail(f"expected @file[...], bytes, concat, zeros, random or unbound, found {c.shown}")
    c.expect("(")
    key = c.string()
    shape = _shape(c) if c.accept(",") else None
    c.expect(")")
    return UnboundRef(key, shape)


def _file(c: Cursor, files: Mapping[str, str]) -> str:
    file = c.symbol()
    if file not in files:
        c.fail(f"there is no file @{file}", back=1)
    return file


def _bytes(c: Cursor, files: Mapping[str, str]) -> Ref:
    c.expect("(")
    file = _file(c, files)
    c.expect(",")
    offset = c.integer()
    c.expect(",")
    type = parse_type(c)
    sizes = tuple(size for size in type.shape if isinstance(size, int))
    if type.sharded or len(sizes) != type.rank:
        c.fail(f"{type} is no dtype with sizes, such as f32[8, 16]")
    c.advance()
    c.expect(")")
    try:
        return BytesRef(file, offset, type.dtype, sizes)
    except Error as error:
        c.fail(error.message, back=1)


def _zeros(c: Cursor) -> Ref:
    c.expect("(")
    shape = _shape(c)
    c.expect(",")
    dtype = c.word()
    c.expect(")")
    return ZerosRef(shape, dtype)


def _concat(c: Cursor, files: Mapping[str, str], depth: int) -> Ref:
    c.expect("(")
    parts = [parse_ref(c, files, depth + 1)]
    while c.accept(","):
        parts.append(parse_ref(c, files, depth + 1))
    c.expect(";")
    dim = c.integer()
    c.expect(")")
    return ConcatRef(tuple(parts), dim)


def _shape(c: Cursor) -> tuple[int, ...]:
    sizes: list[int] = []
    c.expect("[")
    while not c.accept("]"):
        sizes.append(c.integer())
        if sizes[-1] < 0:
            c.fail("a size cannot be negative", back=1)
        c.separator("]")
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
    while not c.accept("]"):
        if c.accept(":"):
            ranges.append(None)
        else:
            begin = c.integer()
            c.expect(":")
            ranges.append((begin, c.integer()))
        c.separator("]")
    return Slice(tuple(ranges))


def _step(c: Cursor) -> Step:
    c.expect(".")
    name = c.word()
    c.expect("(")
    step: Step
    if name == "cast":
        step = Cast(c.word())
    elif name == "transpose":
        order = [c.integer()]
        while c.accept(","):
            order.append(c.integer())
        step = Transpose(tuple(order))
    elif name == "unsqueeze":
        step = Unsqueeze(c.integer())
    elif name in ("shard", "deal", "pad"):
        step = _along(c, name)
    else:
        c.fail(f"no step called {name!r}; there are {', '.join(_STEPS)}", back=2)
    c.expect(")")
    return step


def _along(c: Cursor, name: str) -> Step:
    """A step that names one dimension, after its opening parenthesis."""
    dim = c.integer()
    c.expect(",")
    if name == "deal":
        return Deal(dim, c.integer())
    if name == "pad":
        return Pad(dim, c.integer())
    axes = [c.word()]
    while c.accept("."):
        axes.append(c.word())
    return Shard(dim, tuple(axes))
