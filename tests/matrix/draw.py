"""Random modules that also hold operations by their declared examples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from irc.errors import Error
from irc.ir.core import Function, Value
from irc.ir.declare import REGISTRY
from irc.ir.dims import Dim, bind
from irc.ir.dtypes import is_float
from irc.ir.types import TensorType
from irc.testing.draw import Draw as Blocks
from tests.fresh import sprinkled
from tests.ops.example import Arg, Example, bound_dims, build, draw
from tests.ops.examples import EXAMPLES

MESHES = ("tp=1", "tp=2", "tp=3", "tp=4", "dp=2,tp=2", "ep=2,tp=3", "tp=6", "pp=2", "pp=2,tp=2")
# Structure, what needs other functions or ranks, and numbers that no rounding may touch.
LEFT_OUT = frozenset(("call", "return", "loop", "cond", "rank", "bitcast"))
USABLE = {
    name: usable
    for name, examples in EXAMPLES.items()
    if name not in LEFT_OUT and name in REGISTRY
    if (usable := [e for e in examples if e.args and not (e.prepare or e.local or e.mesh)])
}
Sizes = dict[Any, Any]  # a symbol by name, or a number, to the size in its place


class Draw(Blocks):
    """One random module without a mesh, of blocks and of examples; see the base class."""

    def step(self) -> None:
        """One more operation, or block of operations."""
        if self.rng.random() < 0.5:
            self.example()
        else:
            super().step()

    def example(self) -> None:
        """An operation by one of its examples, with sizes and operands of this module."""
        name = self.rng.choice(sorted(USABLE))
        example = self.rng.choice(USABLE[name])
        sizes = self.sizes(example)
        chosen = [self.operand(arg, sizes) for arg in example.args]
        attributes = {key: bound_dims(v, named(sizes)) for key, v in example.attributes.items()}
        trial = Function("trial", [(f"a{i}", type_of(c, self.dtype)) for i, c in enumerate(chosen)])
        build(name, example.args, trial.args, attributes)  # an Error before anything is added
        values = [v if isinstance(v, Value) else self.operand_of(v) for v in chosen]
        self.put(build(name, example.args, values, attributes))

    def sizes(self, example: Example) -> Sizes:
        """Sizes in place of those of an example: those of a value, if one fits the first operand.

        Indices are drawn for the sizes of the example, which stay.
        """
        first, sizes = example.args[0], Sizes(example.sizes)
        fitting = [v for v in self.values[-8:] if v.type.ndim == len(first.shape)]
        fitting = [v for v in fitting if v.type.dtype == first.type(self.dtype).dtype]
        if not fitting or any(arg.dtype != "T" or arg.draw for arg in example.args):
            return sizes
        value, taken = self.rng.choice(fitting), Sizes()
        for dim, size in zip(first.shape, value.type.shape, strict=True):
            key = str(dim) if isinstance(dim, Dim) else dim
            if taken.setdefault(key, size) != size:
                raise Error("two sizes for one")
        return sizes | taken

    def operand(self, arg: Arg, sizes: Sizes) -> Value | Arg:
        """A value for one operand of an example, or the description of one to add."""
        dims = (sizes.get(str(d) if isinstance(d, Dim) else d, d) for d in arg.shape)
        wanted = replace(arg, shape=tuple(bind(d, named(sizes)) for d in dims))
        type = wanted.type(self.dtype)
        fitting = [v for v in self.values if v.type is type]
        numeric = is_float(type.dtype) and arg.draw is None
        if fitting and numeric and self.rng.random() < 0.8:
            return self.rng.choice(fitting[-6:])
        return wanted

    def operand_of(self, arg: Arg) -> Value:
        """A new argument, or a new weight where any numbers will do."""
        static = all(isinstance(size, int) for size in arg.shape)
        if static and arg.dtype == "T" and arg.draw is None and self.rng.random() < 0.7:
            return self.weight(*arg.shape)
        return self.argument(arg)

    def inputs(self, batch: int, special: bool) -> dict[str, np.ndarray]:
        """Random arguments; `special` puts NaN, infinities and zeros of both signs among them."""
        arrays, numbers = dict[str, np.ndarray](), np.random.default_rng(self.rng.getrandbits(32))
        for name, arg in self.arguments.items():
            type = arg.type(self.dtype)
            shape = tuple(bind(dim, {"B": batch}) for dim in type.shape)
            array = draw(arg, type.replace(shape=shape), numbers)
            arrays[name] = sprinkled(array, numbers) if special else array
        return arrays


def named(sizes: Sizes) -> dict[str, int]:
    """The sizes of symbols."""
    return {key: size for key, size in sizes.items() if isinstance(key, str)}


def type_of(operand: Value | Arg, dtype: str) -> TensorType:
    """The type of an operand that exists or is described."""
    return operand.type if isinstance(operand, Value) else operand.type(dtype)
