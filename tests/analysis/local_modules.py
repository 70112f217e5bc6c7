"""Random valid modules in the local view, in which every collective affects the result."""

from __future__ import annotations

import random
from typing import Any

from irc import ops
from irc.ir.core import Function, Module, Op, Result, Value, Weight
from irc.ir.mesh import Mesh
from irc.ir.types import TensorType
from irc.ir.weight_parts import weight_part
from irc.source import Loc
from irc.weights import RandomRef, Shard
from tests.fresh import fresh

MESHES = ("tp=2", "tp=3", "tp=4", "dp=2, tp=2", "dp=2, tp=3", "cp=2, ep=1, tp=2", "dp=3, tp=1")
SIZE = 12  # of every replicated dimension: a multiple of every group size
HIDDEN = 24
ROWS = 36


class Local:
    """Grows `module` by blocks whose input and output are replicated."""

    def __init__(self, seed: int, locs: bool = True) -> None:
        self.rng = random.Random(seed)
        self.mesh = Mesh.parse(self.rng.choice(MESHES))
        self.module = Module(f"l{seed}", self.mesh, local=True)
        self.locs, self.line = locs, 0
        whole = TensorType("f32", (SIZE, SIZE))
        self.axis, self.group_size = self.pick()
        split = whole.replace(axes=((self.axis,), ()))
        args = [
            ("x", whole),
            ("ids", TensorType("i32", (SIZE,))),
            ("part", TensorType("f32", (SIZE // self.group_size, SIZE)).part_of(split)),
        ]
        self.function = self.module.add_function(Function("forward", args))
        self.x, self.ids, self.part = self.function.args
        for _ in range(self.rng.randint(2, 5)):
            self.axis, self.group_size = self.pick()
            self.x = self.rng.choice(BLOCKS)(self)
        self.finish()

    def pick(self) -> tuple[str, int]:
        """A mesh axis of several ranks, and how many."""
        axes = [(name, size) for name, size in self.mesh.axes if size > 1]
        return self.rng.choice(axes)

    def finish(self) -> None:
        """Return the last value, and sometimes the sharded argument."""
        values, names = [self.x], ["y"]
        if self.rng.random() < 0.5:
            values.append(self.add(ops.Silu(self.part)))
            names.append("mine")
        self.function.append(ops.Return(values))
        self.function.results = tuple(Result(name) for name in names)

    def add(self, op: Op) -> Value:
        """Append an operation, with its own source line."""
        self.line += 1
        op.loc = Loc("model.py", self.line) if self.locs else None
        return self.function.append(op).result

    def weight(self, *shape: int, split: int | None = None) -> Weight:
        """A weight of this global shape, sharded along `split` over the current axis."""
        ref, own = RandomRef(f"w{self.line}", 3, 0.3, shape), list(shape)
        if split is not None:
            ref = ref.then(Shard(split, (self.axis,)))
            own[split] //= self.group_size
        name = f"w{len(self.module.weights)}"
        type = weight_part(ref, TensorType("f32", tuple(own)), self.mesh)
        return self.module.add_weight(Weight(type, name, ref))

    def send(self, kind: type[Op], value: Value, **options: Any) -> Value:
        """Append a collective of `value` over the current axis."""
        return self.add(kind(value, axis=self.axis, group_size=self.group_size, **options))

    def root(self) -> int:
        """A random rank of the group."""
        return self.rng.randrange(self.group_size)

    def columns(self) -> Value:
        """Column-parallel linear: each rank's columns of the result."""
        return self.add(ops.Linear(self.x, self.weight(SIZE, SIZE, split=0)))

    def terms(self) -> Value:
        """A partial sum: an MLP whose second linear is row-parallel."""
        hidden = self.add(ops.Linear(self.x, self.weight(HIDDEN, SIZE, split=0)))
        bent = self.add(ops.Silu(hidden))
        return self.add(ops.Linear(bent, self.weight(SIZE, HIDDEN, split=1)))

    def own(self) -> Value:
        """A value that differs from rank to rank."""
        rank = self.add(ops.Cast(self.add(ops.Rank(axis=self.axis)), dtype="f32"))
        return self.add(ops.Add(self.x, rank))

    def residual(self, value: Value) -> Value:
        """The value, normed or added to the previous one."""
        if self.rng.random() < 0.5:
            return self.add(ops.RmsNorm(value, self.weight(SIZE)))
        return self.add(ops.Add(self.x, value))


def mlp(b: Local) -> Value:
    return b.residual(b.send(ops.AllReduce, b.terms()))


def twins(b: Local) -> Value:
    """The difference of two sums whose collectives look alike."""
    terms = [b.terms(), b.terms()]
    return b.residual(b.add(ops.Sub(*[b.send(ops.AllReduce, term) for term in terms])))


def columns(b: Local) -> Value:
    return b.residual(b.send(ops.AllGather, b.columns(), dim=1))


def lookup(b: Local) -> Value:
    rows = ops.Constant(values=(ROWS // b.group_size,), dtype="i32")
    start = b.add(ops.Mul(b.add(ops.Rank(axis=b.axis)), b.add(rows)))
    found = b.add(ops.Embedding(b.add(ops.Sub(b.ids, start)), b.weight(ROWS, SIZE, split=0)))
    return b.add(ops.Add(b.x, b.send(ops.AllReduce, found)))


def sequence(b: Local) -> Value:
    part = b.add(ops.Silu(b.send(ops.ReduceScatter, b.terms(), dim=0)))
    return b.residual(b.send(ops.AllGather, part, dim=0))


def exchange(b: Local) -> Value:
    turned = b.add(ops.Silu(b.send(ops.AllToAll, b.columns(), split=0, concat=1)))
    return b.residual(b.send(ops.AllGather, turned, dim=0))


def largest(b: Local) -> Value:
    return b.residual(b.send(ops.AllReduce, b.own(), op="max"))


def chosen(b: Local) -> Value:
    return b.residual(b.send(ops.Broadcast, b.own(), root=b.root()))


def rooted(b: Local) -> Value:
    root = b.root()
    total = b.send(ops.Reduce, b.terms(), root=root)
    total.type = total.type.part_of(total.type.replicated.replace(varying=(b.axis,)))
    return b.residual(b.send(ops.Broadcast, total, root=root))


def gathered(b: Local) -> Value:
    joined = b.send(ops.CollectiveGather, b.columns(), dim=1, root=b.root())
    return b.residual(b.send(ops.AllReduce, joined))


def scattered(b: Local) -> Value:
    part = b.add(ops.Silu(b.send(ops.CollectiveScatter, b.x, dim=1)))
    return b.residual(b.send(ops.AllGather, part, dim=1))


def moments(b: Local) -> Value:
    """The sum over the sharded argument."""
    (axis,) = b.part.type.global_type.axes[0]
    total = b.add(ops.ReduceSum(b.part, dims=(0,)))
    return b.add(ops.Add(b.x, b.add(ops.AllReduce(total, axis=axis, group_size=b.mesh.size(axis)))))


BLOCKS = (
    *(mlp, twins, columns, lookup, sequence, exchange),
    *(largest, chosen, rooted, gathered, scattered, moments),
)


def local_module(seed: int, locs: bool = True) -> Module:
    """The same module for the same seed; a second call gives a copy."""
    return Local(seed, locs).module


def local_inputs(module: Module, seed: int) -> dict[str, Any]:
    """Fresh arrays for its arguments, the sharded one as a shard per rank."""
    rng, mesh = fresh(seed), module.mesh
    axes = module.main.arg("part").type.global_type.axes[0]
    parts = [rng.standard_normal((SIZE // mesh.group_size(axes), SIZE), "f4") for _ in range(ROWS)]
    return {
        "x": rng.standard_normal((SIZE, SIZE), "f4"),
        "ids": rng.integers(0, ROWS, SIZE).astype("i4"),
        "part": [parts[mesh.index(rank, axes)] for rank in range(mesh.ranks)],
    }
