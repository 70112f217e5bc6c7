"""Attention of one new token per sequence, with rms_norm and rope of heads, and cache updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from irc.ir.core import Op, Value
from irc.ir.dims import DimLike
from irc.ir.types import TensorType
from irc.ops import Attention, CacheUpdate, Reshape, RmsNorm, Rope, Slice, Split
from irc.ops.rope import inverse_frequencies

from ..plan.core import Kernel
from ..plan.template import Sizes, Template
from .attention import FAR
from .kernels import number

FOLDER = Path(__file__).parent
CODE = (FOLDER / "decode_attention.cuh").read_text(encoding="utf-8")
WARP = (FOLDER / "warp.cuh").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Rows:
    """Where new rows lie: from `offset` on in every sequence of a value [B, 1, features]."""

    value: Value
    offset: int = 0

    @property
    def stride(self) -> DimLike:
        """Elements from one sequence to the next."""
        return self.value.type.shape[2]


@dataclass(frozen=True)
class Site:
    """An attention with the operations around it that the kernel computes."""

    attention: Attention
    q: Rows
    k: Rows | None  # the new key and value, where the kernel writes the caches
    v: Rows | None
    keys: Value  # before the update, if there is one
    values: Value
    rope: Rope | None
    norm: RmsNorm | None  # of the query's heads; that of the key's has other weights
    gains: tuple[Value, ...]  # the weights of both
    covers: tuple[Op, ...]

    @property
    def updates(self) -> tuple[Value, ...]:
        """The caches that the kernel writes."""
        return (self.attention.k, self.attention.v) if self.k else ()

    @property
    def key_heads(self) -> int:
        """How many key heads there are."""
        found = self.attention.key_heads
        assert isinstance(found, int)
        return found

    @property
    def count(self) -> DimLike:
        """How many keys a sequence has room for."""
        return _keys(self.attention)


def refusal(op: Attention, sizes: Sizes) -> str:
    """Why the kernel cannot compute an attention; empty if it can."""
    dtype, size = op.q.type.dtype, op.head_dim
    if dtype not in ("bf16", "f16"):
        return f"it takes bf16 and f16, not {dtype}"
    if op.bias is not None or op.mask is not None:
        return "it takes neither a bias nor a mask"
    if size % 8 or not 16 <= size <= 256:
        return f"it takes heads of 16 to 256 features, a multiple of 8, not {size}"
    if not isinstance(op.key_heads, int) or not isinstance(op.q.type.shape[2], int):
        return "it takes a fixed number of heads"
    width = op.v.type.shape[3] if op.cached else op.v.type.shape[2]
    if width != op.k.type.shape[3 if op.cached else 2]:
        return "it takes keys and values of equal width"
    if not 0 < number(op.q.type.shape[0], sizes) < 1 << 16:
        return "it takes 1 to 65535 sequences"
    return "" if number(_keys(op), sizes) else "there are no keys"


def _keys(op: Attention) -> DimLike:
    return op.k.type.shape[2 if op.cached else 1]


def find_site(op: Attention) -> Site:
    """What the kernel computes, as much as fits: rms_norm and rope of heads, and the updates."""
    updates = _updates(op)
    covers: list[Op] = [op, *(updates or ())]
    new = [op.q, *([updates[0].new] if updates else [])]  # the query, and the key if it is new
    ropes = [_only_rope(value, op.head_dim) for value in new]
    rope = ropes[0] if _are_alike(ropes, "positions") else None
    if rope is not None:
        covers += [each for each in ropes if each]
        new = [each.x for each in ropes if each]
    norms = [_head_norm(value, op.head_dim) for value in new]
    gains: tuple[Value, ...] = ()
    norm = norms[0] if _are_alike(norms) else None
    if norm is not None:
        found = [each for each in norms if each]
        gains = tuple(each.weight for each in found)
        covers += [
            part for value, each in zip(new, found, strict=True) for part in _parts(value, each)
        ]
        new = [each.x.producer.operands[0] for each in found if each.x.producer]
    q, *rest = [_rows(value) for value in [*new, *([updates[1].new] if updates else [])]]
    k, v = rest or (None, None)
    keys, values = (each.cache for each in updates) if updates else (op.k, op.v)
    return Site(op, q, k, v, keys, values, rope, norm, gains, tuple(covers))


def _are_alike(ops: Sequence[Op | None], *operands: str) -> bool:
    """Whether all are there, with the same attributes and the same values of some operands."""
    first = ops[0]
    return first is not None and all(
        op is not None
        and op.attributes == first.attributes
        and all(getattr(op, name) is getattr(first, name) for name in operands)
        for op in ops
    )


def _head_norm(value: Value, head_dim: int) -> RmsNorm | None:
    """The rms_norm of heads [B, 1, H, D] that a value [B, 1, H*D] comes from, of one use each."""
    out = value.producer
    norm = out.operands[0].producer if isinstance(out, Reshape) else None
    if not isinstance(norm, RmsNorm) or norm.x.type.shape[-1] != head_dim:
        return None
    before = norm.x.producer
    whole = isinstance(before, Reshape) and before.x.type.shape == value.type.shape
    once = all(sum(v.users.values()) == 1 for v in (value, norm.result, norm.x))
    return norm if whole and once and norm.weight.type.dtype == value.type.dtype else None


def _parts(value: Value, norm: RmsNorm) -> list[Op]:
    """The norm and the reshapes on both sides of it."""
    return [op for op in (value.producer, norm, norm.x.producer) if op is not None]


def _only_rope(value: Value, head_dim: int) -> Rope | None:
    """The rope of a value that has one use, with the same angles for every call."""
    op = value.producer
    if not isinstance(op, Rope) or op.by_length or op.head_dim != head_dim:
        return None
    return op if sum(value.users.values()) == 1 else None


def _updates(op: Attention) -> tuple[CacheUpdate, CacheUpdate] | None:
    """The updates of both caches with the token of this call, where nothing else reads them."""
    k, v = op.k.producer, op.v.producer
    if not isinstance(k, CacheUpdate) or not isinstance(v, CacheUpdate) or k is v:
        return None
    if op.past is None or not (k.past is v.past is op.past) or k.cache is v.cache:
        return None
    return (k, v) if len(k.cache.users) == len(v.cache.users) == 1 else None


def _rows(value: Value) -> Rows:
    """The rows of a value, seen through slices and splits of its features.

    The kernel loads eight features at once.
    """
    op, found = value.producer, Rows(value)
    if isinstance(op, Slice) and op.dim % 3 == 2 and op.step == 1:
        start: DimLike = op.start
    elif isinstance(op, Split) and op.dim % 3 == 2:
        start = 0
        for size in op.sizes[: op.results.index(value)]:
            start = start + size
    else:
        return found
    width = op.x.type.shape[2]
    if not isinstance(start, int) or not isinstance(width, int) or start % 8 or width % 8:
        return found
    return Rows(op.x, start)


@dataclass(frozen=True)
class Shape:
    """What blocks compute: `rows` of the `group` query heads of a key head, in `parts`, by `warps`.

    `splits` blocks share the keys of a head, `cluster` of them as a cluster: all of them, or 1.
    `resident`: blocks on a multiprocessor, for which the registers have to suffice. `ahead`:
    whether values and the next keys are loaded into registers while a block computes.
    """

    group: int
    rows: int
    parts: int
    warps: int
    splits: int
    cluster: int
    resident: int
    ahead: bool


def padded(features: int) -> int:
    """The features of a row of sums."""
    return -(-features // 64) * 64


def template(site: Site, sizes: Sizes, shape: Shape) -> Template:
    """The launch."""
    op = site.attention
    heads, batch = site.key_heads * shape.parts, number(op.q.type.shape[0], sizes)
    source = Source(site, shape)
    row = padded(op.head_dim) + 4  # sums, the top and the total
    shared = batch * heads * shape.splits if shape.splits > 1 else 0  # also without clusters
    return Template(
        kernel=source.kernel(),
        reads=source.reads,
        writes=source.writes,
        symbols=source.symbols,
        grid=lambda _: (shape.splits, heads, batch),
        block=32 * shape.warps,
        cluster=shape.cluster,
        scratch=(TensorType("f32", (shared * shape.rows * row,)),),
        zeros=(TensorType("i32", (batch * heads,)),),
        in_place=dict(zip(site.updates, (site.keys, site.values), strict=False)),
        operations=site.covers,
        waits=True,
    )


class Source:
    """The kernel of a site and its arguments."""

    def __init__(self, site: Site, shape: Shape) -> None:
        op = site.attention
        self.site, self.shape = site, shape
        positions = site.rope.positions if site.rope else None
        rows = [each.value for each in (site.q, site.k, site.v) if each]
        fixed = [op.past, positions, op.lengths, op.sinks]
        fixed = [value for value in fixed if value is not None]
        fixed += [site.keys, site.values]
        # what no kernel writes in a step, but for the new rows
        self.early = all(each.producer is None for each in fixed)
        self.reads = tuple(dict.fromkeys([*rows, *site.gains, *fixed]))
        self.writes = (*site.updates, op.result)
        self._symbols: dict[str, None] = {}
        self._fields = self._written_fields(positions)
        self.symbols = tuple(self._symbols)

    def kernel(self) -> Kernel:
        """The kernel, called by a number of its own."""
        code = "\n".join([WARP, *self._constants(), CODE])
        bound = f"__launch_bounds__(THREADS, {self.shape.resident})"
        arguments = [f"const {v.type.dtype}* p{i}" for i, v in enumerate(self.reads)]
        arguments += [f"{v.type.dtype}* out{i}" for i, v in enumerate(self.writes)]
        arguments += ["f32* partial", "i32* arrived", *(f"int size_{s}" for s in self.symbols)]
        lines = [f"  const long long {each} = size_{each};" for each in self.symbols]
        lines += ["  Decode a = {};", *(f"  a.{k} = {v};" for k, v in self._fields.items())]
        rest = f"({', '.join(arguments)}) {{\n" + "\n".join(
            [*lines, "  decode_attention(a);", "}\n"]
        )
        name = f"decode_attention_{sha256((code + bound + rest).encode()).hexdigest()[:8]}"
        return Kernel(name, f'{code}\nextern "C" __global__ void {bound} {name}{rest}')

    def _written_fields(self, positions: Value | None) -> dict[str, str]:
        """Every field of the kernel's struct in C."""
        op, site = self.site.attention, self.site
        fields: dict[str, str] = {}
        for name, rows in (("q", site.q), ("k", site.k), ("v", site.v)):
            if rows:
                fields[name] = f"(const u16*){self._pointer(rows.value)} + {rows.offset}"
                fields[f"{name}_stride"] = self._size(rows.stride)
        named = {"past": op.past, "positions": positions, "lengths": op.lengths, "sinks": op.sinks}
        fields |= {k: self._pointer(value) for k, value in named.items() if value is not None}
        for name, gain in zip(("q_gain", "k_gain"), site.gains, strict=False):
            fields[name] = self._pointer(gain)
        caches = site.updates or (site.keys, site.values)
        fields["keys"], fields["values"] = (f"(u16*){self._pointer(each)}" for each in caches)
        heads, size, count = site.key_heads, op.head_dim, self._size(site.count)
        fields |= {"count": f"(int){count}", "sequence": f"{count} * {heads * size}"}
        fields["head"] = f"{count} * {size}" if op.cached else str(size)
        fields["row"] = str(size if op.cached else heads * size)
        fields["out"] = f"(u16*){self._pointer(op.result)}"
        return fields | {"partial": "(Quad*)partial", "arrived": "(int*)arrived"}

    def _pointer(self, value: Value) -> str:
        if value in self.writes:
            return f"out{self.writes.index(value)}"
        return f"p{self.reads.index(value)}"

    def _size(self, size: DimLike) -> str:
        if isinstance(size, int):
            return f"{size}LL"
        self._symbols |= dict.fromkeys(size.symbols())
        return f"({size})"

    def _constants(self) -> list[str]:
        """The constants that the code takes, in C."""
        op, rope, shape = self.site.attention, self.site.rope, self.shape
        index = {
            "PastIndex": op.past,
            "PositionIndex": rope.positions if rope else None,
            "LengthIndex": op.lengths,
            "SinkType": op.sinks,
        }
        whole = {
            "D": op.head_dim,
            "GROUP": shape.group,
            "ROWS": shape.rows,
            "PARTS": shape.parts,
            "WARPS": shape.warps,
            "THREADS": 32 * shape.warps,
            "WINDOW": min(op.window, FAR),
            "CLUSTER": shape.cluster,
        }
        flags = {
            "EARLY": self.early,
            "NEW": self.site.k is not None,
            "CAUSAL": op.causal,
            "LENGTHS": op.lengths is not None,
            "SINKS": op.sinks is not None,
            "SPLIT": shape.splits > 1,
            "AHEAD": shape.ahead,
        }
        numbers = {"SCALE": op.score_scale, "SOFTCAP": op.softcap}
        return [
            *constants_of_heads(self.site),
            "typedef T GainType;",
            *(f"typedef {v.type.dtype if v is not None else 'i32'} {k};" for k, v in index.items()),
            *(f"constexpr int {name} = {value};" for name, value in whole.items()),
            *(f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()),
            *(f"constexpr float {name} = {float(value)!r};" for name, value in numbers.items()),
        ]


def constants_of_heads(site: Site) -> list[str]:
    """The constants about the dtype, rms_norm and rope of heads, in C."""
    rope, norm = site.rope, site.norm
    frequencies, factor = inverse_frequencies(rope) if rope else ([0.0], 1.0)
    flags = {
        "NORM": norm is not None,
        "ROPE": rope is not None,
        "INTERLEAVED": rope is not None and rope.interleaved,
    }
    eps, offset = (norm.eps, norm.offset) if norm else (0.0, 0.0)
    numbers = {"FACTOR": factor, "EPS": eps, "OFFSET": offset}
    return [
        f"typedef {site.attention.q.type.dtype} T;",
        f"constexpr int TURNED = {rope.turned if rope else 0};",
        *(f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()),
        *(f"constexpr float {name} = {_text(value)};" for name, value in numbers.items()),
        f"__device__ const float FREQUENCY[] = {{{', '.join(map(_text, frequencies))}}};",
    ]


def _text(number: float) -> str:
    """A number of f32 in C, exactly."""
    return f"(float){float(number)!r}"
