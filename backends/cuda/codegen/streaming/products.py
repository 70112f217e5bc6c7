"""Linears of few rows of x as streaming products, with what stands around them.

In front: rms_norm, which every block of some kernels computes itself.
Behind: the gate of a feed-forward (activation of one product times another), an activation, and a
residual. Of more than 16 rows, blocks along y of the grid have 16 each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from irc.ir.core import Value
from irc.ir.dims import DimLike, product
from irc.ir.dtypes import dtype
from irc.ops import Dequantize, FusedLinear, GatedMlp, Linear
from irc.ops.fused_linear import LinearParts

from ...plan.core import Kernel
from ...plan.regime import Regime
from ...plan.template import Grid, Sizes, Template, launches_of
from ..body import Body
from ..files import constants, helpers
from ..kernels import number
from .choices import MOST_ROWS, Choice, Codes, candidates

FLOATS = ("bf16", "f16")
WEIGHTS = (*FLOATS, "f8e4m3", "f8e5m2", "i8", "u8", "i4", "u4", "f4e2m1")
LARGEST_WEIGHT = 2**34 - 8  # bits
ROWS = (1, 2, 4, 8, MOST_ROWS, 4 * MOST_ROWS)  # the least of these has a kernel for some rows


@dataclass(frozen=True)
class Matrix:
    """The weights [N, K] of one linear: codes, and their scales and zero points if any."""

    codes: Value
    scale: Value | None
    zero: Value | None
    bias: Value | None

    @staticmethod
    def of(weight: Value, bias: Value | None) -> Matrix | str:
        """What a weight is dequantized from, or why no kernel reads it."""
        made = weight.producer
        matrix = Matrix(weight, None, None, bias)
        if isinstance(made, Dequantize):
            matrix = Matrix(made.x, made.scale, made.zero, bias)
        elif made is not None:
            return f"the weight is computed by {made.opname}"
        if matrix.codes.type.dtype not in WEIGHTS or (
            matrix.zero is not None and matrix.zero.type.dtype not in ("u4", "u8")
        ):
            return f"no streaming product reads weights of {matrix.codes.type.dtype}"
        if not all(isinstance(size, int) and size for size in matrix.codes.type.shape):
            return f"{matrix.codes.type} is empty or of unknown size"
        return matrix

    @property
    def parts(self) -> dict[str, Value]:
        """What it consists of, by name."""
        parts = {"codes": self.codes, "scale": self.scale, "zero": self.zero, "bias": self.bias}
        return {name: value for name, value in parts.items() if value is not None}

    def block(self, dim: int) -> int:
        """Elements along a dimension that share a scale."""
        if self.scale is None:
            return 1
        size, blocks = self.codes.type.shape[dim], self.scale.type.shape[dim]
        assert isinstance(size, int) and isinstance(blocks, int)  # of weights
        return size // blocks

    @property
    def types(self) -> list[tuple[str, object]]:
        """What two matrices have in common that one kernel reads."""
        return [(name, value.type.replicated) for name, value in self.parts.items()]


@dataclass(frozen=True)
class StreamedLinear:
    """One launch: the result [rows, N] of x [rows, K], one matrix or two, and what stands around.

    A result in f32 is the sum alone, which is not rounded.
    """

    op: Linear | GatedMlp | FusedLinear
    parts: LinearParts
    matrices: tuple[Matrix, ...]
    result: Value

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        n, k = self.matrices[0].codes.type.shape
        assert isinstance(n, int) and isinstance(k, int)  # of weights
        return n, k

    @property
    def rows(self) -> DimLike:
        """The rows of x."""
        return product(self.parts.x.type.shape[:-1])

    @property
    def codes(self) -> Codes:
        """How the weights are stored."""
        first = self.matrices[0]
        bits = dtype(first.codes.type.dtype).bits
        group = first.block(1) if first.scale is not None else 0
        return Codes(bits, group, first.zero is not None)

    def choose(self, regime: Regime) -> Choice | str:
        """The kernel for the rows of x, or why there is none."""
        n, k = self.shape
        rows = regime.bucket(self.rows, ROWS)
        if rows is None or (rows > MOST_ROWS and self.codes.bits == 16):
            most = ROWS[-1] if rows is None else MOST_ROWS
            return f"streaming products have at most {most} rows of {self.codes.bits}-bit weights"
        if n * k * self.codes.bits > LARGEST_WEIGHT:
            return f"weights {[n, k]} are too large"
        rows, gated = min(rows, MOST_ROWS), len(self.matrices) == 2
        ranks = max(1, self.parts.group_size)
        why, kernels = "", dict[str, Choice]()
        for answer in candidates(n, k, gated, self.codes, rows, regime.target, ranks):
            if isinstance(answer, Choice):
                kernels.setdefault(answer.name, answer)
            else:
                why = answer
        return kernels[regime.choose(self._key(rows), kernels)] if kernels else why

    def _key(self, rows: int) -> str:
        """What the choice of a kernel depends on."""
        (n, k), codes, kind = self.shape, self.codes, self.matrices[0].codes.type.dtype
        group = f" groups of {codes.group}" if 0 < codes.group < k else ""
        words = f"{self.parts.x.type.dtype} x {kind}{group} [{n}, {k}]"
        return f"linear {words}{' gated' if len(self.matrices) == 2 else ''}, {rows} rows"

    def template(self, choice: Choice, regime: Regime) -> Template:
        """The launch of the kernel that was chosen."""
        several = regime.bucket(self.rows, (MOST_ROWS,)) is None
        text, reads = self._source(choice), self._reads()
        body = Body()
        rows = body.size(self.rows)
        symbols = tuple(body.symbols)
        pointers = [f"const {v.type.dtype}* p{i}" for i, v in enumerate(reads.values())]
        arguments = [*pointers, "X* y", *(f"int size_{each}" for each in symbols)]
        bounds = f"__launch_bounds__({32 * choice.warps}, {choice.resident})"
        at = {key: f"p{i}" for i, key in enumerate(reads)}
        call = f"{{ {self._call(choice, at, rows, several)} }}\n"
        name = f"linear_rows_{sha256((text + call).encode()).hexdigest()[:8]}"
        head = f'extern "C" __global__ void {bounds} {name}({", ".join(arguments)}) '
        # weights, of the norm too, are read before the wait
        early = tuple(value for key, value in reads.items() if key not in ("x", "residual"))
        waits = all(map(regime.is_constant, early))

        def grid(sizes: Sizes) -> Grid:
            return choice.grid(-(-number(self.rows, sizes) // MOST_ROWS) if several else 1)

        return Template(
            kernel=Kernel(name, text + head + call),
            reads=tuple(reads.values()),
            writes=(self.result,),
            symbols=symbols,
            grid=grid,
            block=32 * choice.warps,
            cluster=choice.cluster,
            shared=lambda sizes: choice.shared,
            operations=(self.op,),
            waits=waits,
            early=early if waits else (),
        )

    def _reads(self) -> dict[str, Value]:
        reads: dict[str, Value] = {"x": self.parts.x}
        if self.parts.norm is not None:
            reads["gain"] = self.parts.norm
        for i, matrix in enumerate(self.matrices):
            reads |= {f"{name}{i}": value for name, value in matrix.parts.items()}
        if self.parts.residual is not None:
            reads["residual"] = self.parts.residual
        return reads

    def _call(self, choice: Choice, at: Mapping[str, str], rows: str, several: bool) -> str:
        matrices: list[str] = []
        for i in range(2):
            i = min(i, len(self.matrices) - 1)
            parts = [at.get(f"{part}{i}", "nullptr") for part in ("scale", "zero", "bias")]
            matrices.append(
                f"Matrix{{(const unsigned char*){at[f'codes{i}']}, {', '.join(parts)}}}"
            )
        x, y, residual = at["x"], "y", at.get("residual", "nullptr")
        before = ""
        if several:  # from the first row of this block on
            layer = "blockIdx.y" + (" / (BLOCKS / CLUSTER)" if choice.kernel == "chunks" else "")
            before = f"const int first = {MOST_ROWS} * ({layer}); "
            x, y = (
                f"{x} + (size_t)first * K",
                f"(X*)(({self.result.type.dtype}*)y + (size_t)first * N)",
            )
            residual = f"{residual} + (size_t)first * N" if "residual" in at else residual
            rows = f"min({MOST_ROWS}, {rows} - first)"
        arguments = f"{x}, {at.get('gain', 'nullptr')}, {', '.join(matrices)}, {residual}, {y}"
        if choice.kernel == "one_row":
            return f"stream_row({arguments});"
        return f"{before}stream_{choice.kernel}({arguments}, {rows});"

    def _source(self, choice: Choice) -> str:
        first, (n, k), codes, parts = self.matrices[0], self.shape, self.codes, self.parts
        x, norm = parts.x.type.dtype, parts.norm
        types = {
            "X": x,
            "W": first.codes.type.dtype,
            "S": first.scale.type.dtype if first.scale is not None else "f32",
            "G": norm.type.dtype if norm is not None else "f32",
            "Operand": "f16" if codes.bits < 16 else x,
        }
        flags = {
            "NORM": norm is not None,
            "GATED": len(self.matrices) == 2,
            "BIAS": first.bias is not None,
            "ACTIVATED": bool(parts.act),
            "RESIDUAL": parts.residual is not None,
            "UNROUNDED": self.result.type.dtype != x,
            "SCALED": first.scale is not None,
            "ZERO": codes.zero,
            "SCALED_X": codes.bits < 16 and x != "f16",
        }
        values = choice.constants | flags
        values |= {
            "BLOCKS": choice.blocks,
            "N": n,
            "K": k,
            "BITS": codes.bits,
            "ROW_BYTES": k * codes.bits // 8,
            "ROW_BLOCK": first.block(0),
            "GROUP": codes.group or k,
            "EPS": parts.eps,
            "GAIN_OFFSET": parts.offset,
        }
        text = "".join(f"typedef {value} {name};\n" for name, value in types.items())
        text += constants(values)
        text += f"INLINE float activated(float x) {{ return {parts.act}(x); }}\n"
        before = ("warp.cuh", "copies.cuh", "streaming/instructions.cuh")
        rest = helpers("streaming/results.cuh", f"streaming/{choice.kernel}.cuh")
        return helpers(*before) + text + rest


def linear_of(
    op: Linear | GatedMlp | FusedLinear, parts: LinearParts, result: Value
) -> StreamedLinear | str:
    """The launch of these parts of an operation, or why it cannot be a streaming product."""
    if parts.x.type.dtype not in FLOATS:
        return f"streaming products take {' or '.join(FLOATS)}, not {parts.x.type.dtype}"
    given = [] if parts.gate is None else [Matrix.of(parts.gate, parts.gate_bias)]
    given.append(Matrix.of(parts.weight, parts.bias))
    matrices = [matrix for matrix in given if isinstance(matrix, Matrix)]
    if len(matrices) < len(given):
        return next(why for why in given if isinstance(why, str))
    if matrices[0].types != matrices[-1].types:
        return "the gate and the other product have different types"
    return StreamedLinear(op, parts, tuple(matrices), result)


def streamed(
    op: Linear | GatedMlp | FusedLinear, parts: LinearParts, result: Value, regime: Regime
) -> Template | str:
    """The launch of these parts of an operation, or why there is none."""
    linear = linear_of(op, parts, result)
    if isinstance(linear, str):
        return linear
    choice = linear.choose(regime)
    if isinstance(choice, str):
        return choice
    if parts.norm is not None and not choice.has_norm(linear.codes):
        return f"{choice.name}, the kernel, has no rms_norm in front"
    return linear.template(choice, regime)


@launches_of(Linear, GatedMlp, FusedLinear)
def streamed_linear(
    op: Linear | GatedMlp | FusedLinear, regime: Regime
) -> list[Template] | str | None:
    """The launch of a whole operation; sums over ranks are those of peer_memory.py."""
    parts = LinearParts.of(op)
    if parts.axis:
        return None
    template = streamed(op, parts, op.result, regime)
    return template if isinstance(template, str) else [template]
