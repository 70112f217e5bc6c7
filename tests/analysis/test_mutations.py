"""Random valid modules pass; with a collective lost, repeated, moved or changed they fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial, wraps
from itertools import pairwise

import pytest

from irc.backends.reference import evaluate_ranks
from irc.backends.reference.evaluate import Run
from irc.errors import Error
from irc.ir.core import Module, Op, Value
from irc.ir.verify import verify
from irc.ops import AllReduce, Broadcast, Cast, CollectiveScatter, Reshape
from irc.ops.collective import Collective
from irc.text import parse_module
from tests.analysis.local_modules import SIZE, local_inputs, local_module
from tests.fresh import session_seed

SEEDS = [session_seed() * 1000 + i for i in range(90)]
Damage = Callable[..., str | None]


def communications(module: Module) -> list[Collective]:
    return [op for op in module.main if isinstance(op, Collective) and op.operands]


def sums(module: Module) -> list[Collective]:
    """The sums that affect the results: not those before a maximum or a use by the root alone."""
    row = communications(module)
    hides = [
        isinstance(op, (Broadcast, CollectiveScatter)) or op.attributes.get("op") == "max"
        for op in row
    ]
    behind = row[max((i for i, each in enumerate(hides) if each), default=0) :]
    return [op for op in behind if isinstance(op, AllReduce) and op.op == "sum"]


def changes(fits: Callable[[Module, Collective], bool]) -> Callable[[Callable[..., None]], Damage]:
    """Decorates a change of one collective: it is applied to a random one that fits, if any."""

    def decorate(change: Callable[[Module, Collective], None]) -> Damage:
        @wraps(change)
        def damage(
            module: Module,
            rng: random.Random,
            row: Callable[[Module], list[Collective]] = communications,
        ) -> str | None:
            fitting = [op for op in row(module) if fits(module, op)]
            if not fitting:
                return None
            op = rng.choice(fitting)
            text = f"{change.__name__} {op!r}"
            change(module, op)
            return text

        return damage

    return decorate


def replace(op: Op, /, **attributes: object) -> None:
    """Replace an operation by one with other attributes."""
    new = op.rebuilt(op.operands, **attributes)
    assert op.parent is not None
    op.parent.insert(new, op)
    op.result.replace_by(new.result)
    op.erase()


def convert(op: Op, there: Callable[[Value], Op], back: Callable[[Value], Op]) -> None:
    """Convert the operand of an operation, and its result back."""
    function = op.parent
    assert function is not None
    converted = function.insert(there(op.operands[0]), op)
    new = function.insert(op.rebuilt([converted.result]), op)
    restored = function.insert(back(new.result), op)
    op.result.replace_by(restored.result)
    op.erase()


def other_axis(module: Module, op: Collective) -> tuple[str, int] | None:
    """Another axis with as many ranks, so that shapes stay."""
    for name, size in module.mesh.axes:
        if name != op.axis and size == op.stated_group_size:
            return name, size
    return None


def keeps_type(_: Module, op: Collective) -> bool:
    return op.result.type.shape == op.operands[0].type.shape


@changes(keeps_type)
def lose(module: Module, op: Collective) -> None:
    op.result.replace_by(op.operands[0])
    op.erase()


@changes(keeps_type)
def repeat(module: Module, op: Collective) -> None:
    copy = op.rebuilt([op.result])
    module.main.insert(copy, op.next)
    op.result.replace_by(copy.result)
    copy.set_operands((op.result,))


@changes(lambda module, op: other_axis(module, op) is not None)
def change_axis(module: Module, op: Collective) -> None:
    name, size = other_axis(module, op) or ("", 0)
    replace(op, axis=name, group_size=size)


def swap(module: Module, rng: random.Random) -> str | None:
    """Two consecutive collectives that are independent of each other."""
    row = communications(module)
    pairs = [(a, b) for a, b in pairwise(row) if a.next is b and a.result not in b.operands]
    if not pairs:
        return None
    first, second = rng.choice(pairs)
    module.main.unlink(second)
    module.main.insert(second, first)
    return f"{first!r} after {second!r}"


@changes(lambda _, op: "root" in op.attributes)
def change_root(module: Module, op: Collective) -> None:
    replace(op, root=(op.attributes["root"] + 1) % (op.stated_group_size or 1))


@changes(lambda _, op: op.attributes.get("op") in ("sum", "max"))
def change_kind(module: Module, op: Collective) -> None:
    replace(op, op="min")


@changes(lambda _, op: True)
def change_dtype(module: Module, op: Collective) -> None:
    convert(op, lambda x: Cast(x, dtype="bf16"), lambda x: Cast(x, dtype="f32"))


@changes(lambda m, op: keeps_type(m, op) and op.result.type.ndim == 2)
def change_shape(module: Module, op: Collective) -> None:
    convert(
        op, lambda x: Reshape(x, shape=(SIZE * SIZE,)), lambda x: Reshape(x, shape=(SIZE, SIZE))
    )


EVERYWHERE: list[Damage] = [partial(each, row=sums) for each in (lose, repeat, change_axis)]
ON_ONE_RANK: list[Damage] = [
    *(lose, repeat, swap, change_axis, change_root, change_kind, change_dtype, change_shape)
]


@pytest.mark.parametrize("seed", SEEDS)
def test_valid_modules_pass(seed: int) -> None:
    module = local_module(seed)
    verify(module)
    assert str(parse_module(str(module))) == str(module)


@pytest.mark.parametrize("seed", SEEDS[:12])
def test_valid_modules_are_replicated(seed: int) -> None:
    """All ranks of an undamaged module compute the same result."""
    module = local_module(seed)
    results = evaluate_ranks(module, local_inputs(module, seed))
    for found in results[1:]:
        assert found["y"].tobytes() == results[0]["y"].tobytes()


@pytest.mark.parametrize("damage", EVERYWHERE, ids=["lose", "repeat", "change_axis"])
def test_damage_to_the_text_of_all_ranks_is_found(damage: Damage) -> None:
    done = 0
    for seed in range(SEEDS[0], SEEDS[0] + 1000):
        if done and seed > SEEDS[-1]:
            break
        module = local_module(seed)
        try:
            what = damage(module, random.Random(seed))
        except Error:  # refused where it is built
            done += 1
            continue
        if what is None:
            continue
        done += 1
        with pytest.raises(Error, match=r"model\.py:\d+"):
            verify(module)
            pytest.fail(f"seed {seed}: {what} in\n{module}")
    assert done


@pytest.mark.parametrize("seed", SEEDS[:30])
def test_values_are_equal_where_their_types_say_so(seed: int) -> None:
    """Every value of a valid module, and of one with accepted damage, against the arrays."""
    module = local_module(seed)
    rng = random.Random(seed)
    try:
        if rng.random() < 0.7:
            rng.choice([*EVERYWHERE, *ON_ONE_RANK])(module, rng)
        verify(module)
    except Error:
        return
    main = module.main
    values = [result for op in main for result in op.results]
    run = Run(module, local_inputs(module, seed), watched=values)
    for value in values:
        for axis in {*module.mesh.names}.difference(value.type.global_type.spread):
            for group in module.mesh.groups((axis,)):
                arrays = {run.seen[value][rank].tobytes() for rank in group}
                assert len(arrays) == 1, (value, axis)
