"""Recurrences over the sequence, with a state that enters a call and leaves it.

Every operation is a loop over the tokens. Its expansion computes all tokens of a call at once (the
form of one chunk, with the call as the chunk), in f32; the state carries over to the next call, so
that a long prompt is computed in calls of moderate length. In all of them `lengths` i32 [B], from 0
to S, are the numbers of tokens of the rows: what is behind is padding, which leaves the state as it
is.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

from ..errors import Error
from ..ir.core import Module, Op, Value
from ..ir.declare import Operand, OptionalOperand, operation, operation_base, optional
from ..ir.dims import Dim, DimLike, bind, exact_divide
from ..ir.types import TensorType
from .control import Full, Iota
from .elementwise import Add, FloorDiv, Mul, Sub
from .functions import Exp
from .layout import Repeat
from .logic import And, Cast, Eq, Ge, Lt, Ne, Where
from .lookup import GatherElements
from .matmul import Matmul
from .parts import Concat, Slice
from .reduce import Cumsum, ReduceSum
from .shape import Transpose, Unsqueeze
from .shapes import float_operand, index_operand, rule_text, same_dtype, shape_text

Array: TypeAlias = Any  # a numpy array


@operation_base
class Recurrence(Op):
    """Base of the operations with a state; x [B, S, ...] is the first operand."""

    __slots__ = ()
    x: Operand

    def check_tokens(self, ndim: int, *values: Value) -> None:
        """Raise unless x has `ndim` dimensions, and all values have its rows and tokens."""
        x = float_operand(self.opname, self.x)
        if x.ndim != ndim:
            raise Error(f"{self.opname} takes x [batch, tokens, ...] of {ndim} dimensions, not {x}")
        for value in values:
            type = float_operand(self.opname, value)
            if type.shape[:2] != x.shape[:2]:
                raise Error(f"{self.opname}: an operand is {type}, but x is {x}: other tokens")

    def check_shape(self, name: str, value: Value | None, *shape: DimLike) -> None:
        """Raise where an operand has another shape."""
        if value is not None and value.type.shape != shape:
            raise Error(f"{self.opname}: {name} is {value.type}, expected {shape_text(shape)}")

    def by_head(self, value: Value) -> Op:
        """[B, S, groups, size] as wide [B, heads, S, size]: consecutive heads share a group.

        A single group of all ranks is [B, 1, S, size].
        """
        heads, groups = self.x.type.shape[2], value.type.shape[2]
        count = exact_divide(heads, groups)
        if not isinstance(count, int):
            raise Error(f"{self.opname}: {heads} heads cannot share {groups} groups evenly")
        turned = Transpose(self.wide(value), order=(0, 2, 1, 3))
        single = groups == 1 and not value.type.global_type.axes[2]
        return turned if single or count == 1 else Repeat(turned, dim=1, count=count)

    def whole_groups(self, groups: DimLike, results: tuple[TensorType, ...]) -> dict[str, Any]:
        """The attributes of one rank; an Error where it would have some of the heads of a group."""
        heads, local = self.x.type.shape[2], results[0].shape[2]
        together = exact_divide(heads, groups)
        if groups != 1 and local != heads and exact_divide(local, together or 1) is None:
            raise Error(
                f"{self.opname}: the {groups} groups of {heads} heads do not divide into {local} "
                "heads per rank"
            )
        return self.attributes

    def per_head(self, value: Value, lengths: Value | None) -> Op:
        """[B, S, heads] as wide [B, heads, S], 0 for padding."""
        numbers = self.wide(value)
        if lengths is not None:
            self.check_lengths(lengths)
            place = Iota(size=self.x.type.shape[1], dtype=lengths.type.dtype)
            here = Lt(place, Unsqueeze(lengths, dims=(1,)))
            numbers = Where(
                Unsqueeze(here, dims=(2,)), numbers, Full(value=0.0, dtype=self.computed)
            )
        return Transpose(numbers, order=(0, 2, 1))

    def check_lengths(self, lengths: Value) -> None:
        """Raise unless there is a number for every row."""
        index_operand(self.opname, lengths)
        self.check_shape("lengths", lengths, self.x.type.shape[0])

    def as_x(self, heads: Op) -> Op:
        """[B, heads, S, size] as [B, S, heads, size] in the dtype of x."""
        rows, kind = Transpose(heads, order=(0, 2, 1, 3)), self.x.type.dtype
        return rows if kind == self.computed else Cast(rows, dtype=kind)

    @property
    def computed(self) -> str:
        """The dtype in which it computes, and of its state: f32, or f64 for x in f64."""
        return "f64" if self.x.type.dtype == "f64" else "f32"

    def wide(self, value: Value) -> Value | Op:
        """A value in that dtype."""
        return value if value.type.dtype == self.computed else Cast(value, dtype=self.computed)

    def check_dtype(self, state: Value) -> None:
        """Raise unless a state has that dtype."""
        if state.type.dtype != self.computed:
            raise Error(f"{self.opname}: the state is {state.type}, expected {self.computed}")


def _transposed(x: Op) -> Op:
    """[B, heads, S, size] with the last two dimensions exchanged."""
    return Transpose(x, order=(0, 1, 3, 2))


def _decays(logarithms: Op, tokens: DimLike) -> tuple[Op, Op, Op]:
    """How much of a state is left, from log decays [B, heads, S].

    From before the call to each token [B, heads, S, 1], between tokens [B, heads, S, S] (row i,
    column j: from j to i, 0 where j is later), and from each token to the end [B, heads, S, 1].
    """
    sums = Cumsum(logarithms, dim=2)
    total = ReduceSum(logarithms, dims=(2,), keep=True)
    column, row = Unsqueeze(sums, dims=(3,)), Unsqueeze(sums, dims=(2,))
    # later tokens are masked before exp, where they would overflow
    later = Full(value=-math.inf, dtype=logarithms.result.type.dtype)
    between = Exp(Where(_order(Ge, tokens), Sub(column, row), later))
    return Exp(column), between, Exp(Unsqueeze(Sub(total, sums), dims=(3,)))


def _order(compare: type[Op], tokens: DimLike, block: int = 1) -> Op:
    """bool [S, S]: the blocks of tokens of row and column compared."""
    place: Op = Iota(size=tokens)
    if block > 1:
        place = FloorDiv(place, Full(value=block, dtype="i32"))
    return compare(Unsqueeze(place, dims=(1,)), Unsqueeze(place, dims=(0,)))


def _kept(total: Op, state: Value) -> Op:
    """A state [B, heads, ., .] after the sum of log decays [B, heads, S] of a call."""
    left = Exp(ReduceSum(total, dims=(2,), keep=True))
    return Mul(state, Unsqueeze(left, dims=(3,)))


def _ends(lengths: Array, batch: int, tokens: int) -> Array:
    """The number of tokens of every row."""
    if lengths is None:
        return np.full(batch, tokens)
    if lengths.size and (lengths.min() < 0 or lengths.max() > tokens):
        raise Error(f"lengths has {lengths.min()} to {lengths.max()}, outside 0 to {tokens}")
    return lengths


def _masked(x: Array, lengths: Array) -> Array:
    """x [B, S, heads] with zeros for padding."""
    return np.where(_here(lengths, *x.shape[:2])[..., None], x, 0)


def _here(lengths: Array, batch: int, tokens: int) -> Array:
    """bool [B, S]: whether a token is none of the padding."""
    return np.arange(tokens) < _ends(lengths, batch, tokens)[:, None]


def _by_head(x: Array, heads: int) -> Array:
    """[B, S, groups, size] as [B, S, heads, size] in f32, or f64."""
    return np.repeat(x.astype(_wide(x)), heads // max(1, x.shape[2]), axis=2)


def _wide(x: Array) -> Any:
    return np.float64 if x.dtype == np.float64 else np.float32


@operation(
    "short_conv", sharding="b s! c, c w!, b k! c, c, b -> b s c, b k c", safe_values={"lengths": 0}
)
class ShortConv(Recurrence):
    """A causal convolution of every channel over the sequence: (y, the last inputs).

    x [B, S, C], weight [C, W], state [B, W-1, C]: the inputs before x, as x. y[t] is the sum over w
    of weight[:, w] * input[t - W + 1 + w], plus bias [C]. The new state is the last W-1 inputs of
    the tokens before `lengths`.
    """

    x: Operand
    weight: Operand
    state: Operand
    bias: OptionalOperand = optional()
    lengths: OptionalOperand = optional()

    def expand(self) -> tuple[Value, ...]:
        self.check_tokens(3)
        same_dtype(self.opname, self.x, self.weight, self.state)
        x, weight = self.x.type, self.weight.type
        batch, tokens, channels = x.shape
        width = weight.shape[-1]
        if weight.ndim != 2 or weight.shape[0] != channels or isinstance(width, Dim) or width < 2:
            raise Error(f"short_conv: the weight is {weight}, expected [{channels}, 2 or more]")
        self.check_shape("the state", self.state, batch, width - 1, channels)
        self.check_shape("the bias", self.bias, channels)
        inputs = Concat([self.state, self.x], dim=1)
        columns = Transpose(self.wide(self.weight), order=(1, 0))
        total: Op | Value | None = None if self.bias is None else self.wide(self.bias)
        for w in range(width):
            moved = self.wide(Slice(inputs, dim=1, start=w, stop=tokens + w).result)
            part = Mul(moved, Slice(columns, dim=0, start=w, stop=w + 1))
            total = part if total is None else Add(part, total)
        assert isinstance(total, Op)
        y = total if x.dtype == self.computed else Cast(total, dtype=x.dtype)
        return y.result, self._last(inputs, width - 1).result

    def _last(self, inputs: Op, count: int) -> Op:
        """[B, count, C]: the last inputs of each row."""
        tokens = self.x.type.shape[1]
        if self.lengths is None:
            return Slice(inputs, dim=1, start=tokens, stop=tokens + count)
        self.check_lengths(self.lengths)
        kind = self.lengths.type.dtype
        first = Unsqueeze(self.lengths, dims=(1,))
        places = Unsqueeze(Add(first, Iota(size=count, dtype=kind)), dims=(2,))
        zeros = Cast(Lt(self.state, self.state), dtype=kind)  # sharded as the channels are
        return GatherElements(inputs, Add(places, zeros), dim=1)

    def evaluate(
        self, x: Array, weight: Array, state: Array, bias: Array = None, lengths: Array = None
    ) -> tuple[Array, Array]:
        width, inputs, y = weight.shape[1], np.concatenate([state, x], axis=1), np.zeros_like(x)
        for t in range(x.shape[1]):
            y[:, t] = np.sum(inputs[:, t : t + width] * weight.T, axis=1)
        ends = _ends(lengths, *x.shape[:2])
        last = [row[end : end + width - 1] for row, end in zip(inputs, ends, strict=True)]
        y = y if bias is None else y + bias
        return y, np.array(last, x.dtype).reshape(state.shape)


@operation("selective_scan", safe_values={"lengths": 0})
class SelectiveScan(Recurrence):
    """The selective state space of Mamba-2 (SSD: Dao & Gu, 2024), head by head: (y, state).

    x [B, S, H, P]; dt [B, S, H], the step sizes; a [H], negative; b and c [B, S, G, N], each of the
    G groups for H/G consecutive heads; state f32 [B, H, P, N]; d [H]. Per token
    state = exp(dt*a) * state + dt * x bᵀ and y = state c + d*x. Computed in f32 (x in f64: all in
    f64); y in the dtype of x.
    """

    x: Operand
    dt: Operand
    a: Operand
    b: Operand
    c: Operand
    state: Operand
    d: OptionalOperand = optional()
    lengths: OptionalOperand = optional()

    def sharding_rule(self) -> str:
        group = "g!" if self.b.type.shape[2] == 1 else "h"
        operands = ["b s! h p", "b s! h", "h", *[f"b s! {group} n!"] * 2, "b h p n!", "h", "b"]
        return rule_text(map(str.split, operands), [["b", "s", "h", "p"], ["b", "h", "p", "n"]])

    def localized(self, results: tuple[TensorType, ...]) -> dict[str, Any]:
        return self.whole_groups(self.b.type.shape[2], results)

    def expand(self) -> tuple[Value, ...]:
        self.check_tokens(4, self.dt, self.b, self.c)
        batch, tokens, heads, size = self.x.type.shape
        self.check_shape("dt", self.dt, batch, tokens, heads)
        self.check_shape("a", self.a, heads)
        self.check_shape("d", self.d, heads)
        self.check_shape("c", self.c, *self.b.type.shape)
        self.check_dtype(self.state)
        self.check_shape("the state", self.state, batch, heads, size, self.b.type.shape[-1])
        x, b, c = (self.by_head(value) for value in (self.x, self.b, self.c))
        steps = self.per_head(self.dt, self.lengths)
        logarithms = Mul(steps, Unsqueeze(self.wide(self.a), dims=(1,)))
        before, between, after = _decays(logarithms, tokens)
        scaled = Mul(x, Unsqueeze(steps, dims=(3,)))
        inside = Matmul(Mul(Matmul(c, _transposed(b)), between), scaled)
        y: Op = Add(inside, Mul(Matmul(c, Transpose(self.state, order=(0, 1, 3, 2))), before))
        if self.d is not None:
            y = Add(y, Mul(x, Unsqueeze(self.wide(self.d), dims=(1, 2))))
        added = Matmul(_transposed(Mul(scaled, after)), b)
        return self.as_x(y).result, Add(_kept(logarithms, self.state), added).result

    @np.errstate(under="ignore")
    def evaluate(
        self,
        x: Array,
        dt: Array,
        a: Array,
        b: Array,
        c: Array,
        state: Array,
        d: Array = None,
        lengths: Array = None,
    ) -> tuple[Array, Array]:
        y, dt = np.zeros(x.shape, _wide(x)), _masked(dt, lengths)
        b, c = (_by_head(value, x.shape[2]) for value in (b, c))
        for t in range(x.shape[1]):
            decay, step = np.exp(dt[:, t] * a)[..., None, None], dt[:, t, :, None, None]
            state = decay * state + step * x[:, t, :, :, None] * b[:, t, :, None, :]
            y[:, t] = np.sum(state * c[:, t, :, None, :], axis=-1)
        if d is not None:
            y += d[:, None] * x
        return y, state


@operation("gated_delta", safe_values={"lengths": 0})
class GatedDelta(Recurrence):
    """The gated delta rule (Yang et al., 2024), head by head: (y, state).

    x [B, S, H, V], the values; q and k [B, S, Hk, K], each key head for H/Hk consecutive value
    heads; g [B, S, H], the logarithms of decays, at most 0; beta [B, S, H]; state f32 [B, H, K, V].
    Per token state = exp(g) * state, then state += k (beta * (x - kᵀ state))ᵀ and y = qᵀ state.
    Computed in f32 (x in f64: all in f64); y in the dtype of x. Keys have norms of at most about 1.

    A call has `longest` tokens at most: the expansion solves a triangular system of the S tokens,
    whose inverse it makes from those of blocks of 1, 2, 4, ... tokens.
    """

    x: Operand
    q: Operand
    k: Operand
    g: Operand
    beta: Operand
    state: Operand
    lengths: OptionalOperand = optional()
    longest: int = 256

    def sharding_rule(self) -> str:
        key = "g!" if self.k.type.shape[2] == 1 else "h"
        keys, numbers = [f"b s! {key} k!"] * 2, ["b s! h"] * 2
        operands = ["b s! h v", *keys, *numbers, "b h k! v", "b"]
        return rule_text(map(str.split, operands), [["b", "s", "h", "v"], ["b", "h", "k", "v"]])

    def localized(self, results: tuple[TensorType, ...]) -> dict[str, Any]:
        return self.whole_groups(self.k.type.shape[2], results)

    def verify(self, module: Module) -> None:
        """No call has more than `longest` tokens."""
        tokens = self.x.type.shape[1]
        most = bind(tokens, {name: limits[2] for name, limits in module.dims.items()})
        if isinstance(most, int) and most > self.longest:
            raise Error(
                f"gated_delta computes {self.longest} tokens in a call, but a call may have "
                f"{tokens}={most}; compile with --dims {tokens}=min:typical:{self.longest} (longer "
                "prompts are computed in several calls)"
            )

    def expand(self) -> tuple[Value, ...]:
        self.check_tokens(4, self.q, self.k, self.g, self.beta)
        batch, tokens, heads, size = self.x.type.shape
        self.check_shape("g", self.g, batch, tokens, heads)
        self.check_shape("beta", self.beta, batch, tokens, heads)
        self.check_shape("q", self.q, *self.k.type.shape)
        self.check_dtype(self.state)
        self.check_shape("the state", self.state, batch, heads, self.k.type.shape[-1], size)
        if self.longest < 1:
            raise Error(f"gated_delta: longest is {self.longest}; a call has 1 token or more")
        x, q, k = (self.by_head(value) for value in (self.x, self.q, self.k))
        logarithms = self.per_head(self.g, self.lengths)
        beta = Unsqueeze(self.per_head(self.beta, self.lengths), dims=(3,))
        before, between, after = _decays(logarithms, tokens)
        written: Op = Mul(Sub(x, Mul(Matmul(k, self.state), before)), beta)
        if tokens != 1:
            scores = Mul(Mul(Matmul(k, _transposed(k)), between), beta)
            written = Matmul(self._inverse(scores, tokens), written)
        inside = Matmul(Mul(Matmul(q, _transposed(k)), between), written)
        y = Add(inside, Mul(Matmul(q, self.state), before))
        added = Matmul(_transposed(Mul(k, after)), written)
        return self.as_x(y).result, Add(_kept(logarithms, self.state), added).result

    def _inverse(self, scores: Op, tokens: DimLike) -> Op:
        """The inverse of 1 + the part below the diagonal of `scores` [B, H, S, S], 0 above it.

        That of [[a, 0], [c, b]] is [[A, 0], [-B c A, B]] where A and B are those of a and b.
        """
        zero = Full(value=0.0, dtype=self.computed)
        inverse: Op = Cast(_order(Eq, tokens), dtype=self.computed)
        block = 1
        while block < (tokens if isinstance(tokens, int) else self.longest):
            across = And(_order(Eq, tokens, 2 * block), _order(Ne, tokens, block))
            part: Op = Where(across, scores, zero)
            if block > 1:
                part = Matmul(inverse, Matmul(part, inverse))
            inverse = Sub(inverse, part)
            block *= 2
        return inverse

    @np.errstate(under="ignore")
    def evaluate(
        self,
        x: Array,
        q: Array,
        k: Array,
        g: Array,
        beta: Array,
        state: Array,
        lengths: Array = None,
    ) -> tuple[Array, Array]:
        if x.shape[1] > self.longest:
            raise Error(f"gated_delta computes {self.longest} tokens in a call, not {x.shape[1]}")
        y, g, beta = np.zeros(x.shape, _wide(x)), _masked(g, lengths), _masked(beta, lengths)
        q, k = (_by_head(value, x.shape[2]) for value in (q, k))
        for t in range(x.shape[1]):
            state = state * np.exp(g[:, t])[..., None, None]
            read = np.sum(state * k[:, t, :, :, None], axis=2)
            written = beta[:, t, :, None] * (x[:, t] - read)
            state = state + k[:, t, :, :, None] * written[:, :, None, :]
            y[:, t] = np.sum(state * q[:, t, :, :, None], axis=2)
        return y, state
