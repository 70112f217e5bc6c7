"""Elements of rotary position embedding."""

from __future__ import annotations

from irc import ops
from irc.ir.dims import product
from irc.ops.rope import inverse_frequencies

from .body import Body, Index, element
from .elementwise import literal, register


@element(ops.Rope)
def _rope(body: Body, op: ops.Rope, result: int, index: Index) -> str:
    """The turned feature: cos of the angle times it, and sin times the other of the pair."""
    kind, half = register(op.x.type.dtype), op.turned // 2
    batch, token, feature = index
    own = body.element(op.x, index)
    found = body.variable(kind, own)
    at = body.variable("ix", f"{feature} % {op.head_dim}")
    with body.block(f"if ({at} < {op.turned})"):
        pair, second, step = (f"{at} % {half}", f"{at} >= {half}", half)
        if op.interleaved:
            pair, second, step = (f"{at} / 2", f"{at} % 2 == 1", 1)
        behind = body.variable("bool", second)
        place = body.variable("ix", f"{feature} + ({behind} ? -{step} : {step})")
        other = body.element(op.x, (batch, token, place))
        frequency, factor = _frequency(body, op, f"({pair})")
        position = body.element(op.positions, (batch, token))
        angle = body.variable("float", f"mul((float){position}, {frequency})")
        cos = body.variable(kind, f"mul(cos({angle}), {factor})")
        sin = body.variable(kind, f"mul(sin({angle}), {factor})")
        turned = body.variable(kind, f"mul({other}, {behind} ? {sin} : -{sin})")
        body.line(f"{found} = add(mul({own}, {cos}), {turned});")
    return found


def _frequency(body: Body, op: ops.Rope, pair: str) -> tuple[str, str]:
    """The inverse frequency of a pair, and the attention factor."""
    frequencies, factor = inverse_frequencies(op)
    count = literal(factor, "f32")
    if op.kind == "dynamic":
        powers = _table(body, [each / op.turned for each in range(0, op.turned, 2)])
        theta = body.once((op, "theta"), lambda: _dynamic_theta(body, op))
        return f"(1.0f / (float)pow((double){theta}, (double){powers}[{pair}]))", count
    found = f"{_table(body, frequencies.tolist())}[{pair}]"
    if op.kind != "longrope":
        return found, count
    far, _ = inverse_frequencies(op, op.original_positions + 1)
    long = f"{_length(body, op)} > {op.original_positions}"
    return f"({long} ? {_table(body, far.tolist())}[{pair}] : {found})", count


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
