"""Every mutant of a local module has the same results, or the verifier refuses it.

A mutant changes one collective, weight step or layout.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice, permutations
from pathlib import Path
from typing import Any

import pytest

from irc import ops
from irc.backends.reference.evaluate import Run
from irc.errors import Error
from irc.ir.core import Module, Op, Value
from irc.ir.dims import exact_divide
from irc.ir.types import TensorType
from irc.ir.verify import verify
from irc.testing.wanted import Wanted
from irc.text import parse_module
from irc.weights import Cyclic, Shard, Slice
from tests.analysis.local_samples import Sample, block_sample, decoder_sample, matrix_sample
from tests.fresh import fresh, session_seed
from tests.passes.embedding_lab import Lab, distinct, drawn, localized, looked_up

COUNT = 8  # modules of the matrix, and of blocks, in a session
EACH = 30  # mutants of a sample
SEED = session_seed() * 1000
OWN = "own: "
Change = Callable[[Module], object]


def mutants(sample: Sample, rng: random.Random) -> Iterator[tuple[str, Module]]:
    """Every mutant of a sample in random order, each a module of its own, unverified."""
    original = parse_module(sample.text)
    changes = [*of_collectives(original), *of_weights(original), *of_layouts(original)]
    rng.shuffle(changes)
    for what, change in changes:
        module = parse_module(sample.text)
        try:
            change(module)
        except Error:
            continue  # types do not allow it
        yield what, module


def communications(module: Module) -> list[Op]:
    return [op for op in module.ops() if isinstance(op, (ops.collective.Exchange, ops.Rank))]


def of_collectives(module: Module) -> Iterator[tuple[str, Change]]:
    """What may take the place of a collective or of `rank`, and collectives elsewhere."""
    for at, op in enumerate(communications(module)):
        own = varies_over(op) * OWN
        for axes in other_axes(module, tuple(op.attributes["axis"].split("."))):
            moved = partial(rebuilt, axis=".".join(axes))
            yield f"{own}{op!r} over {axes}", partial(put_in_place, at=at, make=moved)
        if not op.operands:
            continue
        for make in replacements(op):
            yield f"{own}{op!r} -> {make}", partial(put_in_place, at=at, make=make)
        yield f"{own}{op!r} moved forward", partial(move_forward, at=at)
        yield f"{own}{op!r} moved back", partial(move_back, at=at)


def varies_over(op: Op) -> bool:
    """Whether it takes or makes what the ranks have of their own."""
    axes = {*op.attributes["axis"].split(".")}
    ends = (*op.operands[:1], op.result) if op.operands else ()
    return any(axes <= {*value.type.global_type.varying} for value in ends)


def rebuilt(old: Op, **attributes: Any) -> Op:
    return old.rebuilt(old.operands, **attributes)


def replacements(op: Op) -> Iterator[Callable[[Op], Value | Op]]:
    """Functions from a collective with an operand to what takes its place."""
    both = {"axis": op.attributes["axis"], "group_size": op.attributes["group_size"]}
    yield operand
    yield twice
    for kind in ("max", "min", "sum"):
        yield partial(of_operand, ops.AllReduce, op=kind, **both)
    yield partial(of_operand, ops.Broadcast, **both)
    yield partial(of_operand, ops.Reduce, **both)
    for dim in range(op.result.type.ndim):
        for cls in (ops.AllGather, ops.ReduceScatter, ops.CollectiveScatter, ops.CollectiveGather):
            yield partial(of_operand, cls, dim=dim, **both)
        yield partial(copies, dim=dim)
        yield partial(first_part, dim=dim)
        for to in range(op.result.type.ndim):
            yield partial(of_operand, ops.AllToAll, split=dim, concat=to, **both)
            yield partial(copies, dim=to, part=dim)


def operand(old: Op) -> Value:
    return old.operands[0]


def twice(old: Op) -> Op:
    return old.rebuilt([rebuilt(old).result])


def of_operand(kind: type[Op], old: Op, **attributes: Any) -> Op:
    return kind(old.operands[0], **attributes)


def first_part(old: Op, dim: int) -> Op:
    """The first of the equal parts of a dimension of the operand."""
    size = exact_divide(old.operands[0].type.shape[dim], old.attributes["group_size"])
    if size is None:
        raise Error("no equal parts")
    return ops.Slice(old.operands[0], dim=dim, start=0, stop=size)


def copies(old: Op, dim: int, part: int | None = None) -> Op:
    """The operand, or the first part of one of its dimensions, several times."""
    x = old.operands[0] if part is None else first_part(old, part).result
    return ops.Concat([x] * old.attributes["group_size"], dim=dim)


def put_in_place(module: Module, at: int, make: Callable[[Op], Value | Op]) -> None:
    old = communications(module)[at]
    exchange(old, make(old))


def exchange(old: Op, new: Value | Op) -> None:
    """Put another value, or a new operation, in the place of one of the same local type."""
    value = inserted(old, new) if isinstance(new, Op) else new
    if value.type.replicated is not old.result.type.replicated:
        raise Error("another type")
    value.type = old.result.type  # the line of the text keeps its type
    old.result.replace_by(value)
    old.erase()


def inserted(at: Op, new: Op) -> Value:
    """The result of a new operation in front of another, behind its new operands."""
    assert at.parent is not None
    for value in new.operands:
        if value.producer is not None and value.producer.parent is None:
            inserted(at, value.producer)
    new.loc = at.loc
    return at.parent.insert(new, at).result


def move_forward(module: Module, at: int) -> None:
    """The collective of the first operand, before the operation that makes its own."""
    op = communications(module)[at]
    producer = op.operands[0].producer
    if producer is None or not producer.operands or len(producer.results) > 1:
        raise Error("nothing to move over")
    early = op.rebuilt([producer.operands[0]]).result
    exchange(op, producer.rebuilt([early, *producer.operands[1:]]))


def move_back(module: Module, at: int) -> None:
    """The collective of the result of its only user, of which its operand takes the place."""
    op = communications(module)[at]
    users = list(op.result.users)
    if len(users) != 1 or len(users[0].results) != 1 or isinstance(users[0], ops.Return):
        raise Error("nothing to move over")
    (user,) = users
    operands = [op.operands[0] if value is op.result else value for value in user.operands]
    exchange(user, op.rebuilt([user.rebuilt(operands).result]))


def other_axes(module: Module, axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Other axes of as many ranks: in another order, or others."""
    names = [name for name, size in module.mesh.axes if size > 1]
    orders, size = permutations(names, len(axes)), module.mesh.group_size(axes)
    return [order for order in orders if order != axes and module.mesh.group_size(order) == size]


def of_weights(module: Module) -> Iterator[tuple[str, Change]]:
    """Shard steps over other axes or dimensions, the shard of the first rank for all, and
    cyclic distributions that are left out."""
    for name, weight in module.weights.items():
        own = OWN * bool(weight.type.global_type.varying)
        for at, step in enumerate(weight.ref.steps):
            others: list[Any] = [None] if isinstance(step, Cyclic) else []
            if isinstance(step, Shard):
                others += [Shard(step.dim, axes) for axes in other_axes(module, step.axes)]
                dims = range(weight.type.ndim)
                others += [Shard(dim, step.axes) for dim in dims if dim != step.dim]
                size = weight.type.shape[step.dim]
                if isinstance(size, int) and at + 1 == len(weight.ref.steps):
                    others.append(Slice(tuple((0, size) if d == step.dim else None for d in dims)))
            for other in others:
                change = partial(change_step, name=name, at=at, other=other)
                yield f"{own}@{name} {step} -> {other}", change


def change_step(module: Module, name: str, at: int, other: Any) -> None:
    weight = module.weights[name]
    steps = list(weight.ref.steps)
    steps[at : at + 1] = [] if other is None else [other]
    weight.ref = replace(weight.ref, steps=tuple(steps))


def of_layouts(module: Module) -> Iterator[tuple[str, Change]]:
    """Layouts of arguments and results over other axes, in other dimensions, or of whole values."""
    for name, value in boundary(module).items():
        layout = value.type.of
        if layout is None:
            continue
        for dim, axes in enumerate(layout.axes):
            for places in other_layouts(module, layout.axes, dim) if axes else ():
                other = layout.replace(axes=places)
                yield f"{name}: {layout} -> {other}", partial(change_layout, name=name, of=other)
        if not name.startswith("%"):
            yield f"{name} without layout", partial(change_layout, name=name, of=None)


def other_layouts(module: Module, layout: tuple[Any, ...], dim: int) -> Iterator[tuple[Any, ...]]:
    """A layout with the axes of a dimension changed, or in another dimension."""
    axes = layout[dim]
    others = [(*layout[:dim], other, *layout[dim + 1 :]) for other in other_axes(module, axes)]
    for to, place in enumerate(layout):
        if not place:
            moved = {dim: (), to: axes}
            others.append(tuple(moved.get(i, old) for i, old in enumerate(layout)))
    for places in others:
        flat = [axis for place in places for axis in place]
        if len({*flat}) == len(flat):
            yield places


def boundary(module: Module) -> dict[str, Value]:
    """The arguments, as `%name`, and the results that reuse none."""
    main, aliases = module.main, module.main.aliases()
    named = zip(main.result_names(), main.returned, strict=True)
    results = {name: value for i, (name, value) in enumerate(named) if i not in aliases}
    return {f"%{arg.name}": arg for arg in main.args} | results


def change_layout(module: Module, name: str, of: TensorType | None) -> None:
    value = boundary(module)[name]
    value.type = value.type.replicated if of is None else value.type.part_of(of)


def outcome(sample: Sample, what: str, module: Module) -> str:
    """`refused` or `equal`; an AssertionError where accepted results are wrong.

    Other exchanges of what the ranks have of their own are `another` program.
    """
    try:
        verify(module)
    except Error as error:
        assert error.op is None or error.op.loc is None or ".py:" in str(error), error
        return "refused"
    try:
        sample.wanted.check_module(module, sample.inputs, f"{sample.name}: {what}")
    except (AssertionError, Error):
        if not what.startswith(OWN):
            raise
        return "another"
    agree_where_types_say_so(sample, module)
    return "equal"


def agree_where_types_say_so(sample: Sample, module: Module) -> None:
    """Every value of a module against the arrays of its ranks."""
    values = [result for op in module.main for result in op.results]
    run = Run(module, sample.inputs, watched=values)
    for value in values:
        for axis in {*module.mesh.names}.difference(value.type.global_type.spread):
            for group in module.mesh.groups((axis,)):
                arrays = {run.seen[value][rank].tobytes() for rank in group}
                assert len(arrays) == 1, (value, axis)


def check_mutants(sample: Sample, seed: int) -> Counter[str]:
    """The outcomes of some mutants of a sample, which is valid itself."""
    verify(parse_module(sample.text))
    some = islice(mutants(sample, random.Random(seed)), EACH)
    return Counter(outcome(sample, what, module) for what, module in some)


def test_mutants_of_the_matrix_are_equal_or_refused(tmp_path: Path) -> None:
    samples = (matrix_sample(seed, tmp_path) for seed in range(SEED, SEED + 1000))
    counts: Counter[str] = Counter()
    for sample in islice(filter(None, samples), COUNT):
        counts += check_mutants(sample, SEED)
    assert counts["refused"] > counts["another"], counts


@pytest.mark.parametrize("seed", range(SEED, SEED + COUNT))
def test_mutants_of_blocks_are_equal_or_refused(seed: int) -> None:
    sample = block_sample(seed)
    agree_where_types_say_so(sample, parse_module(sample.text))
    assert check_mutants(sample, seed)["refused"]


@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
def test_mutants_of_a_decoder_are_equal_or_refused(seed: int) -> None:
    assert check_mutants(decoder_sample(seed), seed)["refused"]


@pytest.mark.parametrize("ids, scheme", [("scattered", "KS"), ("sharded", "KD")])
@pytest.mark.parametrize("group_size", [2, 3])
def test_mutants_of_exchanges_of_rows_are_equal_or_refused(
    ids: str, scheme: str, group_size: int, tmp_path: Path
) -> None:
    lab = Lab(tmp_path, distinct(13, 6), (2 * group_size, 4 * group_size), ids, group_size)
    arrays = drawn(fresh(SEED), 13, lab.shape)
    wanted = Wanted({"y": looked_up(lab.table, arrays)}, {"y": 0.0})
    module = localized(lab.rewritten(scheme)[0])
    sample = Sample(scheme, str(module), {"ids": arrays}, wanted)
    counts: Counter[str] = Counter()
    for what, change in of_collectives(module):
        mutant = parse_module(sample.text)
        try:
            change(mutant)
        except Error:
            continue
        counts[outcome(sample, what, mutant)] += 1
    assert counts["refused"] and not counts["another"], counts
