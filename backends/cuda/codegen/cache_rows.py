"""Where tokens of a sequence lie in memory: in a cache, or in the pages of a pool."""

from __future__ import annotations

from irc import ops
from irc.ir.core import Value

from .body import Body, Index, element
from .layout import from_front


def pool_of(cache: Value) -> tuple[Value, Value | None]:
    """The pool from which a cache is gathered, and its pages; else the cache itself, and None."""
    op = cache.producer
    return (op.pool, op.pages) if isinstance(op, ops.GatherPages) else (cache, None)


def cache_row(
    body: Body, cache: Value, pages: Value | None, row: str, position: str
) -> tuple[str, str]:
    """The first and third index in a cache of a position of a sequence; in a pool the first is -1
    where the position has no page."""
    if pages is None:
        return row, position
    size = body.size(cache.type.shape[2])
    page = body.element(pages, (row, f"({position}) / {size}"))
    return f"(ix){page}", body.variable("const ix", f"({position}) % {size}")


@element(ops.GatherPages)
def _gather_pages(body: Body, op: ops.GatherPages, result: int, index: Index) -> str:
    row, head, position, feature = index
    size = body.size(op.pool.type.shape[2])
    place = (row, f"({position}) / {size}")
    page = from_front(body, op.pages, place, body.size(op.pool.type.shape[0]))
    at = body.variable("const ix", f"({position}) % {size}")
    return body.element(op.pool, (f"(ix){page}", head, at, feature))
