"""Key-value caches: TensorScatter as cache_update, and which results may overwrite which inputs."""

from __future__ import annotations

import re

from irc import ops
from irc.core import Function, Result, Value
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.rules import Made, only, reads


def per_row(b: Builder, entry: Entry | None, batch: object) -> Value:
    """One number per row of the batch, before any cast to i64; zeros where nothing is given."""
    if entry is None:
        return b.value(ops.Full(value=0, shape=(batch,), dtype="i32"))  # pyright: ignore[reportArgumentType]
    was = entry.was
    return b.get(was if was is not None and was.dtype == "i32" else entry)


@reads("TensorScatter", known="axis mode", refuses=only("mode", "linear"))
def tensor_scatter(b: Builder, node: Node) -> Made:
    cache, new = node.input(0), node.shaped(1, 4, 4)
    if cache.rank != 4 or node.integer("axis", -2) not in (-2, 2):
        raise Error("TensorScatter other than along the positions of a cache [B, H, C, D]")
    past = per_row(b, node.optional(2), cache.shape[0])
    return b.value(ops.CacheUpdate(b.get(cache), tokens(b, new), past))


def tokens(b: Builder, entry: Entry) -> Value:
    """[B, H, S, D] as [B, S, H*D]."""
    if entry.tokens is not None:
        return entry.tokens
    batch, heads, count, width = entry.shape
    turned = b.value(ops.Transpose(b.get(entry), order=(0, 2, 1, 3)))
    return b.value(ops.Reshape(turned, shape=(batch, count, heads * width)))


def aliased(function: Function, names: list[str]) -> dict[int, str]:
    """Result index -> the argument whose memory it may be, of a function that is complete.

    That is an update of a cache that came in, where nothing reads the cache as it was before, and
    in a file of our own an argument that is given back unchanged.
    """
    found: dict[int, str] = {}
    for i, (value, name) in enumerate(zip(function.returned, names, strict=True)):
        state, sole = value, True
        while isinstance(state.owner, ops.CacheUpdate):
            update = state.owner
            state = update.cache
            sole = sole and state.users == {update: 1}
        if state.owner is not function or state.name is None or state.name in found.values():
            continue
        if (state is not value and sole) or (state is value and name == f"{state.name}.out"):
            found[i] = state.name
    return found


def results_of(names: list[str], aliases: dict[int, str], own: bool) -> tuple[Result, ...]:
    """The declared results; none where they are called as results are that nobody named."""
    found: list[Result] = []
    for i, name in enumerate(names):
        alias = aliases.get(i)
        same = alias is not None and name == f"{alias}.out"
        found.append(Result(alias if same else _word(name), alias))
    plain = [f"result{i}" for i in range(len(names))]
    if own and not aliases and [r.name for r in found] == plain:
        return ()
    return tuple(found)


def _word(name: str) -> str:
    """The name of a result, which is a word."""
    found = re.sub(r"\W", "_", name)
    return f"_{found}" if found[:1].isdigit() else found
