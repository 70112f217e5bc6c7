"""Random modules in the local view, right by construction: every communication in them matters."""

from __future__ import annotations

import random
from typing import Any

from irc.core import Function, Module, Op, Result, Value, Weight
from irc.mesh import Mesh
from irc.ops import (
    Add,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Cast,
    CollectiveGather,
    CollectiveScatter,
    Constant,
    Embedding,
    Linear,
    Mul,
    Rank,
    Reduce,
    ReduceScatter,
    ReduceSum,
    Return,
    RmsNorm,
    Silu,
    Sub,
)
from irc.source import Loc
from irc.types import TensorType
from irc.weights import RandomRef, Shard
from tests.fresh import fresh

MESHES = ("tp=2", "tp=3", "tp=4", "dp=2, tp=2", "dp=2, tp=3", "cp=2, ep=1, tp=2", "dp=3, tp=1")
SIZE = 12  # of every dimension that is whole: every group divides it
HIDDEN = 24
ROWS = 36


class Local:
    """Grows `module` by blocks that begin and end with a value that all ranks have."""

    def __init__(self, seed: int, locs: bool = True) -> None:
        self.rng = random.Random(seed)
        self.mesh = Mesh.parse(self.rng.choice(MESHES))
        self.module = Module(f"l{seed}", self.mesh, local=True)
        self.locs, self.line = locs, 0
        whole = TensorType("f32", (SIZE, SIZE))
        self.axis, self.ways = self.pick()
        split = whole.replace(axes=((self.axis,), ()))
        args = [
            ("x", whole),
            ("ids", TensorType("i32", (SIZE,))),
            ("part", TensorType("f32", (SIZE // self.ways, SIZE))),
        ]
        self.function = self.module.add_function(Function("forward", args))
        self.function.layouts["%part"] = split
        self.x, self.ids, self.part = self.function.args
        for _ in range(self.rng.randint(2, 5)):
            self.axis, self.ways = self.pick()
            self.x = self.rng.choice(BLOCKS)(self)
        self.finish(split)

    def pick(self) -> tuple[str, int]:
        """A mesh axis of several ranks, and how many."""
        axes = [(name, size) for name, size in self.mesh.axes if size > 1]
        return self.rng.choice(axes)

    def finish(self, split: TensorType) -> None:
        """Return the last value, and now and then the argument that is split."""
        values, names = [self.x], ["y"]
        if self.rng.random() < 0.5:
            values.append(self.add(Silu(self.part)))
            names.append("mine")
            self.function.layouts["mine"] = split
        self.function.append(Return(values))
        self.function.results = tuple(Result(name) for name in names)

    def add(self, op: Op) -> Value:
        """Append an operation, at a line of its own."""
        self.line += 1
        op.loc = Loc("model.py", self.line) if self.locs else None
        return self.function.append(op).result

    def weight(self, *shape: int, split: int | None = None) -> Weight:
        """A weight of this whole shape, split along a dimension over the axis at hand."""
        ref, own = RandomRef(f"w{self.line}", 3, 0.3, shape), list(shape)
        if split is not None:
            ref = ref.then(Shard(split, (self.axis,)))
            own[split] //= self.ways
        name = f"w{len(self.module.weights)}"
        return self.module.add_weight(Weight(TensorType("f32", tuple(own)), name, ref))

    def terms(self) -> Value:
        """A pending sum: an MLP whose second half is split by rows."""
        hidden = self.add(Linear(self.x, self.weight(HIDDEN, SIZE, split=0)))
        bent = self.add(Silu(hidden))
        return self.add(Linear(bent, self.weight(SIZE, HIDDEN, split=1)))

    def own(self) -> Value:
        """A value that is another on every rank."""
        rank = self.add(Cast(self.add(Rank(axis=self.axis)), dtype="f32"))
        return self.add(Add(self.x, rank))

    def residual(self, value: Value) -> Value:
        """The value, added to what was there or not."""
        if self.rng.random() < 0.5:
            return self.add(RmsNorm(value, self.weight(SIZE)))
        return self.add(Add(self.x, value))


def mlp(b: Local) -> Value:
    return b.residual(b.add(AllReduce(b.terms(), axis=b.axis, ways=b.ways)))


def twins(b: Local) -> Value:
    """Two sums whose communications look alike."""
    terms = [b.terms(), b.terms()]
    sums = [b.add(AllReduce(term, axis=b.axis, ways=b.ways)) for term in terms]
    return b.residual(b.add(Sub(*sums)))


def columns(b: Local) -> Value:
    part = b.add(Linear(b.x, b.weight(SIZE, SIZE, split=0)))
    return b.residual(b.add(AllGather(part, axis=b.axis, dim=1, ways=b.ways)))


def lookup(b: Local) -> Value:
    rows = Constant(values=(ROWS // b.ways,), dtype="i32")
    start = b.add(Mul(b.add(Rank(axis=b.axis)), b.add(rows)))
    table = b.weight(ROWS, SIZE, split=0)
    found = b.add(Embedding(b.add(Sub(b.ids, start)), table))
    return b.add(Add(b.x, b.add(AllReduce(found, axis=b.axis, ways=b.ways))))


def sequence(b: Local) -> Value:
    part = b.add(ReduceScatter(b.terms(), axis=b.axis, dim=0, ways=b.ways))
    return b.residual(b.add(AllGather(b.add(Silu(part)), axis=b.axis, dim=0, ways=b.ways)))


def exchange(b: Local) -> Value:
    part = b.add(Linear(b.x, b.weight(SIZE, SIZE, split=0)))
    turned = b.add(AllToAll(part, axis=b.axis, split=0, concat=1, ways=b.ways))
    return b.residual(b.add(AllGather(b.add(Silu(turned)), axis=b.axis, dim=0, ways=b.ways)))


def largest(b: Local) -> Value:
    return b.residual(b.add(AllReduce(b.own(), axis=b.axis, op="max", ways=b.ways)))


def chosen(b: Local) -> Value:
    root = b.rng.randrange(b.ways)
    return b.residual(b.add(Broadcast(b.own(), axis=b.axis, root=root, ways=b.ways)))


def rooted(b: Local) -> Value:
    root = b.rng.randrange(b.ways)
    total = b.add(Reduce(b.terms(), axis=b.axis, root=root, ways=b.ways))
    return b.residual(b.add(Broadcast(total, axis=b.axis, root=root, ways=b.ways)))


def gathered(b: Local) -> Value:
    root = b.rng.randrange(b.ways)
    part = b.add(Linear(b.x, b.weight(SIZE, SIZE, split=0)))
    whole = b.add(CollectiveGather(part, axis=b.axis, dim=1, root=root, ways=b.ways))
    return b.residual(b.add(AllReduce(whole, axis=b.axis, ways=b.ways)))


def scattered(b: Local) -> Value:
    part = b.add(CollectiveScatter(b.x, axis=b.axis, dim=1, ways=b.ways))
    return b.residual(b.add(AllGather(b.add(Silu(part)), axis=b.axis, dim=1, ways=b.ways)))


def moments(b: Local) -> Value:
    """The sum over the argument that is split."""
    (axis,) = b.function.layouts["%part"].axes[0]
    total = b.add(ReduceSum(b.part, dims=(0,)))
    return b.add(Add(b.x, b.add(AllReduce(total, axis=axis, ways=b.mesh.size(axis)))))


BLOCKS = (
    mlp,
    twins,
    columns,
    lookup,
    sequence,
    exchange,
    largest,
    chosen,
    rooted,
    gathered,
    scattered,
    moments,
)


def local_module(seed: int, locs: bool = True) -> Module:
    """The same module for the same seed; a second call gives a copy."""
    return Local(seed, locs).module


def local_inputs(module: Module, seed: int) -> dict[str, Any]:
    """Fresh arrays for its arguments, the split one as a part per rank."""
    rng, mesh = fresh(seed), module.mesh
    axes = module.main.layouts["%part"].axes[0]
    parts = [rng.standard_normal((SIZE // mesh.ways(axes), SIZE), "f4") for _ in range(ROWS)]
    return {
        "x": rng.standard_normal((SIZE, SIZE), "f4"),
        "ids": rng.integers(0, ROWS, SIZE).astype("i4"),
        "part": [parts[mesh.index(rank, axes)] for rank in range(mesh.ranks)],
    }
