"""The kernel that writes tokens into a key-value cache."""

from __future__ import annotations

from collections.abc import Collection

from irc.ir.core import Op, Value
from irc.ir.dims import product
from irc.ops.attention import CacheUpdate

from ..plan.template import Template, kernels_of
from .body import Body
from .kernels import blocks, each_thing, launch


@kernels_of(CacheUpdate)
def cache_update(op: Op, stored: Collection[Value]) -> list[Template]:
    """The launch that writes the new tokens in place, but for positions beyond the capacity."""
    assert isinstance(op, CacheUpdate)
    body = Body({*stored, op.cache})
    body.pointer(op.cache)
    _, heads, capacity, width = op.cache.type.shape
    batch, tokens, features = op.new.type.shape
    count = body.variable("const ix", body.size(product((batch, tokens, features))))
    with body.block(each_thing(count)):
        # In the order of the cache, where the tokens of a head lie together.
        b, h, token, d = body.unflattened("i", (batch, heads, tokens, width))
        past = body.element(op.past, (b,))
        with body.block(f"if ({past} >= 0 && {past} < {body.size(capacity)} - {token})"):
            feature = body.variable("const ix", f"{h} * {body.size(width)} + {d}")
            place = body.place(
                op.result, (b, h, body.variable("const ix", f"(ix){past} + {token}"), d)
            )
            body.line(f"store(out0, {place}, {body.element(op.new, (b, token, feature))});")
    return [
        launch(
            "cache_update",
            body,
            [op.result],
            blocks(product((batch, tokens, features))),
            operations=[op],
            in_place={op.result: op.cache},
        )
    ]
