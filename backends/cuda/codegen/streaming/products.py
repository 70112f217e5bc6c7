"""Linear operations of few rows as streaming products, with what stands around them.

In front: rms_norm, which every block computes itself, but for several rows and 16-bit weights.
Behind: the gate of a feed-forward (activation of one product times another), and a residual.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256

from irc.ir.core import Op, Value
from irc.ir.dims import Dim, DimLike, bind, product
from irc.ir.dtypes import dtype
from irc.ops import (
    Add,
    AddRmsNorm,
    Dequantize,
    Gelu,
    Linear,
    Mul,
    QuickGelu,
    Relu,
    RmsNorm,
    Sigmoid,
    Silu,
    SquaredRelu,
)

from ...plan.core import Kernel
from ...plan.template import Fused, Sizes, Template, Tuning, fusion
from ...tuning import used
from ..files import helpers
from ..norms import norm_of_sum
from .choices import MOST_ROWS, Choice, Codes, candidates, target

FLOATS = ("bf16", "f16")
WEIGHTS = (*FLOATS, "f8e4m3", "f8e5m2", "i8", "u8", "i4", "u4", "f4e2m1")
FAR = 2**31 - 1


@dataclass(frozen=True)
class Matrix:
    """The weights [N, K] of one linear: codes, and their scales and zero points if any."""

    codes: Value
    scale: Value | None = None
    zero: Value | None = None
    bias: Value | None = None

    def alike(self, other: Matrix) -> bool:
        """Whether one kernel can read both."""

        def types(matrix: Matrix) -> list[tuple[str, object] | None]:
            found = (matrix.codes, matrix.scale, matrix.zero, matrix.bias)
            return [None if v is None else (v.type.dtype, v.type.shape) for v in found]

        return types(self) == types(other)


@dataclass(frozen=True)
class Product:
    """One launch: y [rows, N] of x [rows, K], one matrix or two, and what stands around it."""

    x: Value
    matrices: tuple[Matrix, ...]
    result: Value
    operations: tuple[Op, ...]
    activation: str = "0"
    norm: RmsNorm | AddRmsNorm | None = None
    residual: Value | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        n, k = self.matrices[0].codes.type.shape
        assert isinstance(n, int) and isinstance(k, int)  # of weights
        return n, k

    @property
    def source(self) -> Value:
        """What is read of x: what the norm reads, where the kernel computes it."""
        if self.norm is None:
            return self.x
        return self.norm.x if isinstance(self.norm, RmsNorm) else self.norm.results[1]

    @property
    def codes(self) -> Codes:
        """How the weights are stored."""
        first = self.matrices[0]
        return Codes(
            dtype(first.codes.type.dtype).bits,
            self._block(1) if first.scale is not None else 0,
            first.zero is not None,
        )

    def _block(self, dim: int) -> int:
        """Elements along a dimension that share a scale."""
        scale = self.matrices[0].scale
        if scale is None:
            return 1
        blocks = scale.type.shape[dim]
        assert isinstance(blocks, int)
        return self.shape[dim] // blocks

    def template(self, choice: Choice) -> Template:
        """The launch of the kernel that was chosen."""
        if "PIECE" not in choice.constants and self.codes.bits == 16 and self.norm is not None:
            return replace(self, norm=None).template(choice)
        text, reads = self._source(choice), self._reads()
        name = f"linear_rows_{sha256(text.encode()).hexdigest()[:8]}"
        symbols = tuple(_symbols(self.x.type.shape[:-1]))
        pointers = [f"const {v.type.dtype}* p{i}" for i, v in enumerate(reads.values())]
        arguments = [*pointers, "X* y", *(f"int size_{each}" for each in symbols)]
        bounds = f"__launch_bounds__({32 * choice.warps}, 1)"
        sizes = "".join(f"const long long {each} = size_{each}; " for each in symbols)
        at = {key: f"p{i}" for i, key in enumerate(reads)}
        body = f"{{ {sizes}{self._call(choice, at)} }}\n"
        head = f'extern "C" __global__ void {bounds} {name}({", ".join(arguments)}) '
        return Template(
            kernel=Kernel(name, text + head + body),
            reads=tuple(reads.values()),
            writes=(self.result,),
            symbols=symbols,
            grid=lambda sizes: (choice.blocks, 1, 1),
            block=32 * choice.warps,
            shared=lambda sizes: choice.shared,
            operations=self.operations,
            # weights, of the norm too, are read before the wait
            waits=all(v.producer is None for k, v in reads.items() if k not in ("x", "residual")),
        )

    def _reads(self) -> dict[str, Value]:
        found: dict[str, Value] = {"x": self.source}
        if self.norm is not None:
            found["gain"] = self.norm.weight
        for i, matrix in enumerate(self.matrices):
            parts = {"codes": matrix.codes, "scale": matrix.scale, "zero": matrix.zero}
            for part, value in (parts | {"bias": matrix.bias}).items():
                if value is not None:
                    found[f"{part}{i}"] = value
        if self.residual is not None:
            found["residual"] = self.residual
        return found

    def _call(self, choice: Choice, at: Mapping[str, str]) -> str:
        matrices: list[str] = []
        for i in range(2):
            i = min(i, len(self.matrices) - 1)
            parts = [at.get(f"{part}{i}", "nullptr") for part in ("scale", "zero", "bias")]
            matrices.append(
                f"Matrix{{(const unsigned char*){at[f'codes{i}']}, {', '.join(parts)}}}"
            )
        gain, residual = at.get("gain", "nullptr"), at.get("residual", "nullptr")
        arguments = f"{at['x']}, {gain}, {', '.join(matrices)}, {residual}, y"
        if "PIECE" in choice.constants:
            return f"stream_row({arguments});"
        rows = " * ".join(f"({size})" for size in self.x.type.shape[:-1]) or "1"
        return f"stream_tiles({arguments}, (int)({rows}));"

    def _source(self, choice: Choice) -> str:
        first, (n, k), codes = self.matrices[0], self.shape, self.codes
        x, kind = self.x.type.dtype, first.codes.type.dtype
        norm = self.norm
        types = {
            "X": x,
            "W": kind,
            "S": first.scale.type.dtype if first.scale is not None else "f32",
            "G": norm.weight.type.dtype if norm is not None else "f32",
            "Operand": "f16" if codes.bits < 16 else x,
        }
        flags = {
            "NORM": norm is not None,
            "GATED": len(self.matrices) == 2,
            "BIAS": first.bias is not None,
            "RESIDUAL": self.residual is not None,
            "UNROUNDED": self.result.type.dtype != x,
            "SCALED": first.scale is not None,
            "ZERO": codes.zero,
            "SCALED_X": codes.bits < 16 and x != "f16",
        }
        numbers = choice.constants | {
            "BLOCKS": choice.blocks,
            "N": n,
            "K": k,
            "BITS": codes.bits,
            "ROW_BYTES": k * codes.bits // 8,
            "ROW_BLOCK": self._block(0),
            "GROUP": codes.group or k,
            "ACTIVATION": self.activation,
        }
        floats = {
            "EPS": norm.eps if norm is not None else 0.0,
            "GAIN_OFFSET": norm.offset if norm is not None else 0.0,
        }
        lines = [f"typedef {value} {name};" for name, value in types.items()]
        lines += [f"constexpr bool {name} = {str(on).lower()};" for name, on in flags.items()]
        lines += [f"constexpr int {name} = {value};" for name, value in numbers.items()]
        lines += [f"constexpr float {name} = {value!r}f;" for name, value in floats.items()]
        files = ["streaming/instructions.cuh", "streaming/results.cuh"]
        files.append(f"streaming/{'one_row' if 'PIECE' in choice.constants else 'tiles'}.cuh")
        before = helpers("warp.cuh", files[0])
        return before + "\n".join(lines) + "\n" + helpers(*files[1:])


def _symbols(shape: tuple[DimLike, ...]) -> list[str]:
    return list(dict.fromkeys(s for dim in shape if isinstance(dim, Dim) for s in dim.symbols()))


def chosen(found: Product, rows: int) -> Choice | str:
    """The kernel for so many rows of x, or why there is none."""
    n, k = found.shape
    if max(n * k * found.codes.bits // 8, n * rows) > FAR * 8:
        return f"weights {[n, k]} are too large"
    tuned = used().get(_key(found, rows))
    if tuned is not None and tuned in (known := _variants(found, rows)):
        return known[tuned]
    answers = list(_candidates(found, rows))
    return next((each for each in answers if isinstance(each, Choice)), answers[-1])


def _candidates(found: Product, rows: int) -> Iterator[Choice | str]:
    return candidates(*found.shape, len(found.matrices) == 2, found.codes, rows, target())


def _key(found: Product, rows: int) -> str:
    """What the choice of a kernel depends on."""
    (n, k), codes, kind = found.shape, found.codes, found.matrices[0].codes.type.dtype
    group = f" groups of {codes.group}" if 0 < codes.group < k else ""
    rows = 1 << (rows - 1).bit_length()
    words = f"{found.x.type.dtype} x {kind}{group} [{n}, {k}]"
    return f"linear {words}{' gated' if len(found.matrices) == 2 else ''}, {rows} rows"


def _variants(found: Product, rows: int) -> dict[str, Choice]:
    """The candidates by name, that of the rules first."""
    known: dict[str, Choice] = {}
    for each in _candidates(found, rows):
        if isinstance(each, Choice):
            known.setdefault(each.name, each)
    return known


def _tuning(found: Product, rows: int) -> Tuning:
    def variants() -> Mapping[str, Template]:
        return {name: found.template(each) for name, each in _variants(found, rows).items()}

    return Tuning(_key(found, rows), variants)


def product_of(op: Linear) -> Product | str:
    """A linear with the norm in front of it, or why it cannot be a streaming product."""
    if op.x.type.dtype not in FLOATS:
        return f"streaming products take {' or '.join(FLOATS)}, not {op.x.type.dtype}"
    matrix = _matrix(op)
    if isinstance(matrix, str):
        return matrix
    before = op.x.producer
    is_norm = isinstance(before, RmsNorm) or (
        isinstance(before, AddRmsNorm) and op.x is before.results[0]
    )
    made = op.weight.producer
    operations = (made, op) if isinstance(made, Dequantize) else (op,)
    norm = before if is_norm and isinstance(before, RmsNorm | AddRmsNorm) else None
    return Product(op.x, (matrix,), op.result, operations, norm=norm)


def _matrix(op: Linear) -> Matrix | str:
    weight = op.weight
    made = weight.producer
    if isinstance(made, Dequantize):
        matrix = Matrix(made.x, made.scale, made.zero, op.bias)
    elif made is not None:
        return f"the weight is computed by {made.opname}"
    else:
        matrix = Matrix(weight, bias=op.bias)
    if matrix.codes.type.dtype not in WEIGHTS or (
        matrix.zero is not None and matrix.zero.type.dtype not in ("u4", "u8")
    ):
        return f"no streaming product reads weights of {matrix.codes.type.dtype}"
    if not all(isinstance(size, int) and size for size in matrix.codes.type.shape):
        return f"{matrix.codes.type} is empty or of unknown size"
    return matrix


# The numbers that results.cuh has for activations.
def _activation(op: Op | None) -> str | None:
    match op:
        case Silu():
            return "0"
        case Gelu():
            return "2" if op.approximate == "tanh" else "1"
        case QuickGelu():
            return "3"
        case Relu():
            return "4"
        case SquaredRelu():
            return "5"
        case Sigmoid():
            return "6"
        case _:
            return None


def gated(op: Mul) -> Product | str | None:
    """activation(linear) * linear as one product; None where `op` is something else."""
    for first, second in ((op.x, op.y), (op.y, op.x)):
        act = first.producer
        number = _activation(act)
        if act is None or number is None:
            continue
        gate, up = act.operands[0].producer, second.producer
        if not isinstance(gate, Linear) or not isinstance(up, Linear) or gate.x is not up.x:
            continue
        left, right = product_of(gate), product_of(up)
        if isinstance(left, str) or isinstance(right, str):
            return left if isinstance(left, str) else right
        matrices = (*left.matrices, *right.matrices)
        if not matrices[0].alike(matrices[1]):
            return "the gate and the other product have different types"
        inner = dict.fromkeys((*left.operations, *right.operations, act, op))
        return replace(
            left, matrices=matrices, result=op.result, operations=tuple(inner), activation=number
        )
    return None


def with_residual(op: Add | AddRmsNorm) -> Product | str | None:
    """linear + residual as one product; None where `op` is something else."""
    pair = (op.x, op.y) if isinstance(op, Add) else (op.x, op.residual)
    for x, residual in (pair, pair[::-1]):
        linear = x.producer
        if not isinstance(linear, Linear) or len(x.users) != 1 or x is residual:
            continue
        if residual.type.shape != x.type.shape:
            continue
        found = product_of(linear)
        if isinstance(found, str):
            return found
        total = op.result if isinstance(op, Add) else op.results[1]
        operations = (*found.operations, op)
        return replace(found, result=total, operations=operations, residual=residual)
    return None


@fusion(Mul)
def _gated(op: Op, sizes: Sizes) -> Fused | str | None:
    assert isinstance(op, Mul)
    return streamed(gated(op), sizes)


@fusion(Add)
def _added(op: Op, sizes: Sizes) -> Fused | str | None:
    assert isinstance(op, Add)
    return streamed(with_residual(op), sizes)


@fusion(AddRmsNorm)
def _added_norm(op: Op, sizes: Sizes) -> Fused | str | None:
    """The total by the product, and its norm by a kernel of its own for those who need it."""
    assert isinstance(op, AddRmsNorm)
    found = streamed(with_residual(op), sizes)
    if not isinstance(found, Fused):
        return found
    return Fused((*found.templates, norm_of_sum(op)), found.covers)


@fusion(Linear)
def _linear(op: Op, sizes: Sizes) -> Fused | str | None:
    assert isinstance(op, Linear)
    return streamed(product_of(op), sizes)


def streamed(found: Product | str | None, sizes: Sizes) -> Fused | str | None:
    """The launch of a product, or why there is none."""
    if not isinstance(found, Product):
        return found
    rows = bind(product(found.x.type.shape[:-1]), sizes)
    if isinstance(rows, Dim) or rows > MOST_ROWS:
        return f"{rows} rows are more than the {MOST_ROWS} of streaming products"
    choice = chosen(found, max(rows, 1))
    if isinstance(choice, str):
        return choice
    used_once = {op for op in found.operations if not isinstance(op, Dequantize)}
    covers = tuple(
        op
        for op in found.operations
        if op in used_once or used_once.issuperset(op.results[0].users)
    )
    template = replace(found.template(choice), tuning=_tuning(found, max(rows, 1)))
    return Fused((template,), covers)
