"""Functions over symbolic tensors, as `python -m irc.frontends.stubs` writes them."""

from collections.abc import Iterable, Sequence
from typing import Literal

from ..core import Function
from .tensor import Operand, SizeLike, Tensor

# fmt: off
# ruff: noqa: E501

def abs(x: Operand) -> Tensor:
    """|x|."""

def add(x: Operand, y: Operand) -> Tensor:
    """x + y."""

def all_gather(x: Operand, axis: str, dim: int, *, ways: int = 0) -> Tensor:
    """The operands of all ranks joined along `dim`, on every rank.

    Global view: `n@tp` -> `n`; the axis must be the innermost split of that dimension. Local view:
    n -> ways*n; parts that were padded stay so.

    Attributes:
        axis: str
        dim: int
        ways: int
    """

def all_reduce(
    x: Operand,
    axis: str,
    *,
    op: Literal['sum', 'max', 'min', 'prod'] = 'sum',
    ways: int = 0,
) -> Tensor:
    """The operands of all ranks combined elementwise, on every rank.

    Global view: `{sum tp}` -> complete, same shape; an operand that is no partial sum over the axis
    is an Error. Local view: same shape, also with max, min and prod.

    Attributes:
        axis: str
        op: "sum" | "max" | "min" | "prod"
        ways: int
    """

def all_reduce_rms_norm(
    x: Operand,
    residual: Operand,
    weight: Operand,
    axis: str,
    *,
    eps: float = 1e-06,
    offset: float = 0.0,
    ways: int = 0,
) -> Tensor:
    """The finished sum of x plus the residual, and its rms_norm: (normed, sum), as x both.

    sum = all_reduce(x) + residual; normed = rms_norm(sum, weight). x [..., N] is `{sum tp}` in the
    global view, residual [..., N] and weight [N] are whole. Attributes as those of all_reduce and
    rms_norm.

    Attributes:
        axis: str
        eps: float
        offset: float
        ways: int
    """

def all_to_all(x: Operand, axis: str, split: int, concat: int, *, ways: int = 0) -> Tensor:
    """Every rank sends part j along `split` to rank j and joins what arrives along `concat`.

    Global view: `concat` is `n@tp` and becomes whole, `split` becomes split. Local view:
    concat -> ways*concat, split -> split/ways; with split equal to concat the ranks exchange
    blocks, which the global view cannot express.

    Attributes:
        axis: str
        split: int
        concat: int
        ways: int
    """

def and_(x: Operand, y: Operand) -> Tensor:
    """Whether x and y are both true."""

def argmax(x: Operand, *, dim: int = -1, keep: bool = False) -> Tensor:
    """The position of the largest element along `dim` (the first of equals, or of NaN), as i32.

    Attributes:
        dim: int
        keep: bool
    """

def attention(
    q: Operand,
    k: Operand,
    v: Operand,
    head_dim: int,
    *,
    bias: Operand | None = None,
    mask: Operand | None = None,
    past: Operand | None = None,
    lengths: Operand | None = None,
    causal: bool = False,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    group: int = 0,
) -> Tensor:
    """softmax(scale * q kᵀ + bias) v, head by head, over the keys that are visible.

    q [B, S, H*D]; k and v either tokens [B, T, Hk*D] and [B, T, Hk*Dv], or caches [B, Hk, T, D] and
    [B, Hk, T, Dv]. D is `head_dim`; query head h reads key-value head h // (H/Hk) (grouped and
    multi-query attention: Ainslie et al., 2023; Shazeer, 2019). Result [B, S, H*Dv] in the dtype of
    q, computed in f32. T need not be S (cross attention).

    Query i of row b stands at key position past[b] + i (`past` i32 [B]: tokens before this call,
    past[b] + S <= T);
    without `past` at T - S + i, so that the last query sees the last key. Key j is visible where
    * `causal`: j <= position;
    * `window` w > 0: j > position - w (sliding window of w keys, the own one included);
    * `lengths` i32 [B]: j < lengths[b] (padding on the right, or the filled part of a cache);
    * `mask` bool [B|1, H|1, S|1, T]: true.
    A query that sees no key gives 0. `bias` (float, shape as mask) is added to the scores, after
    `softcap` c > 0 made them c*tanh(scores/c) (Gemma 2). `scale` is 1/sqrt(D) unless given.
    `group` > 0 states what H/Hk must be. Vaswani et al., 2017.

    Attributes:
        head_dim: int
        causal: bool
        window: int
        scale: float?
        softcap: float
        group: int
    """

def broadcast(x: Operand, axis: str, *, root: int = 0, ways: int = 0) -> Tensor:
    """The operand of rank `root` of the group, on every rank. Same shape.

    Global view: the operand is neither split nor pending over the axis.

    Attributes:
        axis: str
        root: int
        ways: int
    """

def cache_update(cache: Operand, new: Operand, past: Operand) -> Tensor:
    """The cache with this call's tokens written into it.

    cache [B, H, C, D], new [B, S, H*D] of the same dtype, past i32 [B]: token i of row b goes to
    position past[b] + i. Rows shorter than S write their padding behind their tokens, where the
    next call overwrites it. Writing beyond the capacity C is an error at run time. The result may
    alias the cache.
    """

def call(values: Iterable[Operand], callee: Function, *, stage: int = -1) -> tuple[Tensor, ...]:
    """Another function of the module, defined before this one, applied to the operands.

    Calls with a `stage` are those of a pipeline: each runs on the ranks that stand there along the
    mesh axis `pp`. Then all calls of a function have one, in rising order, and a value is used by
    its own stage and the next only.

    Attributes:
        callee: any
        stage: int
    """

def cast(x: Operand, dtype: str) -> Tensor:
    """x converted to `dtype`.

    Between floats to the nearest, halves to even; from float to integer towards zero, undefined
    where the integer cannot hold the value; between integers modulo 2 to the power of the width;
    to bool as x != 0.

    Attributes:
        dtype: str
    """

def ceil(x: Operand) -> Tensor:
    """The smallest integer not below x."""

def clip(
    x: Operand,
    *,
    low: int | float | bool | None = None,
    high: int | float | bool | None = None,
) -> Tensor:
    """x kept between `low` and `high`, either of which may be none; NaN stays NaN.

    Attributes:
        low: number?
        high: number?
    """

def collective_gather(x: Operand, axis: str, dim: int, *, root: int = 0, ways: int = 0) -> Tensor:
    """The operands joined along `dim` on rank `root`; zeros of that shape on the others.

    Global view: `n@tp` -> `n`, pending over tp. Local view: n -> ways*n.

    Attributes:
        axis: str
        dim: int
        root: int
        ways: int
    """

def collective_scatter(x: Operand, axis: str, dim: int, *, root: int = 0, ways: int = 0) -> Tensor:
    """Part i along `dim` of the operand of rank `root`, on rank i.

    Global view: `n` -> `n@tp`; the operand is neither split nor pending over the axis. Local view:
    n -> n/ways, which must be whole.

    Attributes:
        axis: str
        dim: int
        root: int
        ways: int
    """

def concat(values: Iterable[Operand], dim: int) -> Tensor:
    """The operands one after the other along dimension `dim`; all else is equal in them.

    Attributes:
        dim: int
    """

def constant(values: Sequence[float], *, shape: Sequence[int] = (), dtype: str = 'f32') -> Tensor:
    """At most 16 numbers, in row-major order, as a tensor of `shape`.

    Attributes:
        values: [number]
        shape: [int]
        dtype: str
    """

def cos(x: Operand) -> Tensor:
    """The cosine of x in radians."""

def cumsum(x: Operand, *, dim: int = -1, exclusive: bool = False) -> Tensor:
    """Running sums along `dim`: with this element, or without it where `exclusive`.

    Attributes:
        dim: int
        exclusive: bool
    """

def cyclic_embedding(
    ids: Operand,
    table: Operand,
    rows: int,
    parts: int,
    axis: str,
    *,
    scatter: int = -1,
    capacity: int = 0,
    queues: Sequence[int] = (),
) -> tuple[Tensor, ...]:
    """Rows of a table that is dealt out over `axis`, and how many ids found no room.

    ids [...]; an id outside 0 to `rows` - 1 gives zeros. table [N*R@axis, D]: part r of the N =
    `parts` has the rows r, r + N, r + 2*N, ..., R of them, as the step `.deal` lays them out.
    Results: [..., D], and i32[].

    Ids that are split over `axis` go to the ranks that have their rows, which send these back: the
    result is split alike. Ids that all ranks have give a result that is whole, or split in the
    dimension `scatter`. Every rank has room for `capacity` rows (0: for all) per other rank, whose
    ids get it in order; the rows of the others are zeros, and the second result counts them. Ids
    queue apart in each part where their dimensions are cut into `queues`, one number for each: as
    they are split, and as the result is scattered. Only in the global view.

    Attributes:
        rows: int
        parts: int
        axis: str
        scatter: int
        capacity: int
        queues: [int]
    """

def dequantize(x: Operand, scale: Operand, *, zero: Operand | None = None) -> Tensor:
    """(x - zero) * scale, where each scale holds for a block of x; of the dtype of scale.

    x [D0, D1, ...] is i4, u4, i8, u8, f8e4m3 or f8e5m2. scale has as many dimensions, and each
    divides that of x: [1, 1] is one scale for all, [N, 1] one per row, [N, K/128] one per 128
    elements of a row. zero, integers of x's dtype in the shape of scale, is 0 unless given.
    Computed in f32 and rounded once (ONNX DequantizeLinear). A split must not cut a block.
    """

def div(x: Operand, y: Operand) -> Tensor:
    """x / y in floats; integers have floor_div."""

def embedding(
    ids: Operand,
    table: Operand,
    *,
    inside: bool = False,
    sentinel: bool = False,
) -> Tensor:
    """Row ids[...] of table [V, D], as [..., D]; an id outside 0 to V-1 gives a row of zeros.

    With `inside` all ids are known to lie inside, so that nothing is checked; others are an error.
    With `sentinel` localize may put rows of zeros behind each rank's, for all other ids to find.

    Attributes:
        inside: bool
        sentinel: bool
    """

def eq(x: Operand, y: Operand) -> Tensor:
    """Whether x equals y, as bool; false where one is NaN."""

def erf(x: Operand) -> Tensor:
    """The error function: 2/sqrt(pi) times the integral of exp(-t*t) from 0 to x."""

def exp(x: Operand) -> Tensor:
    """e to the power x."""

def expand(x: Operand, shape: Sequence[SizeLike]) -> Tensor:
    """x repeated along dimensions of size 1, and along new ones in front, to fill `shape`.

    Attributes:
        shape: [dim]
    """

def flip(x: Operand, dims: Sequence[int]) -> Tensor:
    """x with the elements along `dims` in reverse order.

    Attributes:
        dims: [int]
    """

def floor(x: Operand) -> Tensor:
    """The largest integer not above x."""

def floor_div(x: Operand, y: Operand) -> Tensor:
    """x / y rounded down (towards minus infinity, as in Python): -7 by 2 is -4."""

def full(value: float, *, shape: Sequence[SizeLike] = (), dtype: str = 'f32') -> Tensor:
    """One number, repeated to fill `shape`.

    Attributes:
        value: number
        shape: [dim]
        dtype: str
    """

def gated_mlp(
    x: Operand,
    gate: Operand,
    up: Operand,
    *,
    gate_bias: Operand | None = None,
    up_bias: Operand | None = None,
    act: Literal['silu', 'gelu', 'gelu_tanh', 'quick_gelu', 'relu', 'squared_relu', 'sigmoid'] = 'silu',
) -> Tensor:
    """act(x · gateᵀ + gate_bias) * (x · upᵀ + up_bias).

    x [..., K], gate and up [N, K], the biases [N]; result [..., N]. Shazeer, 2020 (silu: SwiGLU,
    gelu: GEGLU, sigmoid: GLU).

    Attributes:
        act: "silu" | "gelu" | "gelu_tanh" | "quick_gelu" | "relu" | "squared_relu" | "sigmoid"
    """

def gather(x: Operand, indices: Operand, *, dim: int = 0) -> Tensor:
    """The slices of x at `indices` along `dim`, whose place the dimensions of indices take.

    numpy.take, with every index from 0 to the size of the dimension; others are an error.

    Attributes:
        dim: int
    """

def gather_elements(x: Operand, indices: Operand, dim: int) -> Tensor:
    """Per place of indices, the element of x there, but at `indices[place]` along `dim`.

    numpy.take_along_axis: indices has the shape of x, other than in `dim`. Every index lies in
    the dimension; others are an error.

    Attributes:
        dim: int
    """

def ge(x: Operand, y: Operand) -> Tensor:
    """Whether x >= y, as bool."""

def gelu(x: Operand, *, approximate: Literal['none', 'tanh'] = 'none') -> Tensor:
    """x * P(a standard normal number <= x) (Hendrycks and Gimpel, 2016).

    `approximate="none"` is x/2 * (1 + erf(x / sqrt 2)); `"tanh"` is the paper's
    x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))).

    Attributes:
        approximate: "none" | "tanh"
    """

def group_norm(
    x: Operand,
    groups: int,
    *,
    weight: Operand | None = None,
    bias: Operand | None = None,
    eps: float = 1e-05,
) -> Tensor:
    """Layer norm over each of `groups` groups of channels and all positions of them.

    x [B, C, ...] with C divisible by `groups`, weight and bias [C], result as x. Only the batch
    may be split over ranks. Wu and He, 2018.

    Attributes:
        groups: int
        eps: float
    """

def gt(x: Operand, y: Operand) -> Tensor:
    """Whether x > y, as bool."""

def iota(size: SizeLike, *, dtype: str = 'i32') -> Tensor:
    """0, 1, 2, ... up to `size - 1`, as a vector.

    Attributes:
        size: dim
        dtype: str
    """

def layer_norm(
    x: Operand,
    *,
    weight: Operand | None = None,
    bias: Operand | None = None,
    eps: float = 1e-05,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension.

    x [..., N], weight and bias [N] of any float dtype, result as x. Ba et al., 2016.

    Attributes:
        eps: float
    """

def le(x: Operand, y: Operand) -> Tensor:
    """Whether x <= y, as bool."""

def linear(x: Operand, weight: Operand, *, bias: Operand | None = None) -> Tensor:
    """x [..., K] times the transpose of weight [N, K], plus bias [N], is [..., N].

    The weight is stored as Hugging Face checkpoints store it: one row per output.
    """

def log(x: Operand) -> Tensor:
    """The natural logarithm; -infinity for 0, NaN for negative x."""

def log_softmax(x: Operand, *, dim: int = -1) -> Tensor:
    """The logarithm of softmax along `dim`, without its underflow.

    Attributes:
        dim: int
    """

def lt(x: Operand, y: Operand) -> Tensor:
    """Whether x < y, as bool."""

def matmul(x: Operand, y: Operand) -> Tensor:
    """x [..., M, K] times y [..., K, N] is [..., M, N]; leading dimensions broadcast."""

def maximum(x: Operand, y: Operand) -> Tensor:
    """The larger of x and y; NaN where one is NaN."""

def minimum(x: Operand, y: Operand) -> Tensor:
    """The smaller of x and y; NaN where one is NaN."""

def mod(x: Operand, y: Operand) -> Tensor:
    """x - y * floor(x / y), with the sign of y (as in Python): -7 by 2 is 1."""

def moe_combine(
    buffer: Operand,
    chosen: Operand,
    slots: Operand,
    weights: Operand,
    *,
    first: Operand | None = None,
    parts: int = 1,
) -> Tensor:
    """Per token, the weighted sum of what its experts made of it.

    buffer [E, parts*C, H], laid out as by moe_dispatch; chosen and slots [T, K] as for that;
    weights [T, K] of the dtype of the buffer. Result [T, H]: the sum over k of weights[t, k] *
    buffer[chosen[t, k], part*C + slots[t, k]]; a pair that was dropped adds nothing. With `first`
    i32[] the buffer holds the experts from that number on, and pairs of others add nothing: the
    ranks' results add up to the whole where each holds some of the experts. Experts that nobody
    chose may follow behind, as padding.

    Attributes:
        parts: int
    """

def moe_dispatch(
    x: Operand,
    chosen: Operand,
    slots: Operand,
    experts: int,
    *,
    first: Operand | None = None,
    parts: int = 1,
    capacity: SizeLike = 0,
) -> Tensor:
    """Every token at its places in the queues of the experts, and zeros where nobody stands.

    x [T, H]; chosen and slots [T, K] as moe_slots has them, with its `parts` and `capacity`. Result
    [experts, parts*C, H], where C is the capacity, or T/parts where that is 0: token t stands at
    [chosen[t, k], part*C + slots[t, k]]. With `first` i32[] the buffer holds the experts from that
    number on; tokens of others are left out. A slot beyond the capacity is an error at run time;
    which of two tokens in one place stays there is undefined.

    Attributes:
        experts: int
        parts: int
        capacity: dim
    """

def moe_slots(chosen: Operand, experts: int, *, parts: int = 1, capacity: SizeLike = 0) -> Tensor:
    """The place of every token in the queue of each expert that it chose, -1 where dropped.

    chosen [T, K]: K different experts per token, by number from 0 to `experts` - 1. Result i32
    [T, K]. The tokens are `parts` equal parts in a row, each with queues of its own. A pair of a
    token and a choice gets the next place in the queue of its part and expert, from 0, in the order
    of tokens and, for one token, of choices. A queue has `capacity` places; with 0 as many as a
    part has tokens, so that all have room. A pair that finds its queue full, or whose number is no
    expert's, gets -1: reduce_sum of slots < 0 counts what is dropped. Lepikhin et al., 2020.

    Attributes:
        experts: int
        parts: int
        capacity: dim
    """

def mul(x: Operand, y: Operand) -> Tensor:
    """x * y."""

def ne(x: Operand, y: Operand) -> Tensor:
    """Whether x differs from y, as bool; true where one is NaN."""

def neg(x: Operand) -> Tensor:
    """-x."""

def not_(x: Operand) -> Tensor:
    """Whether x is false."""

def one_hot(indices: Operand, size: SizeLike, *, dtype: str = 'f32') -> Tensor:
    """A new last dimension of `size`, 1 at the place that the index names and 0 elsewhere.

    An index below 0 or from `size` on gives only zeros.

    Attributes:
        size: dim
        dtype: str
    """

def or_(x: Operand, y: Operand) -> Tensor:
    """Whether x or y is true."""

def pad(
    x: Operand,
    before: Sequence[SizeLike],
    after: Sequence[SizeLike],
    *,
    value: float = 0,
) -> Tensor:
    """x with `before[i]` and `after[i]` elements of `value` around dimension i.

    Attributes:
        before: [dim]
        after: [dim]
        value: number
    """

def pow(x: Operand, y: Operand) -> Tensor:
    """x to the power y, in floats; NaN for a negative x and a fractional y."""

def quick_gelu(x: Operand) -> Tensor:
    """x * sigmoid(1.702 x), the approximation of gelu that CLIP uses."""

def rank(axis: str) -> Tensor:
    """This rank's position along the axis, from 0: i32[]. Only in the local view.

    Attributes:
        axis: str
    """

def reciprocal(x: Operand) -> Tensor:
    """1 / x."""

def reduce(
    x: Operand,
    axis: str,
    *,
    root: int = 0,
    op: Literal['sum', 'max', 'min', 'prod'] = 'sum',
    ways: int = 0,
) -> Tensor:
    """The operands combined elementwise on rank `root`; zeros on the others. Same shape.

    Global view: `{sum tp}` stays `{sum tp}`: the ranks together still hold the sum.

    Attributes:
        axis: str
        root: int
        op: "sum" | "max" | "min" | "prod"
        ways: int
    """

def reduce_max(x: Operand, dims: Sequence[int], *, keep: bool = False) -> Tensor:
    """The largest element over `dims`; NaN where there is one, the least value over nothing.

    Attributes:
        dims: [int]
        keep: bool
    """

def reduce_mean(x: Operand, dims: Sequence[int], *, keep: bool = False) -> Tensor:
    """The mean over `dims`, of floats.

    Attributes:
        dims: [int]
        keep: bool
    """

def reduce_min(x: Operand, dims: Sequence[int], *, keep: bool = False) -> Tensor:
    """The smallest element over `dims`; NaN where there is one, the greatest value over nothing.

    Attributes:
        dims: [int]
        keep: bool
    """

def reduce_prod(x: Operand, dims: Sequence[int], *, keep: bool = False) -> Tensor:
    """The product over `dims`.

    Attributes:
        dims: [int]
        keep: bool
    """

def reduce_scatter(
    x: Operand,
    axis: str,
    dim: int,
    *,
    op: Literal['sum', 'max', 'min', 'prod'] = 'sum',
    ways: int = 0,
) -> Tensor:
    """The operands combined elementwise; each rank keeps its part along `dim`.

    Global view: `n` of a `{sum tp}` -> `n@tp`, complete. Local view: n -> n/ways, which must be
    whole (an Error says to pad).

    Attributes:
        axis: str
        dim: int
        op: "sum" | "max" | "min" | "prod"
        ways: int
    """

def reduce_sum(x: Operand, dims: Sequence[int], *, keep: bool = False) -> Tensor:
    """The sum over `dims`; over a split dimension it leaves a pending sum.

    Attributes:
        dims: [int]
        keep: bool
    """

def relu(x: Operand) -> Tensor:
    """x where it is positive, else 0; NaN stays NaN."""

def repeat(x: Operand, dim: int, count: int) -> Tensor:
    """Every element along `dim`, `count` times in a row: [1, 2] by 2 is [1, 1, 2, 2].

    Attributes:
        dim: int
        count: int
    """

def reshape(x: Operand, shape: Sequence[SizeLike]) -> Tensor:
    """The same elements in row-major order, in another shape of as many elements.

    A split of the first dimension of a group of dimensions that are merged or divided passes
    through, as in `[B, S, 64@tp] -> [B, S, 8@tp, 8]`; every other split must be gathered before.

    Attributes:
        shape: [dim]
    """

def rms_norm(x: Operand, weight: Operand, *, eps: float = 1e-06, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x²) + eps) * (weight + offset), over the last dimension.

    x [..., N], weight [N] of any float dtype, result as x. `offset` is 1 in models that store the
    weight less one (Gemma). Zhang and Sennrich, 2019.

    Attributes:
        eps: float
        offset: float
    """

def rope(
    x: Operand,
    positions: Operand,
    head_dim: int,
    *,
    theta: float = 10000.0,
    kind: Literal['default', 'linear', 'dynamic', 'llama3', 'yarn', 'longrope'] = 'default',
    rotary_dim: int = 0,
    interleaved: bool = False,
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_positions: int = 0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    mscale: float = 0.0,
    mscale_all_dim: float = 0.0,
    truncate: bool = True,
    attention_factor: float | None = None,
    short_factors: Sequence[float] = (),
    long_factors: Sequence[float] = (),
) -> Tensor:
    """The pairs of x's features turned by position * inverse frequency, head by head.

    x [B, S, H*head_dim], positions i32|i64 [B, S], result as x. The first `rotary_dim` features of
    a head turn (0: all of them), the rest stay. A pair is (i, i + rotary_dim/2), or (2i, 2i+1) if
    `interleaved`. `theta` is the base of the frequencies. The kinds:

    * `default`; `linear`: positions divided by `factor`;
    * `dynamic` (NTK): a larger theta once the length passes `original_positions`;
    * `llama3`: `factor`, `low_freq_factor`, `high_freq_factor`, `original_positions`;
    * `yarn` (Peng et al., 2023): `factor`, `original_positions`, `beta_fast`, `beta_slow`,
      `mscale`, `mscale_all_dim`, `truncate`;
    * `longrope` (Ding et al., 2024): `short_factors` up to `original_positions`, then
      `long_factors`, one number per pair each.

    The length of `dynamic` and `longrope` is the largest position of the call plus one, over all
    rows, so they keep batch and sequence whole. `attention_factor` (yarn, longrope) multiplies the
    turned features; none derives it from the others. Angles are computed in f32.

    Attributes:
        head_dim: int
        theta: float
        kind: "default" | "linear" | "dynamic" | "llama3" | "yarn" | "longrope"
        rotary_dim: int
        interleaved: bool
        factor: float
        low_freq_factor: float
        high_freq_factor: float
        original_positions: int
        beta_fast: float
        beta_slow: float
        mscale: float
        mscale_all_dim: float
        truncate: bool
        attention_factor: float?
        short_factors: [float]
        long_factors: [float]
    """

def round(x: Operand) -> Tensor:
    """The nearest integer, halves to the even one: 0.5 gives 0, 1.5 gives 2."""

def rsqrt(x: Operand) -> Tensor:
    """1 / sqrt(x); infinity for 0, NaN for negative x."""

def scatter_elements(
    x: Operand,
    indices: Operand,
    updates: Operand,
    dim: int,
    *,
    reduction: Literal['none', 'add', 'mul', 'max', 'min'] = 'none',
) -> Tensor:
    """x with updates[place] put in at `indices[place]` along `dim`, for every place of indices.

    `reduction` says how an update meets what is there: it replaces it ("none": which of two
    updates to one element wins is undefined), or is combined with it. indices and updates have
    one shape, that of x other than in `dim`. Every index lies in the dimension.

    Attributes:
        dim: int
        reduction: "none" | "add" | "mul" | "max" | "min"
    """

def shard_slice(x: Operand, axis: str, dim: int, *, ways: int = 0) -> Tensor:
    """Every rank's own part along `dim` of a value that all hold; nothing is sent.

    `n` -> `n@tp`. Only in the global view: localize writes a gather by rank.

    Attributes:
        axis: str
        dim: int
        ways: int
    """

def sharded_topk(x: Operand, k: int, axis: str, *, dim: int = -1) -> tuple[Tensor, ...]:
    """topk along `dim`, which is split over `axis`: only k candidates of each rank are sent.

    x [..., n@tp, ...] -> values and positions (i32) [..., k, ...], on every rank; order and
    positions as topk has them. Only in the global view: localize writes a topk per rank, two
    all_gathers and a topk of the candidates.

    Attributes:
        k: int
        axis: str
        dim: int
    """

def sigmoid(x: Operand) -> Tensor:
    """1 / (1 + exp(-x))."""

def sign(x: Operand) -> Tensor:
    """-1, 0 or 1 as x is negative, zero or positive; NaN for NaN."""

def silu(x: Operand) -> Tensor:
    """x * sigmoid(x), also called swish (Elfwing et al., 2017)."""

def sin(x: Operand) -> Tensor:
    """The sine of x in radians."""

def slice(x: Operand, dim: int, start: SizeLike, stop: SizeLike, *, step: int = 1) -> Tensor:
    """Elements `start`, `start + step`, ... before `stop` of dimension `dim`.

    Both ends count from the front and lie within the dimension; what symbols leave open is
    checked at run time. The dimension must be whole.

    Attributes:
        dim: int
        start: dim
        stop: dim
        step: int
    """

def slot_ids(
    ids: Operand,
    sizes: Sequence[int],
    *,
    dim: int = 1,
    outside: Literal['zero', 'clamp', 'row', 'error'] = 'zero',
    row: int = 0,
) -> Tensor:
    """ids [B, slots, ...] + the number of rows of the slots before, each with a bound of its own.

    Slot s along `dim` has `sizes[s]` rows. What lies outside 0 to sizes[s]-1 is no id of another
    slot: it becomes -1 (`outside` is zero or error), the nearest id of its slot (clamp), or the
    slot's row `row` (row).

    Attributes:
        sizes: [int]
        dim: int
        outside: "zero" | "clamp" | "row" | "error"
        row: int
    """

def softmax(x: Operand, *, dim: int = -1) -> Tensor:
    """exp(x) / sum of exp(x) along `dim`; NaN where all are -infinity.

    Attributes:
        dim: int
    """

def softplus(x: Operand) -> Tensor:
    """log(1 + exp(x))."""

def split(x: Operand, dim: int, sizes: Sequence[SizeLike]) -> tuple[Tensor, ...]:
    """Consecutive parts of dimension `dim`, of the given sizes, which add up to the whole.

    Attributes:
        dim: int
        sizes: [dim]
    """

def sqrt(x: Operand) -> Tensor:
    """The square root; NaN for negative x."""

def squared_relu(x: Operand) -> Tensor:
    """relu(x) squared (So et al., 2021)."""

def squeeze(x: Operand, dims: Sequence[int]) -> Tensor:
    """x without the dimensions `dims`, each of which has size 1.

    Attributes:
        dims: [int]
    """

def stack(values: Iterable[Operand], *, dim: int = 0) -> Tensor:
    """The operands, all of one shape, along a new dimension, which is `dim` of the result.

    Attributes:
        dim: int
    """

def sub(x: Operand, y: Operand) -> Tensor:
    """x - y."""

def tanh(x: Operand) -> Tensor:
    """The hyperbolic tangent."""

def topk(x: Operand, k: SizeLike, *, dim: int = -1) -> tuple[Tensor, ...]:
    """The k largest elements along `dim`, largest first, and their positions as i32.

    Of equal elements the one in front comes first; NaN counts as the largest.

    Attributes:
        k: dim
        dim: int
    """

def transpose(x: Operand, order: Sequence[int]) -> Tensor:
    """x with its dimensions in another order: dimension i of the result is `order[i]` of x.

    Attributes:
        order: [int]
    """

def unsqueeze(x: Operand, dims: Sequence[int]) -> Tensor:
    """x with new dimensions of size 1, which stand at `dims` of the result.

    Attributes:
        dims: [int]
    """

def where(condition: Operand, x: Operand, y: Operand) -> Tensor:
    """x where the condition holds, else y; all three broadcast."""
