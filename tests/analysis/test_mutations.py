"""Random right modules pass; with one communication lost, doubled, moved or changed they do not."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from irc.analysis.deadlock import check_ranks
from irc.analysis.spmd import verify_spmd
from irc.backends.reference import evaluate_ranks
from irc.core import Module, Op
from irc.errors import Error
from irc.ops import AllReduce, Broadcast, Cast, CollectiveScatter, Reshape
from irc.ops.collective import Collective
from irc.verify import verify
from tests.analysis.local_modules import SIZE, local_inputs, local_module
from tests.fresh import session_seed

SEEDS = [session_seed() * 1000 + i for i in range(90)]
Damage = Callable[[Module, random.Random], str | None]


def communications(module: Module) -> list[Collective]:
    return [op for op in module.main if isinstance(op, Collective) and op.operands]


def sums(module: Module) -> list[Collective]:
    """The sums whose effect shows in the results.

    A maximum, and what only a root uses, may be of anything: what is wrong before it stays unseen.
    """
    row = communications(module)
    hides = [
        isinstance(op, (Broadcast, CollectiveScatter)) or op.attributes.get("op") == "max"
        for op in row
    ]
    behind = row[max((i for i, each in enumerate(hides) if each), default=0) :]
    return [op for op in behind if isinstance(op, AllReduce) and op.op == "sum"]


def replaced(op: Op, /, **changes: object) -> None:
    new = op.rebuilt(op.operands, **changes)
    assert op.parent is not None
    op.parent.insert(new, op)
    op.result.replace_by(new.result)
    op.erase()


def other_axis(module: Module, op: Collective) -> tuple[str, int] | None:
    """Another axis with as many ranks, so that shapes stay."""
    for name, size in module.mesh.axes:
        if name != op.axis and size == op.group_size:
            return name, size
    return None


def drop(module: Module, rng: random.Random) -> str | None:
    fitting = sums(module)
    if not fitting:
        return None
    op = rng.choice(fitting)
    op.result.replace_by(op.operands[0])
    op.erase()
    return f"without {op!r}"


def duplicate(module: Module, rng: random.Random) -> str | None:
    fitting = sums(module)
    return doubled(module, rng.choice(fitting)) if fitting else None


def doubled(module: Module, op: Op) -> str:
    copy = op.rebuilt([op.result])
    module.main.insert(copy, op.next)
    op.result.replace_by(copy.result)
    copy.set_operands((op.result,))
    return f"twice {op!r}"


def change_axis(module: Module, rng: random.Random) -> str | None:
    return over_another(module, rng, communications(module))


def change_axis_of_sum(module: Module, rng: random.Random) -> str | None:
    return over_another(module, rng, sums(module))


def over_another(module: Module, rng: random.Random, row: list[Collective]) -> str | None:
    fitting = [op for op in row if other_axis(module, op) is not None]
    if not fitting:
        return None
    op = rng.choice(fitting)
    found = other_axis(module, op)
    assert found is not None
    replaced(op, axis=found[0], ways=found[1])
    return f"over {found[0]}: {op!r}"


EVERYWHERE: list[Damage] = [drop, duplicate, change_axis_of_sum]


def lose(module: Module, rng: random.Random) -> str | None:
    """Any communication whose result has the shape of its operand."""
    fitting = [op for op in communications(module) if op.result.type is op.operands[0].type]
    if not fitting:
        return None
    op = rng.choice(fitting)
    op.result.replace_by(op.operands[0])
    op.erase()
    return f"without {op!r}"


def repeat(module: Module, rng: random.Random) -> str | None:
    fitting = [op for op in communications(module) if op.result.type is op.operands[0].type]
    return doubled(module, rng.choice(fitting)) if fitting else None


def swap(module: Module, rng: random.Random) -> str | None:
    """Two communications that follow each other and do not need each other."""
    row = communications(module)
    pairs = [(a, b) for a, b in pairwise(row) if a.next is b]
    pairs = [(a, b) for a, b in pairs if a.result not in b.operands]
    if not pairs:
        return None
    first, second = rng.choice(pairs)
    module.main.unlink(second)
    module.main.insert(second, first)
    return f"{first!r} after {second!r}"


def change_root(module: Module, rng: random.Random) -> str | None:
    fitting = [op for op in communications(module) if "root" in op.attributes]
    if not fitting:
        return None
    op = rng.choice(fitting)
    replaced(op, root=(op.attributes["root"] + 1) % (op.group_size or 1))
    return f"from another root: {op!r}"


def change_kind(module: Module, rng: random.Random) -> str | None:
    fitting = [op for op in communications(module) if op.attributes.get("op") in ("sum", "max")]
    if not fitting:
        return None
    op = rng.choice(fitting)
    replaced(op, op="min")
    return f"as minimum: {op!r}"


def change_dtype(module: Module, rng: random.Random) -> str | None:
    op = rng.choice(communications(module))
    narrow = Cast(op.operands[0], dtype="bf16")
    module.main.insert(narrow, op)
    new = op.rebuilt([narrow.result])
    module.main.insert(new, op)
    wide = Cast(new.result, dtype="f32")
    module.main.insert(wide, op)
    op.result.replace_by(wide.result)
    op.erase()
    return f"in 16 bits: {op!r}"


def change_shape(module: Module, rng: random.Random) -> str | None:
    fitting = [op for op in communications(module) if op.result.type is op.operands[0].type]
    fitting = [op for op in fitting if op.result.type.rank == 2]
    if not fitting:
        return None
    op = rng.choice(fitting)
    flat = Reshape(op.operands[0], shape=(SIZE * SIZE,))
    module.main.insert(flat, op)
    new = op.rebuilt([flat.result])
    module.main.insert(new, op)
    back = Reshape(new.result, shape=(SIZE, SIZE))
    module.main.insert(back, op)
    op.result.replace_by(back.result)
    op.erase()
    return f"flat: {op!r}"


ON_ONE_RANK: list[Damage] = [
    lose,
    repeat,
    swap,
    change_axis,
    change_root,
    change_kind,
    change_dtype,
    change_shape,
]


@pytest.mark.parametrize("seed", SEEDS)
def test_right_modules_pass(seed: int) -> None:
    module = local_module(seed)
    verify(module)
    verify_spmd(module)
    check_ranks([local_module(seed) for _ in range(module.mesh.ranks)])


@pytest.mark.parametrize("seed", SEEDS[:12])
def test_right_modules_are_right(seed: int) -> None:
    """The judge is right too: all ranks come to the same result."""
    module = local_module(seed)
    results = evaluate_ranks(module, local_inputs(module, seed))
    for found in results[1:]:
        assert found["y"].tobytes() == results[0]["y"].tobytes()


@pytest.mark.parametrize("damage", EVERYWHERE, ids=lambda damage: damage.__name__)
def test_damage_to_the_text_of_all_ranks_is_found(damage: Damage) -> None:
    done = 0
    for seed in range(SEEDS[0], SEEDS[0] + 1000):
        if done and seed > SEEDS[-1]:
            break
        module = local_module(seed)
        what = damage(module, random.Random(seed))
        if what is None:
            continue
        done += 1
        verify(module)
        with pytest.raises(Error, match=r"model\.py:\d+"):
            verify_spmd(module)
            pytest.fail(f"seed {seed}: {what} in\n{module}")
    assert done


@pytest.mark.parametrize("locs", [True, False], ids=["places", "no_places"])
@pytest.mark.parametrize("damage", ON_ONE_RANK, ids=lambda damage: damage.__name__)
def test_damage_to_one_rank_is_found(damage: Damage, locs: bool) -> None:
    done = 0
    for seed in SEEDS:
        modules = [local_module(seed, locs)]
        modules += [local_module(seed, locs) for _ in range(modules[0].mesh.ranks - 1)]
        rng = random.Random(seed)
        victim = rng.randrange(len(modules))
        what = damage(modules[victim], rng)
        if what is None:
            continue
        done += 1
        verify(modules[victim])
        with pytest.raises(Error, match=rf"rank.*\b{victim}\b"):
            check_ranks(modules)
            pytest.fail(f"seed {seed}: rank {victim} {what} in\n{modules[victim]}")
    assert done
