"""Key-value caches for TensorRT: written in place where the network's own input is the cache."""

from __future__ import annotations

from irc import ops
from irc.backends.onnx.emitter import Lowered
from irc.backends.onnx.lower_attention import by_head
from irc.backends.tensorrt.lowering.emitter import TensorRTEmitter
from irc.backends.tensorrt.lowering.table import CHOICES
from irc.core import Function, Value
from irc.dims import Dim


@CHOICES.lower(
    ops.CacheUpdate,
    choice="ScatterElements",
    reason="TensorRT 11.1 and 11.2 wrote wrong tokens into native caches on sm_121",
    source="https://github.com/NVIDIA/TensorRT-Model-Connect/issues/955",
    flavour="tensorrt",
    since=(11, 1),
    before=(11, 3),
    architectures=(121,),
)
def copied_cache(e: TensorRTEmitter, op: ops.CacheUpdate) -> Lowered:
    """The cache with the new tokens scattered into a copy of it."""
    batch, heads, _, width = op.cache.type.shape
    tokens = op.new.type.shape[1]
    new = by_head(e, op.new, heads, width)
    first = e.add("Reshape", e.cast64(op.past), e.ints(-1, 1, 1, 1))
    places = e.add("Add", first, e.add("Reshape", e.iota(tokens), e.ints(1, 1, -1, 1)))
    places = e.add("Expand", places, e.sizes((batch, heads, tokens, width)))
    return e.add("ScatterElements", e.get(op.cache), places, new, axis=2)


@CHOICES.lower(
    ops.CacheUpdate,
    choice="TensorScatter",
    reason="done in place where the cache is an input that a result overwrites and its capacity is "
    "fixed; else a copy by ScatterElements",
    source="NvInfer.h, IKVCacheUpdateLayer; parser of TensorRT-RTX 1.7.1.116",
)
def cache_update(e: TensorRTEmitter, op: ops.CacheUpdate) -> Lowered:
    if not in_place(e.function, op):
        return copied_cache(e, op)
    _, heads, _, width = op.cache.type.shape
    e.in_place.add(str(op.cache.name))
    new = by_head(e, op.new, heads, width)
    past = e.get(op.past) if op.past.type.dtype in ("i32", "i64") else e.cast64(op.past)
    return e.add("TensorScatter", e.get(op.cache), new, past, axis=-2)


def in_place(function: Function, op: ops.CacheUpdate) -> bool:
    """Whether TensorRT can overwrite the cache: see the choice above."""
    cache = op.cache
    if not isinstance(cache.owner, Function) or cache.owner is not function:
        return False
    if isinstance(cache.type.shape[2], Dim) or op.cache.type.dtype not in ("f32", "f16", "bf16"):
        return False
    aliases = function.aliases()
    kept = {function.returned[i]: a for i, a in aliases.items()}
    return kept.get(op.result) == cache.index and _updates(cache) == 1


def _updates(cache: Value) -> int:
    return sum(user.opname == "cache_update" for user in cache.users)
