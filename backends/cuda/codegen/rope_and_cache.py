"""What heads of new tokens go through in front of their attention: rms_norm, rope, and caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from irc import ops
from irc.ir.core import Op, Value
from irc.ir.dims import DimLike, product
from irc.ops.fused_attention import NewTokens, cache_writes
from irc.ops.rope import inverse_frequencies

from ..plan.regime import Regime
from ..plan.template import Template, kernels_of, launches_of
from .body import Body, Index, element
from .cache_rows import cache_row
from .elementwise import literal, register
from .files import constants, helpers
from .kernels import blocks, each_thing, launch

HELPERS = helpers("warp.cuh", "heads.cuh", "rope_and_cache.cuh")
WARPS = 4


@dataclass(frozen=True)
class Rows:
    """Where new rows lie: from `offset` on in every token of a value [B, S, features]."""

    value: Value
    offset: int = 0

    @classmethod
    def of(cls, value: Value) -> Rows:
        """The rows of a value, seen through slices and splits of its features.

        Kernels load eight features at once.
        """
        op = value.producer
        if isinstance(op, ops.Slice) and op.dim % 3 == 2 and op.step == 1:
            start: DimLike = op.start
        elif isinstance(op, ops.Split) and op.dim % 3 == 2:
            start = 0
            for size in op.sizes[: op.results.index(value)]:
                start = start + size
        else:
            return cls(value)
        width = op.x.type.shape[2]
        if not isinstance(start, int) or not isinstance(width, int) or start % 8 or width % 8:
            return cls(value)
        return cls(op.x, start)

    @property
    def stride(self) -> DimLike:
        """Elements from one token to the next."""
        return self.value.type.shape[2]


@launches_of(ops.RopeAndCache)
def rope_and_cache(op: ops.RopeAndCache, regime: Regime) -> list[Template] | str | None:
    """The launch with a block per token, or why there is none."""
    if op.positions is None and op.q_norm is None:
        return None
    rows = [Rows.of(value) for value in (op.q, op.k, op.v)]
    if refusal := _refusal(op, rows):
        return f"rope and caches: {refusal}"
    batch, tokens, features = op.q.type.shape
    norms = [value for value in (op.q_norm, op.k_norm) if value is not None]
    body = Body([*(each.value for each in rows), *op.operands])
    count, size = body.size(tokens), body.size(op.k_cache.type.shape[2])
    capacity = body.size(cache_writes(op)[0].capacity)
    body.line(f"if (blockIdx.x >= {body.size(batch)} * {count}) return;")
    body.line(f"const ix block = blockIdx.x, b = block / {count}, token = block % {count};")
    past = body.element(op.past, ("b",))
    body.line(f"const bool kept = {past} >= 0 && {past} < {capacity} - token;")
    body.line(f"const ix position = kept ? (ix){past} + token : 0;")
    row, at = cache_row(body, op.k_cache, op.pages, "b", "position")
    arguments = [
        f"(const u16*){body.pointer(each.value)} + block * {each.stride} + {each.offset}"
        for each in rows
    ]
    positions = op.positions
    arguments.append("(const i32*)0" if positions is None else f"{body.pointer(positions)} + block")
    arguments += [body.pointer(norm) for norm in norms] or ["(const T*)0"] * 2
    arguments.append(f"(u16*)out0 + block * {features}")
    for out, cache in (("out1", op.k_cache), ("out2", op.v_cache)):
        body.pointer(cache)
        arguments.append(f"(u16*){out} + {body.place(cache, (row, '0', at, '0'))}")
    kept = "kept" if op.pages is None else f"kept && {row} >= 0"
    body.line(f"rope_and_cache({', '.join([*arguments, kept, size])});")
    sizes: dict[str, Any] = {"D": op.head_dim, "DV": op.v_cache.type.shape[3], "WARPS": WARPS}
    sizes |= {"HEADS": features // op.head_dim, "KEY_HEADS": op.key_heads}
    _, keys, values = op.results
    return [
        launch(
            "rope_and_cache",
            body,
            op.results,
            blocks(batch * tokens, 1),
            operations=[op],
            block=32 * WARPS,
            in_place={keys: op.k_cache, values: op.v_cache},
            helpers=constants_of_heads(op) + constants(sizes) + HELPERS,
        )
    ]


def _refusal(op: ops.RopeAndCache, rows: list[Rows]) -> str:
    """Why the kernel cannot compute it; empty if it can."""
    if op.q.type.dtype not in ("bf16", "f16"):
        return f"it takes bf16 and f16, not {op.q.type.dtype}"
    if op.q_norm is not None and op.k_norm is not None and op.q_norm.type != op.k_norm.type:
        return "it takes weights of norms of one dtype"
    sizes = [op.head_dim, op.v_cache.type.shape[3], _rotary_dim(op), op.key_heads]
    if not isinstance(sizes.pop(), int):
        return "it takes a fixed number of heads"
    sizes += [size for each in rows for size in (each.offset, each.stride)]
    if not all(isinstance(size, int) and size % 4 == 0 for size in sizes):
        return f"it takes sizes of rows and heads that are multiples of 4, not {sizes}"
    return ""


def _rope_of(op: Op) -> ops.Rope | None:
    """The rope of new tokens, over values of no function."""
    if not isinstance(op, NewTokens) or op.positions is None:
        return None
    x, positions = Value(op.q.type, None, 0), Value(op.positions.type, None, 0)
    return ops.Rope(x, positions, **op.attributes_of(ops.Rope))


def _rotary_dim(op: Op) -> int:
    rope = _rope_of(op)
    return rope.turned if rope else 0


def constants_of_heads(op: Op) -> str:
    """The constants about the dtype, rms_norm and rope of heads, in C."""
    new, rope = op if isinstance(op, NewTokens) else None, _rope_of(op)
    has_norm = new is not None and new.q_norm is not None
    frequencies, factor = inverse_frequencies(rope) if rope else ([0.0], 1.0)
    values = {
        "NORM": has_norm,
        "ROPE": rope is not None,
        "INTERLEAVED": rope is not None and rope.interleaved,
        "ROTARY_DIM": rope.turned if rope else 0,
        "FACTOR": float(factor),
        "EPS": float(new.eps) if new and has_norm else 0.0,
        "OFFSET": float(new.offset) if new and has_norm else 0.0,
    }
    table = ", ".join(literal(each, "f32") for each in map(float, frequencies))
    head = f"typedef {op.operands[0].type.dtype} T;\n{constants(values)}"
    return f"{head}__device__ const float FREQUENCY[] = {{{table}}};\n"


@kernels_of(ops.CacheUpdate)
def cache_update(op: ops.CacheUpdate, regime: Regime) -> list[Template]:
    """The launch that writes the new tokens in place, but for positions beyond the capacity."""
    body = Body({*regime.stored, op.cache})
    body.pointer(op.cache)
    _, heads, _, width = op.cache.type.shape
    capacity = body.size(cache_writes(op)[0].capacity)
    batch, tokens, features = op.new.type.shape
    count = body.variable("const ix", body.size(product((batch, tokens, features))))
    with body.block(each_thing(count)):
        # In the order of the cache, where the tokens of a head lie together.
        b, h, token, d = body.unflattened("i", (batch, heads, tokens, width))
        past = body.element(op.past, (b,))
        with body.block(f"if ({past} >= 0 && {past} < {capacity} - {token})"):
            position = body.variable("const ix", f"(ix){past} + {token}")
            row, at = cache_row(body, op.cache, op.pages, b, position)
            if op.pages is not None:
                body.line(f"if ({row} < 0) continue;")
            feature = body.variable("const ix", f"{h} * {body.size(width)} + {d}")
            offset = body.place(op.result, (row, h, at, d))
            body.line(f"store(out0, {offset}, {body.element(op.new, (b, token, feature))});")
    grid = blocks(product((batch, tokens, features)))
    in_place = {op.result: op.cache}
    return [launch("cache_update", body, [op.result], grid, operations=[op], in_place=in_place)]


@element(ops.Rope)
def _rope(body: Body, op: ops.Rope, result: int, index: Index) -> str:
    """The rotated feature: cos of the angle times it, and sin times the other of the pair."""
    kind, half = register(op.x.type.dtype), op.turned // 2
    batch, token, feature = index
    own = body.element(op.x, index)
    rotated = body.variable(kind, own)
    at = body.variable("ix", f"{feature} % {op.head_dim}")
    with body.block(f"if ({at} < {op.turned})"):
        pair, second, step = (f"{at} % {half}", f"{at} >= {half}", half)
        if op.interleaved:
            pair, second, step = (f"{at} / 2", f"{at} % 2 == 1", 1)
        behind = body.variable("bool", second)
        partner = body.variable("ix", f"{feature} + ({behind} ? -{step} : {step})")
        other = body.element(op.x, (batch, token, partner))
        frequency, factor = _frequency(body, op, f"({pair})")
        position = body.element(op.positions, (batch, token))
        angle = body.variable("float", f"mul((float){position}, {frequency})")
        cos = body.variable(kind, f"mul(cos({angle}), {factor})")
        sin = body.variable(kind, f"mul(sin({angle}), {factor})")
        turned = body.variable(kind, f"mul({other}, {behind} ? {sin} : -{sin})")
        body.line(f"{rotated} = add(mul({own}, {cos}), {turned});")
    return rotated


def _frequency(body: Body, op: ops.Rope, pair: str) -> tuple[str, str]:
    """The inverse frequency of a pair, and the attention factor."""
    frequencies, factor = inverse_frequencies(op)
    count = literal(factor, "f32")
    if op.kind == "dynamic":
        powers = _table(body, [each / op.turned for each in range(0, op.turned, 2)])
        theta = body.once((op, "theta"), lambda: _dynamic_theta(body, op))
        return f"(1.0f / (float)pow((double){theta}, (double){powers}[{pair}]))", count
    short = f"{_table(body, frequencies.tolist())}[{pair}]"
    if op.kind != "longrope":
        return short, count
    far, _ = inverse_frequencies(op, op.original_positions + 1)
    is_long = f"{_length(body, op)} > {op.original_positions}"
    return f"({is_long} ? {_table(body, far.tolist())}[{pair}] : {short})", count


def _table(body: Body, numbers: list[float]) -> str:
    """An array of numbers."""
    return body.table("float", [literal(each, "f32") for each in numbers])


def _length(body: Body, op: ops.Rope) -> str:
    """The largest position of the call plus one."""

    def make() -> str:
        most = body.variable("long long", "0")
        shape = op.positions.type.shape
        count = body.size(product(shape))
        with body.block(f"for (ix i = threadIdx.x; i < {count}; i += blockDim.x)"):
            position = body.element(op.positions, body.unflattened("i", shape))
            body.line(f"{most} = maximum({most}, (long long){position});")
        return body.variable("const long long", f"block_max({most}) + 1")

    return body.once((op, "length"), make)


def _dynamic_theta(body: Body, op: ops.Rope) -> str:
    """The base of the frequencies, which grows with a length above the original one."""
    length = _length(body, op)
    first = op.original_positions
    longest = f"(double)maximum({length}, (long long){first})"
    stretch = f"{literal(op.factor, 'f64')} * {longest} / {first} - {literal(op.factor - 1, 'f64')}"
    power = literal(op.turned / (op.turned - 2), "f64")
    return body.variable(
        "const float", f"(float)({literal(op.theta, 'f64')} * pow({stretch}, {power}))"
    )
