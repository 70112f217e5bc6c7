"""Parses attribute values, dimensions and types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import Error
from ..ir.core import Function
from ..ir.dims import LARGEST, DimLike, symbol
from ..ir.types import Axes, TensorType
from .cursor import Cursor

WORDS: dict[str, Any] = {
    "true": True,
    "false": False,
    "none": None,
    "inf": float("inf"),
    "-inf": float("-inf"),
    "nan": float("nan"),
}
_TYPE = re.compile(
    r"([A-Za-z_]\w*)\[([^\]]*)\](?:\{\s*(?:sum((?:\s+[A-Za-z_]\w*)+)\s*)?"
    r",?\s*(?:varies((?:\s+[A-Za-z_]\w*)+)\s*)?\})?"
)
_OF = re.compile(r"(?<=[\]}])\s+of\s+")
_DIM = re.compile(r"\s*([^@,]*?)\s*(?:@([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\s*)?")
_TERM = re.compile(
    r"\s*([-+]?)\s*((?:\d{1,19}|[A-Za-z_]\w*)(?:\s*\*\s*(?:\d{1,19}|[A-Za-z_]\w*))*)"
)
_MOST_FACTORS = 16


def parse_literal(c: Cursor, functions: Mapping[str, Function]) -> Any:
    """An attribute value: number, string, word, list, dimension or function."""
    token = c.token
    if token[:1] == '"':
        return c.string()
    if token[:1] == "@":
        name = c.symbol()
        if name not in functions:
            c.fail(f"@{name} is not defined before this use", back=1)
        return functions[name]
    if token == "[":
        return tuple([parse_literal(c, functions) for _ in c.items("[", "]")])
    if token in WORDS:
        c.advance()
        return WORDS[token]
    if c.ahead not in ("*", "+", "-") and re.fullmatch(r"-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?", token):
        if re.fullmatch(r"-?\d+", token):
            return c.integer(2 * LARGEST + 1)
        c.advance()
        return float(token)
    return _dim_tokens(c)


def _dim_tokens(c: Cursor) -> DimLike:
    """A dimension of several tokens, up to a comma or a bracket."""
    start = c.index
    text = ""
    while c.token and c.token not in (",", "]", "}"):
        text += " " + c.token
        c.advance()
    try:
        return parse_dim(text)
    except Error as error:
        c.fail(error.message, index=start)


def parse_dim(text: str) -> DimLike:
    """A dimension such as `2*S + 1`."""
    total: DimLike = 0
    rest = text.strip()
    if not rest:
        raise Error("expected a dimension, found nothing")
    first = True
    while rest:
        match = _TERM.match(rest)
        if match is None or (not first and not match[1]):
            raise Error(f"cannot read the dimension {text.strip()[:60]!r}")
        factors = match[2].split("*")
        if len(factors) > _MOST_FACTORS:
            raise Error(f"the dimension {text.strip()[:60]!r} has too many factors")
        term: DimLike = -1 if match[1] == "-" else 1
        for factor in factors:
            name = factor.strip()
            term = term * (int(name) if name.isdecimal() else symbol(name))
        total = total + term
        rest = rest[match.end() :].strip()
        first = False
    return total


def parse_type(c: Cursor, local: bool = False) -> TensorType:
    """The type in the current token; does not advance.

    In the `local` view partial sums and varying values are global types of the same shape.
    """
    texts = _OF.split(c.token)
    types = [_type(c, text) for text in texts]
    own = types[0]
    if len(types) == 1:
        global_type = own if local and not any(own.axes) else None
        return own if global_type is None else own.part_of(global_type)
    if not local or len(types) > 2 or own.sharded:
        c.fail(f"expected a type of one rank, then `of` and the global type, found {c.shown}")
    return own.part_of(types[1])


def _type(c: Cursor, text: str) -> TensorType:
    match = _TYPE.fullmatch(text)
    if match is None:
        c.fail(f"expected a type such as f32[B, 64], found {c.shown}")
    dtype, inner, partial, varying = match[1], match[2], match[3] or "", match[4] or ""
    shape: list[DimLike] = []
    axes: list[Axes] = []
    for part in inner.split(",") if inner.strip() else []:
        dim = _DIM.fullmatch(part)
        if dim is None:
            c.fail(f"cannot read the dimension {part.strip()!r}")
        try:
            shape.append(parse_dim(dim[1]))
        except Error as error:
            c.fail(error.message)
        axes.append(tuple(dim[2].split(".")) if dim[2] else ())
    try:
        sums = tuple(partial.split())
        return TensorType(dtype, tuple(shape), tuple(axes), sums, tuple(varying.split()))
    except Error as error:
        c.fail(error.message)
