"""Small local modules, and mutants of them: of one collective, weight step or layout each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np

import irc
from examples import llama, two_tower
from irc import ops
from irc.backends.reference import evaluate
from irc.frontends import random_weights
from irc.ir.core import Module, Op, Value
from irc.ir.types import TensorType
from irc.pipeline import run_pipeline
from irc.text import parse_module
from irc.weights import Cyclic, Shard, Slice
from tests.passes.embedding_lab import PAIRS, Lab, distinct, looked_up
from tests.passes.embedding_lab import drawn as drawn_ids
from tests.sharded.cases import drawn
from tests.sharded.checking import plan_file
from tests.sharded.layers import LAYERS
from tests.sharded.models import mixtral, tiny_llama
from tests.sharded.test_experts import OVER_DP

MESHES = ("tp=2", "dp=2,tp=2", "ep=2,tp=2", "tp=3", "dp=2,ep=2,tp=2")
BEFORE, AFTER = "inline, canonicalize, cse", "localize, fuse-collectives, cse, canonicalize, dce"
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
OWN = "own: "
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Sample:
    """The text of a local module, its global inputs, and its global results."""

    name: str
    text: str
    inputs: Arrays
    wanted: Arrays
    tolerance: float = 1e-4


def _sharded(name: str, module: Module, inputs: Arrays, options: str, stages: str = "") -> Sample:
    wanted = evaluate(module, inputs)
    run_pipeline(module, f"{BEFORE}, shard{{{options}}}{stages}, {AFTER}")
    return Sample(f"{name} {options}{stages}", str(module), inputs, wanted)


def decoder(name: str, module: Module, rng: np.random.Generator, options: str) -> Sample:
    """A language model on a prompt, with empty caches."""
    tokens = np.arange(8, dtype=np.int32)
    inputs: Arrays = {
        "input_ids": rng.integers(0, 30, (2, 8)).astype(np.int32),
        "positions": np.tile(tokens, (2, 1)),
        "past_lengths": np.zeros(2, np.int32),
        "logit_positions": np.tile(tokens, (2, 1)),
    }
    for arg in module.main.args:
        if arg.name not in inputs:
            shape = [{"B": 2, "C": 12}.get(str(n), n) for n in arg.type.shape]
            inputs[str(arg.name)] = np.zeros(shape, np.float32)  # pyright: ignore[reportArgumentType]
    return _sharded(name, module, inputs, options, ", pipeline" if "pp" in options else "")


def samples(rng: random.Random, folder: Path, count: int) -> Iterator[Sample]:
    """Random samples of every kind: examples, models, layers, experts, lookups."""
    numbers = np.random.default_rng(rng.randrange(1 << 30))
    for i in range(count):
        mesh = rng.choice(MESHES)
        options = f'mesh="{mesh}"' + rng.choice(["", ", sequence=true"])
        even = options.replace("tp=3", "tp=4")
        kind = i % 6
        if kind == 0:
            example = random_weights(llama.build(layers=1, hidden=16, vocab=32, context=64), 3)
            yield decoder("llama", example, numbers, even)
        elif kind == 1:
            sizes = rng.choice([{"qkv_bias": True}, {"tie_word_embeddings": True}, {}])
            model = tiny_llama(head_dim=4, num_hidden_layers=2, **HEADS, **sizes)
            yield decoder("tiny", model, numbers, rng.choice([even, 'mesh="pp=2,tp=2"']))
        elif kind == 2:
            name = rng.choice(list(LAYERS))
            module = LAYERS[name].module()
            made = _sharded(name, module, drawn(module, numbers, S=24, M=8), options)
            yield replace(made, tolerance=10 * LAYERS[name].tolerance())
        elif kind == 3:
            plan = plan_file(folder, *OVER_DP)
            module = mixtral(4, 2, num_hidden_layers=1, **HEADS)
            mesh = rng.choice(["dp=2", "dp=2,tp=2"])
            yield decoder("mixtral", module, numbers, f'mesh="{mesh}", plan="{plan}"')
        elif kind == 4:
            module = random_weights(two_tower.build(), 3)
            yield _sharded(
                "two_tower", module, drawn(module, numbers, B=12, H=12, N=12, K=12), options
            )
        else:
            yield lookup(rng, numbers, folder / f"table{i}")


def lookup(rng: random.Random, numbers: np.random.Generator, folder: Path) -> Sample:
    """A lookup in some scheme."""
    folder.mkdir()
    wanted, scheme = rng.choice([pair for pair in PAIRS if pair[1] != "R"])
    mesh = rng.choice(["tp=2", "dp=2,tp=2", "tp=3"])
    group_size = int(mesh[-1])
    lab = Lab(folder, distinct(13, 6), (group_size * 2, group_size * 2), wanted, group_size)
    module = lab.change(mesh=mesh).local(scheme)
    ids = drawn_ids(numbers, 13, lab.shape)
    name = f"{wanted} {scheme} {mesh}"
    return Sample(name, str(module), {"ids": ids}, {"y": looked_up(lab.table, ids)})


Change = Callable[[Module], str | None]


def mutants(sample: Sample, rng: random.Random) -> Iterator[tuple[str, Module]]:
    """Every mutant of a sample in random order, each a module of its own, unverified."""
    original = parse_module(sample.text)
    changes = [*_of_collectives(original), *_of_weights(original), *_of_layouts(original)]
    rng.shuffle(changes)
    for what, change in changes:
        module = parse_module(sample.text)
        try:
            change(module)
        except irc.Error:
            continue  # types do not allow it
        yield what, module


def _communications(module: Module) -> list[Op]:
    return [op for op in module.ops() if isinstance(op, (ops.collective.Exchange, ops.Rank))]


def _of_collectives(module: Module) -> Iterator[tuple[str, Callable[[Module], None]]]:
    for at, op in enumerate(_communications(module)):
        for what, make in _instead(module, op):

            def change(copy: Module, at: int = at, make: Any = make) -> None:
                old = _communications(copy)[at]
                _exchange(old, make(old))

            yield f"{_seen(op)}{op!r} -> {what}", change
        if op.operands:
            yield (
                f"{_seen(op)}{op!r} moved forward",
                lambda copy, at=at: _forward(_communications(copy)[at]),
            )
            yield (
                f"{_seen(op)}{op!r} moved back",
                lambda copy, at=at: _back(_communications(copy)[at]),
            )


def _seen(op: Op) -> str:
    """`own: ` for what combines or exchanges what the ranks have of their own."""
    axes = op.attributes["axis"].split(".")
    own = op.operands and {*axes} <= {*op.operands[0].type.global_type.varying}
    return OWN if own else ""


def _exchange(old: Op, new: Value) -> None:
    if new.type.replicated is not old.result.type.replicated:
        raise irc.Error("another type")
    new.type = old.result.type  # the line of the text keeps its type
    old.result.replace_by(new)
    old.erase()


def _put(old: Op, new: Op) -> Value:
    assert old.parent is not None
    new.loc = old.loc
    return old.parent.insert(new, old).result


def _instead(module: Module, op: Op) -> Iterator[tuple[str, Callable[[Op], Value]]]:
    """What may take the place of a collective or of `rank`."""
    sizes = dict(module.mesh.axes)
    axis: str = op.attributes["axis"]
    for other in _other_axes(module, tuple(axis.split("."))):
        name = ".".join(other)
        yield f"over {name}", lambda old, name=name: _put(old, old.rebuilt(old.operands, axis=name))
    if not op.operands:
        return
    group: int = op.attributes["group_size"]
    assert group == np.prod([sizes[name] for name in axis.split(".")])
    both = {"axis": axis, "group_size": group}
    yield "nothing", lambda old: old.operands[0]
    for kind in ("max", "min", "sum"):
        yield f"all_reduce {kind}", lambda o, k=kind: _put(o, ops.AllReduce(_x(o), op=k, **both))
    yield "broadcast", lambda old: _put(old, ops.Broadcast(_x(old), **both))
    yield "reduce", lambda old: _put(old, ops.Reduce(_x(old), **both))
    rank = op.result.type.ndim
    for dim in range(rank):
        for cls in (ops.AllGather, ops.ReduceScatter, ops.CollectiveScatter, ops.CollectiveGather):
            yield (
                f"{cls.opname} {dim}",
                lambda old, cls=cls, dim=dim: _put(old, cls(_x(old), dim=dim, **both)),
            )
        yield (
            f"concat {dim}",
            lambda old, dim=dim: _put(old, ops.Concat([_x(old)] * group, dim=dim)),
        )
        yield f"slice {dim}", lambda old, dim=dim: _first(old, _x(old), dim, group)
        for to in range(rank):
            yield (
                f"all_to_all {dim} {to}",
                lambda o, dim=dim, to=to: _put(
                    o, ops.AllToAll(_x(o), split=dim, concat=to, **both)
                ),
            )
            yield (
                f"slice {dim} and concat {to}",
                lambda o, dim=dim, to=to: _put(
                    o, ops.Concat([_first(o, _x(o), dim, group)] * group, dim=to)
                ),
            )


def _x(op: Op) -> Value:
    return op.operands[0]


def _first(old: Op, x: Value, dim: int, group: int) -> Value:
    """The first of the equal parts of a dimension."""
    from irc.ir.dims import exact_divide

    part = exact_divide(x.type.shape[dim], group)
    if part is None:
        raise irc.Error("no equal parts")
    return _put(old, ops.Slice(x, dim=dim, start=0, stop=part))


def _forward(op: Op) -> None:
    """The collective of the first operand, before the operation that makes its own."""
    made = _x(op).producer
    if made is None or not made.operands or len(made.results) > 1:
        raise irc.Error("nothing to move over")
    at = next(i for i in range(len(made.operands)))
    moved = _put(op, op.rebuilt([made.operands[at]]))
    operands = [moved if i == at else value for i, value in enumerate(made.operands)]
    _exchange(op, _put(op, made.rebuilt(operands)))


def _back(op: Op) -> None:
    """The collective of the result of its only user, of which its operand takes the place."""
    users = list(op.result.users)
    if len(users) != 1 or len(users[0].results) != 1 or isinstance(users[0], ops.Return):
        raise irc.Error("nothing to move over")
    (user,) = users
    operands = [_x(op) if value is op.result else value for value in user.operands]
    early = _put(user, user.rebuilt(operands))
    _exchange(user, _put(user, op.rebuilt([early])))


def _other_axes(module: Module, axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Other axes of as many ranks: in another order, or others."""
    names = [name for name, size in module.mesh.axes if size > 1]
    found = permutations(names, len(axes))
    size = module.mesh.group_size(axes)
    return [each for each in found if each != axes and module.mesh.group_size(each) == size]


def _of_weights(module: Module) -> Iterator[tuple[str, Callable[[Module], None]]]:
    """Shard steps over other axes or dimensions, the shard of the first rank for all, and
    cyclic distributions that are left out."""
    for name, weight in module.weights.items():
        for at, step in enumerate(weight.ref.steps):
            others: list[Any] = []
            if isinstance(step, Shard):
                others += [Shard(step.dim, axes) for axes in _other_axes(module, step.axes)]
                others += [
                    Shard(dim, step.axes) for dim in range(weight.type.ndim) if dim != step.dim
                ]
                ranges = [None] * weight.type.ndim
                size = weight.type.shape[step.dim]
                if isinstance(size, int) and at + 1 == len(weight.ref.steps):
                    others.append(Slice((*ranges[: step.dim], (0, size), *ranges[step.dim + 1 :])))
            elif isinstance(step, Cyclic):
                others.append(None)
            for other in others:
                own = OWN * bool(weight.type.global_type.varying)
                yield f"{own}@{name} {step} -> {other}", _step(name, at, other)


def _step(name: str, at: int, other: Any) -> Callable[[Module], None]:
    def change(module: Module) -> None:
        weight = module.weights[name]
        steps = list(weight.ref.steps)
        steps[at : at + 1] = [] if other is None else [other]
        weight.ref = replace(weight.ref, steps=tuple(steps))

    return change


def _of_layouts(module: Module) -> Iterator[tuple[str, Callable[[Module], None]]]:
    """Layouts over other axes, in other dimensions, or of whole values."""
    for name, layout in _layouts(module).items():
        for dim, axes in enumerate(layout.axes):
            if not axes:
                continue
            places = [_with(layout.axes, dim, other) for other in _other_axes(module, axes)]
            places += [
                _with(_with(layout.axes, dim, ()), to, axes)
                for to in range(layout.ndim)
                if not layout.axes[to]
            ]
            for each in places:
                flat = [axis for place in each for axis in place]
                if len({*flat}) < len(flat):
                    continue
                other = layout.replace(axes=each)

                def change(copy: Module, name: str = name, other: Any = other) -> None:
                    value = _boundary(copy)[name]
                    value.type = value.type.part_of(other)

                yield f"{name}: {layout} -> {other}", change
        if not name.startswith("%"):
            yield f"{name} without layout", lambda copy, name=name: _without(copy, name)


def _boundary(module: Module) -> dict[str, Value]:
    """The arguments, as `%name`, and the results that reuse none."""
    main, aliases = module.main, module.main.aliases()
    named = zip(main.result_names(), main.returned, strict=True)
    results = {name: value for i, (name, value) in enumerate(named) if i not in aliases}
    return {f"%{arg.name}": arg for arg in main.args} | results


def _layouts(module: Module) -> dict[str, TensorType]:
    """The global types of arguments and results that are shards."""
    return {name: v.type.of for name, v in _boundary(module).items() if v.type.of is not None}


def _without(module: Module, name: str) -> None:
    value = _boundary(module)[name]
    value.type = value.type.replicated


def _with(axes: tuple[Any, ...], dim: int, place: tuple[str, ...]) -> tuple[Any, ...]:
    return (*axes[:dim], place, *axes[dim + 1 :])
