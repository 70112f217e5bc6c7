"""Attention of few new tokens per sequence, with rms_norm and rope of heads, and cache updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product

from irc.ir.core import Value
from irc.ir.dims import DimLike
from irc.ir.dims import product as product_of
from irc.ir.types import TensorType
from irc.ops import Attention, Dequantize, Full, FusedAttention
from irc.ops.fused_attention import cache_writes

from ..plan.core import Kernel
from ..plan.regime import Regime
from ..plan.template import Grid, Sizes, Template, launches_of
from .attention import FAR
from .cache_rows import pool_of
from .files import constants, helpers
from .kernels import number
from .rope_and_cache import Rows, constants_of_heads

AnyAttention = Attention | FusedAttention
WARP, CODE = helpers("warp.cuh"), helpers("heads.cuh", "decode_attention.cuh")
CODES = helpers("streaming/instructions.cuh", "cache_codes.cuh")
TOKENS = (1, 2, 4, 8)  # of a sequence, at most
CLUSTER_KEYS = 4096  # up to which splits are joined in a cluster
CLUSTER = 8  # blocks, at most
KEYS_OF_BLOCK = 64  # at least
OVERHEAD = 16  # tiles of 16 keys that take as long as what else a head takes
KEYS_OF_8_WARPS = 1024  # of a block, above which it has more warps
ROWS = 16  # of a block: queries of query heads
POWERS = tuple(1 << n for n in range(31))


@launches_of(Attention, FusedAttention)
def decode_attention(op: AnyAttention, regime: Regime) -> list[Template] | str | None:
    """The launch for few queries per sequence, or why there is none."""
    if regime.bucket(op.q.type.shape[1], (0, *TOKENS)) in (0, None):
        return None
    if refusal := _refusal(op, regime):
        return f"decode attention: {refusal}"
    shapes = shapes_of(op, regime)
    return [template(op, regime, shapes[regime.choose(_key(op, regime), shapes)])]


def _refusal(op: AnyAttention, regime: Regime) -> str:
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
    if op.results[0].type.shape[2] != op.q.type.shape[2]:
        return "it takes keys and values of equal width"
    if not isinstance(op, FusedAttention):
        keys, values = (pool_of(value)[1] for value in _read_caches(op))
        if keys is not values:
            return "it takes keys and values of the same pages"
    if isinstance(op, FusedAttention) and _norm_type(op) is None:
        return "it takes weights of norms of one dtype"
    if regime.bucket(op.q.type.shape[0], (0, (1 << 16) - 1)) in (0, None):
        return "it takes 1 to 65535 sequences"
    return "" if regime.bucket(_key_count(op), (0,)) is None else "there are no keys"


def codes_of(value: Value) -> tuple[Value, float] | None:
    """The codes of 8 bits in a cache, or in the pages of a pool, and their only scale."""
    dequantize = value.producer
    if not isinstance(dequantize, Dequantize) or dequantize.zero is not None:
        return None
    scale = dequantize.scale.producer
    takes = dequantize.x.type.ndim == 4 and dequantize.x.type.dtype in ("f8e4m3", "i8")
    if not takes or not isinstance(scale, Full) or product_of(dequantize.scale.type.shape) != 1:
        return None
    return dequantize.x, float(scale.value)


def _read_caches(op: Attention) -> tuple[Value, Value]:
    """What keys and values are read from: the codes that they are made of, if they are."""
    keys, values = codes_of(op.k), codes_of(op.v)
    if keys is None or values is None or keys[0].type.dtype != values[0].type.dtype:
        return op.k, op.v
    return keys[0], values[0]


def _caches(op: AnyAttention) -> tuple[Value, Value]:
    """Keys and values, before the new ones are among them, or the pools that have their pages."""
    if isinstance(op, FusedAttention):
        return op.k_cache, op.v_cache
    keys, values = _read_caches(op)
    return pool_of(keys)[0], pool_of(values)[0]


def _pages(op: AnyAttention) -> Value | None:
    """The pages of the keys, if they lie in a pool."""
    return op.pages if isinstance(op, FusedAttention) else pool_of(_read_caches(op)[0])[1]


def _has_caches(op: AnyAttention) -> bool:
    """Whether keys and values lie by head."""
    return isinstance(op, FusedAttention) or op.cached


def _key_count(op: AnyAttention) -> DimLike:
    """How many keys a sequence has room for."""
    if isinstance(op, FusedAttention):
        return cache_writes(op)[0].capacity
    return op.k.type.shape[2 if op.cached else 1]


def _norm_type(op: FusedAttention) -> str | None:
    """The dtype of the weights of norms, if it is one; that of q without norms."""
    kinds = {each.type.dtype for each in (op.q_norm, op.k_norm) if each is not None}
    return None if len(kinds) > 1 else next(iter(kinds), op.q.type.dtype)


@dataclass(frozen=True)
class Shape:
    """What blocks compute: `rows` of the queries of a key head, in `parts`, by `warps`.

    `tokens`: queries per sequence, at most; `group`: query heads of a key head. `splits` blocks
    share the keys of a head, `cluster` of them as a cluster: all of them, or 1. Where `splits` is
    0, a block per multiprocessor has its share of the keys of all heads. `resident`: blocks on a
    multiprocessor, for which the registers have to suffice. `ahead`: whether values and the next
    keys are loaded into registers while a block computes.
    """

    tokens: int
    group: int
    rows: int
    parts: int
    warps: int
    splits: int
    cluster: int
    resident: int
    ahead: bool


def shapes_of(op: AnyAttention, regime: Regime) -> Mapping[str, Shape]:
    """The shapes to choose from by name, that of the rules first."""
    first = _shape_of(op, regime)
    shapes = [first]
    several = first.splits or 1
    for splits in (several // 2, several, 2 * several):
        if 0 < splits <= regime.target.multiprocessors:
            cluster = _cluster_of(splits, _key_count(op), regime)
            for warps, resident in product((4, 8, 12, 16), (1, 2, 4)):
                changes = {"warps": warps, "resident": resident}
                shapes.append(replace(first, splits=splits, cluster=cluster, **changes))
    if _shares_pay(op, regime):
        shapes += [replace(first, splits=0, cluster=1, warps=n, resident=1) for n in (8, 12)]
    return {f"{s.splits} splits, {s.warps} warps, {s.resident} resident": s for s in shapes}


def _shares_pay(op: AnyAttention, regime: Regime) -> bool:
    """Whether sequences may have lengths so different that blocks share out their keys."""
    several = _exceeds(op.q.type.shape[0], 1, regime)
    return several and _exceeds(_key_count(op), CLUSTER_KEYS, regime)


def _key(op: AnyAttention, regime: Regime) -> str:
    """What the choice of a shape depends on."""
    rows = regime.bucket(op.q.type.shape[0], POWERS)
    tokens = regime.bucket(op.q.type.shape[1], TOKENS)
    keys = regime.bucket(_key_count(op), POWERS[10:])
    heads = f"{op.q.type.shape[2]} features, {op.key_heads} heads of {op.head_dim}"
    cell = _caches(op)[0].type.dtype
    heads += f" over {cell}" if cell != op.q.type.dtype else ""
    several = f" of {tokens}" if tokens != 1 else ""
    return f"decode attention {op.q.type.dtype}, {heads}, to {rows} rows{several}, to {keys} keys"


def _shape_of(op: AnyAttention, regime: Regime) -> Shape:
    """The shape that was fastest on an H200: a block per multiprocessor, or many small ones."""
    assert isinstance(op.key_heads, int) and isinstance(op.q.type.shape[2], int)
    group = op.q.type.shape[2] // op.head_dim // op.key_heads
    tokens = regime.bucket(op.q.type.shape[1], TOKENS)
    assert tokens is not None
    parts = -(-group * tokens // (ROWS if op.head_dim <= 128 else ROWS // 2))
    rows = -(-group * tokens // parts)
    heads, keys = op.q.type.shape[0] * (op.key_heads * parts), _key_count(op)
    splits, ahead = _splits_of(heads, keys, regime), op.head_dim <= 128 and rows <= 8
    codes = _caches(op)[0].type.dtype != op.q.type.dtype
    if splits == 1 and not codes and _shares_pay(op, regime):
        splits = 0
    many = splits and ahead and _exceeds(heads, regime.target.multiprocessors, regime)
    sums = rows * _padded(op.head_dim)  # of a warp, in shared memory
    most = 16 if codes else 12  # codes need fewer registers
    warps = most if sums <= 512 and _exceeds(keys, KEYS_OF_8_WARPS * splits, regime) else 8
    return Shape(
        tokens=tokens,
        group=group,
        rows=rows,
        parts=parts,
        warps=4 if many else warps,
        splits=splits,
        cluster=_cluster_of(splits, keys, regime),
        resident=4 if many else 1,
        ahead=ahead,
    )


def _splits_of(heads: DimLike, keys: DimLike, regime: Regime) -> int:
    """The number of blocks that share the keys of one key head, a power of two.

    Clusters of more than two blocks take half of the multiprocessors: of more clusters, some wait.
    """

    def fits(splits: int) -> bool:
        return not _exceeds(heads, regime.target.multiprocessors // splits, regime)

    splits = 1
    while fits(2 * splits) and _exceeds(keys, splits * KEYS_OF_BLOCK, regime):
        if splits > 1 and _cluster_of(2 * splits, keys, regime) > 1 and not fits(4 * splits):
            break
        splits *= 2
    return splits if splits <= CLUSTER or _exceeds(keys, CLUSTER_KEYS, regime) else CLUSTER


def _cluster_of(splits: int, keys: DimLike, regime: Regime) -> int:
    """How many of the blocks of a head are a cluster."""
    return 1 if splits > CLUSTER or _exceeds(keys, CLUSTER_KEYS, regime) else splits


def _exceeds(size: DimLike, limit: int, regime: Regime) -> bool:
    return regime.bucket(size, (limit,)) is None


def _padded(features: int) -> int:
    """The features of a row of sums."""
    return -(-features // 64) * 64


def template(op: AnyAttention, regime: Regime, shape: Shape) -> Template:
    """The launch."""
    assert isinstance(op.key_heads, int)
    heads, batch = op.key_heads * shape.parts, op.q.type.shape[0]
    source = Source(op, shape, regime)
    row = _padded(op.head_dim) + 4  # sums, the top and the total
    part = shape.rows * row
    scratch = batch * (heads * shape.splits * part if shape.splits > 1 else 0)
    blocks = regime.target.multiprocessors
    if not shape.splits:
        scratch = blocks * 2 * part

    def grid(sizes: Sizes) -> Grid:
        sequences = number(batch, sizes)
        if not shape.splits:
            return (min(blocks, sequences * heads * OVERHEAD), 1, 1)
        return (shape.splits, heads, sequences)

    return Template(
        kernel=source.kernel(),
        reads=source.reads,
        writes=source.writes,
        symbols=tuple(source.symbols),
        grid=grid,
        block=32 * shape.warps,
        cluster=shape.cluster,
        scratch=(TensorType("f32", (scratch,)),),  # also without clusters
        zeros=(TensorType("i32", (batch * heads,)),),
        in_place=dict(zip(source.updates, _caches(op), strict=False)),
        operations=(op,),
        waits=True,
        early=source.early,
    )


class Source:
    """The kernel of an attention and its arguments."""

    def __init__(self, op: AnyAttention, shape: Shape, regime: Regime) -> None:
        self.op, self.shape = op, shape
        cell = _caches(op)[0].type.dtype
        self.codes = cell if cell != op.q.type.dtype else ""
        new = op if isinstance(op, FusedAttention) else None
        self.updates = op.results[1:]
        self.rows = {"q": Rows.of(op.q)}
        self.index = {"pages": _pages(op), "past": op.past, "positions": None}
        self.index |= {"lengths": op.lengths, "sinks": op.sinks}
        self.norms: dict[str, Value] = {}
        if new is not None:
            self.rows |= {"k": Rows.of(new.k), "v": Rows.of(new.v)}
            self.index["positions"] = new.positions
            norms = {"q_norm": new.q_norm, "k_norm": new.k_norm}
            self.norms = {name: each for name, each in norms.items() if each is not None}
        rows = [each.value for each in self.rows.values()]
        fixed = [value for value in self.index.values() if value is not None] + [*_caches(op)]
        self.reads = tuple(dict.fromkeys([*rows, *self.norms.values(), *fixed]))
        self.writes = (*self.updates, op.results[0])
        # what no kernel writes in a step, but for the new rows
        before = [value for value in fixed if value is not op.sinks]
        constant = [regime.is_constant(value) for value in before[:-2]]
        is_early = all(constant) and all(value.producer is None for value in before[-2:])
        self.early = tuple(before) if is_early else ()
        self.symbols: dict[str, None] = {}
        self._fields = self._written_fields()

    def kernel(self) -> Kernel:
        """The kernel, called by a number of its own."""
        code = WARP + self._constants() + (CODES if self.codes else "") + CODE
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
        macros = {"CODES": "1"} if self.codes else {}
        return Kernel(name, f'{code}\nextern "C" __global__ void {bound} {name}{rest}', macros)

    def _written_fields(self) -> dict[str, str]:
        """Every field of the kernel's struct in C."""
        op = self.op
        fields: dict[str, str] = {}
        for name, rows in self.rows.items():
            fields[name] = f"(const u16*){self._pointer(rows.value)} + {rows.offset}"
            fields[f"{name}_stride"] = self._size(rows.stride)
        named = {**self.index, **self.norms}
        fields |= {k: self._pointer(value) for k, value in named.items() if value is not None}
        caches = self.updates or _caches(op)
        fields["keys"], fields["values"] = (f"(Cell*){self._pointer(each)}" for each in caches)
        heads, size, count = op.key_heads, op.head_dim, self._size(_key_count(op))
        keys = str(self._page) if self._page else count  # of a sequence, or of a page
        batch, tokens = (f"(int){self._size(size)}" for size in op.q.type.shape[:2])
        fields |= {"sequences": batch, "tokens": tokens, "count": f"(int){count}"}
        fields |= {"sequence": f"{keys} * {heads * size}"}
        fields["head"] = f"{keys} * {size}" if _has_caches(op) else str(size)
        fields["row"] = str(size if _has_caches(op) else heads * size)
        fields["out"] = f"(u16*){self._pointer(op.results[0])}"
        return fields | {"partial": "(Quad*)partial", "arrived": "(int*)arrived"}

    @property
    def _page(self) -> int:
        """The keys of a page; 0 without pages."""
        size = _caches(self.op)[0].type.shape[2]
        assert isinstance(size, int) or self.index["pages"] is None
        return size if isinstance(size, int) and self.index["pages"] is not None else 0

    def _pointer(self, value: Value) -> str:
        if value in self.writes:
            return f"out{self.writes.index(value)}"
        return f"p{self.reads.index(value)}"

    def _size(self, size: DimLike) -> str:
        if isinstance(size, int):
            return f"{size}LL"
        self.symbols |= dict.fromkeys(size.symbols())
        return f"({size})"

    def _constants(self) -> str:
        """The constants that the code takes, in C."""
        op, shape = self.op, self.shape
        assert isinstance(op.key_heads, int)
        kinds = ("PageIndex", "PastIndex", "PositionIndex", "LengthIndex", "SinkType")
        types: dict[str, Value | None] = dict(zip(kinds, self.index.values(), strict=True))
        types["NormType"] = self.norms.get("q_norm")
        values = {
            "D": op.head_dim,
            "GROUP": shape.group,
            "HEADS": op.key_heads * shape.parts,
            "TOKENS": shape.tokens,
            "ROWS": shape.rows,
            "PARTS": shape.parts,
            "WARPS": shape.warps,
            "THREADS": 32 * shape.warps,
            "PAGE": self._page,
            "WINDOW": min(op.window, FAR),
            "CLUSTER": shape.cluster,
            "EARLY": bool(self.early),
            "NEW": bool(self.updates),
            "CAUSAL": op.causal,
            "LENGTHS": op.lengths is not None,
            "SINKS": op.sinks is not None,
            "SPLITS": shape.splits,
            "OVERHEAD": OVERHEAD,
            "AHEAD": shape.ahead,
            "SCALE": float(op.score_scale),
            "SOFTCAP": float(op.softcap),
            "KEY_FACTOR": 1.0,
            "VALUE_FACTOR": 1.0,
        }
        head = "typedef u16 Cell;\ntypedef T Operand;\n"
        if self.codes:
            head = f"typedef {self.codes} Cell;\ntypedef f16 Operand;\n"
            head += constants({"INTEGERS": self.codes == "i8"})
            for name, cache in (("KEY_FACTOR", op.k), ("VALUE_FACTOR", op.v)):
                codes = codes_of(cache)
                assert codes is not None
                values[name] = codes[1]
        named = {k: v.type.dtype if v is not None else "i32" for k, v in types.items()}
        text = "".join(f"typedef {kind} {name};\n" for name, kind in named.items())
        return constants_of_heads(op) + head + text + constants(values)
