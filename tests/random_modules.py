"""Random modules for round trips and fuzzing: every construct of the language, seeded."""

from __future__ import annotations

import random
from contextlib import suppress

from irc.errors import Error
from irc.ir.core import Function, Module, Op, Result, Value, Weight
from irc.ir.dims import DimLike, symbol
from irc.ir.mesh import Mesh
from irc.ir.types import Axes, TensorType
from irc.ops import Add, Call, Cast, Constant, Full, Gelu, Linear, Mul, Neg, Reshape, Return, Silu
from irc.quantization.formats import FORMATS, METHODS
from irc.source import Loc
from irc.weights import (
    BytesRef,
    ConcatRef,
    Cyclic,
    FileRef,
    Pad,
    ProductRef,
    QuantizedRef,
    RandomRef,
    Ref,
    Shard,
    Slice,
    Transpose,
    UnboundRef,
    Unsqueeze,
    ZerosRef,
    check_steps,
    ref_dtype,
    ref_shape,
)
from irc.weights import Cast as CastStep

HINTS = ("x", "y", "gate", "q_proj", "Attn2", "_", "loc", "func", "inf", None)
STRINGS = (
    "w",
    "model.layers.0.weight",
    'a "quoted" key',
    "tab\tand\\slash",
    "// no comment",
    "größe",
    "line\nand\u2028line",
    "}{",
)
FLOATS = (0.0, -0.0, 1e-05, 1e300, -2.5, float("inf"), float("-inf"), float("nan"), 3.0)


class Generator:
    """Builds one random module from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.mesh = self.rng.choice(["", "tp=2", "dp=2, tp=3", "pp=2, cp=2, tp=2"])
        self.dims: list[DimLike] = [1, 3, 8, symbol("B"), symbol("S"), symbol("S") * 2 + 1]

    def module(self) -> Module:
        rng = self.rng
        dims = {"B": (1, 2, 4), "S": (0, 7, 9)} if rng.random() < 0.7 else {}
        module = Module(rng.choice(["m", "llama.3", "m_2"]), Mesh.parse(self.mesh), dims)
        for i in range(rng.randint(0, 3)):
            module.files[f"file{i}"] = rng.choice(STRINGS)
        for i in range(rng.randint(0, 4)):
            name = rng.choice(["w", "layers.0.w", "W"]) + str(i)
            module.add_weight(self.weight(module, name))
        for i in range(rng.randint(1, 3)):
            self.function(module, f"f{i}")
        return module

    def type(self, pending: bool = True) -> TensorType:
        rng = self.rng
        shape = tuple(rng.choice(self.dims) for _ in range(rng.randint(0, 3)))
        free = list(Mesh.parse(self.mesh).names)
        rng.shuffle(free)
        axes: list[Axes] = []
        for _ in shape:
            count = rng.randint(0, len(free)) if rng.random() < 0.3 else 0
            axes.append(tuple(free.pop() for _ in range(count)))
        partial = tuple(free) if pending and rng.random() < 0.2 else ()
        dtype = rng.choice(["f32", "bf16", "f16", "f8e4m3", "f4e2m1", "f8e8m0"])
        return TensorType(dtype, shape, tuple(axes), partial)

    def weight(self, module: Module, name: str) -> Weight:
        """A weight whose type is what its reference says, where it says anything."""
        while True:
            ref, type = self.ref(module), self.type(pending=False)
            try:
                shape, dtype = ref_shape(ref, module.mesh), ref_dtype(ref)
                type = type if shape is None else TensorType(type.dtype, shape)
                check_steps(ref, type.ndim)
            except Error:
                continue
            return Weight(type.replace(dtype=dtype), name, ref)

    def ref(self, module: Module, depth: int = 0) -> Ref:
        rng = self.rng
        key = rng.choice(STRINGS)
        shape = rng.choice([None, (), (4, 8)])
        ref: Ref = UnboundRef(key, shape)
        if rng.random() < 0.5:
            ref = RandomRef(key, rng.randint(0, 99), 0.02, shape)
        if rng.random() < 0.2:
            ref = ZerosRef(shape or (), rng.choice(["f32", "i4"]))
        if module.files and rng.random() < 0.7:
            ref = FileRef(rng.choice(list(module.files)), key)
            if rng.random() < 0.3:
                ref = BytesRef(ref.file, rng.randint(0, 9), rng.choice(["f32", "u8"]), shape or ())
        if depth < 2 and rng.random() < 0.3:
            parts = tuple(self.ref(module, depth + 1) for _ in range(rng.randint(1, 3)))
            ref = ConcatRef(parts, rng.randint(0, 2))
        if depth < 2 and rng.random() < 0.2:
            with suppress(Error):  # shards inside
                ref = self.computed(ref, module, depth)
        for _ in range(rng.randint(0, 2)):
            steps = [Slice((None, (0, 4))), Transpose((1, 0)), CastStep("bf16"), Slice(((2, 3),))]
            steps += [Unsqueeze(rng.randint(0, 2)), Cyclic(rng.randint(0, 1), rng.randint(1, 3))]
            steps.append(Pad(rng.randint(0, 1), rng.randint(0, 3)))
            if names := Mesh.parse(self.mesh).names:
                steps.append(Shard(rng.randint(0, 1), names[rng.randrange(len(names)) :]))
            ref = ref.then(rng.choice(steps))
        return ref

    def computed(self, ref: Ref, module: Module, depth: int) -> Ref:
        """A product with a vector, or a part of a quantized reference."""
        rng = self.rng
        if rng.random() < 0.5:
            return ProductRef(ref, self.ref(module, depth + 1), rng.randint(0, 1))
        block = tuple(rng.randint(0, 2) for _ in range(rng.randint(1, 2)))
        kinds = rng.choice(["codes", "scales", "zeros", "tensor_scale"]), rng.choice([*FORMATS])
        return QuantizedRef(ref, *kinds, block, rng.choice(METHODS), rng.choice(["", "f32"]))

    def function(self, module: Module, name: str) -> None:
        rng = self.rng
        args = [(f"a{i}" if i else "x", self.type()) for i in range(rng.randint(0, 3))]
        function = Function(name, args)
        values: list[Value] = [*function.args, *module.weights.values()]
        for _ in range(rng.randint(0, 14)):
            op = self.op(module, values)
            if op is None:
                continue
            if rng.random() < 0.3:
                op.loc = Loc(
                    rng.choice(["model.py", "a b.py"]), rng.randint(1, 99), rng.choice(STRINGS)
                )
            function.append(op)
            for result in op.results:
                result.name = rng.choice(HINTS)
                values.append(result)
        returned = rng.sample(values, rng.randint(0, min(3, len(values))))
        function.append(Return(returned))
        if rng.random() < 0.5:
            function.results = tuple(self.result(function, v, i) for i, v in enumerate(returned))
        module.add_function(function)

    def result(self, function: Function, value: Value, index: int) -> Result:
        name = f"out{index}" if self.rng.random() < 0.7 else None
        same = [a.name for a in function.args if a is value]
        return Result(name, same[0] if same and self.rng.random() < 0.5 else None)

    def op(self, module: Module, values: list[Value]) -> Op | None:
        """A random operation over values, or None where the draw does not fit."""
        rng = self.rng
        if not values or rng.random() < 0.2:
            return self.source()
        x, y, z = (rng.choice(values) for _ in range(3))
        builders = (
            lambda: Neg(x),
            lambda: Add(x, y),
            lambda: Mul(x, x),
            lambda: Silu(x),
            lambda: Gelu(x, approximate=rng.choice(["none", "tanh"])),
            lambda: Cast(x, dtype=rng.choice(["f32", "i32", "bool", "f8e5m2"])),
            lambda: Linear(x, y, bias=rng.choice([z, None])),
            lambda: Reshape(x, shape=x.type.shape),
            lambda: self.call(module, values),
        )
        try:
            return rng.choice(builders)()
        except Error:
            return None

    def source(self) -> Op:
        rng = self.rng
        if rng.random() < 0.5:
            return Full(value=rng.choice(FLOATS), shape=self.type().shape, dtype="f32")
        count = rng.randint(0, 4)
        numbers = tuple(rng.choice((*FLOATS, True, 7, -3)) for _ in range(count))
        return Constant(values=numbers, shape=(count,), dtype="f64")

    def call(self, module: Module, values: list[Value]) -> Op | None:
        if not module.functions:
            return None
        callee = self.rng.choice(list(module.functions.values()))
        chosen: list[Value] = []
        for arg in callee.args:
            fitting = [v for v in values if v.type is arg.type]
            if not fitting:
                return None
            chosen.append(self.rng.choice(fitting))
        return Call(chosen, callee=callee)


def random_module(seed: int) -> Module:
    """The random module of a seed; it passes the verifier."""
    return Generator(seed).module()
