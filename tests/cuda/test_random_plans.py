"""Random modules: values used at other indices, by several kernels, as states and as results."""

from __future__ import annotations

import numpy as np
import pytest

from irc import ops
from irc.backends.reference import evaluate
from irc.ir.core import Function, Module, Op, Result, Value
from irc.ir.dims import symbol
from irc.ir.types import TensorType
from irc.ir.verify import verify
from irc.ops import Return
from tests.cuda.emulate import prepare
from tests.cuda.run_plan import HostProgram
from tests.ops.compare import assert_close

ROWS, COLUMNS = symbol("B"), 6
SHAPE = (ROWS, COLUMNS)
MODULES = 12


class Draw:
    """A random module over values f64[B, 6] from -1 to 1, whose rounding errors stay small."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.module = Module("m", dims={"B": (0, 3, 9)})
        kind = TensorType("f64", SHAPE)
        names = ("x", "y", "s", "t")
        self.function = Function("forward", [(name, kind) for name in names])
        self.module.add_function(self.function)
        self.values: list[Value] = list(self.function.args)

    def pick(self) -> Value:
        """One of the values, newer ones more often."""
        return self.values[-1 - int(self.rng.integers(len(self.values)) * self.rng.random())]

    def put(self, op: Op) -> Value:
        """The result of one more operation."""
        return self.function.append(op).results[0]

    def step(self) -> Value:
        """A random operation on random values, of the same shape again."""
        put, x, y = self.put, self.pick(), self.pick()
        kind = self.rng.integers(11)
        if kind == 0:
            return put(ops.Tanh(put(ops.Add(x, y))))
        if kind == 1:
            return put(ops.Mul(put(ops.Sigmoid(x)), put(ops.Maximum(x, y))))
        if kind == 2:
            return put(ops.Softmax(x))
        if kind == 3:
            return put(ops.Flip(x, dims=(int(self.rng.integers(2)),)))
        if kind == 4:  # a sum per row, repeated
            total = put(ops.ReduceMean(x, dims=(1,), keep=True))
            return put(ops.Sub(y, put(ops.Tanh(total))))
        if kind == 5:
            return put(
                ops.Concat(
                    [
                        put(ops.Slice(x, dim=1, start=2, stop=6)),
                        put(ops.Slice(y, dim=1, start=0, stop=2)),
                    ],
                    dim=1,
                )
            )
        if kind == 6:  # through another shape, and back
            flat = put(ops.Reshape(x, shape=(ROWS * COLUMNS,)))
            return put(ops.Reshape(put(ops.Neg(flat)) if self._coin() else flat, shape=SHAPE))
        if kind == 7:
            turned = put(ops.Transpose(x, order=(1, 0)))
            turned = put(ops.Sin(turned)) if self._coin() else turned
            return put(ops.Transpose(turned, order=(1, 0)))
        if kind == 8:
            return put(ops.Matmul(x, put(ops.Matmul(put(ops.Transpose(y, order=(1, 0))), x))))
        if kind == 9:
            half = put(ops.Split(x, dim=1, sizes=(3, 3)))
            first, second = self.function.last.results  # type: ignore[union-attr]
            assert half is first
            return put(ops.Concat([second, put(ops.Mul(first, second))], dim=1))
        mask = put(ops.Lt(*self.function.args[:2]))  # not of numbers that are rounded
        return put(ops.Where(mask, x, put(ops.Cos(y))))

    def _coin(self) -> bool:
        return bool(self.rng.random() < 0.5)

    def made(self) -> Module:
        """The module: some values are returned, two results overwrite states."""
        for _ in range(int(self.rng.integers(1, 14))):
            self.values.append(self.put(ops.Tanh(self.step())))
        returned = [self.pick() for _ in range(int(self.rng.integers(1, 4)))]
        results = [Result(f"r{i}") for i in range(len(returned))]
        for state in ("s", "t"):
            if self._coin():
                returned.append(self.pick())
                results.append(Result(f"new_{state}", state))
        self.function.append(Return(returned))
        self.function.results = tuple(results)
        verify(self.module)
        return self.module


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_random_modules(rows: int, rng: np.random.Generator) -> None:
    programs = [HostProgram(Draw(rng).made()) for _ in range(MODULES)]
    plans = [program.planners[0].plan({"B": rows}) for program in programs]
    prepare(kernel for plan in plans for kernel in plan.kernels.values())
    for program in programs:
        inputs = {name: rng.uniform(-1, 1, (rows, COLUMNS)) for name in ("x", "y", "s", "t")}
        wanted, found = evaluate(program.module, inputs), program.run(inputs)
        for name, want in wanted.items():
            assert_close(found[name], want, f"{name} of {program.module}", factor=1e5)
