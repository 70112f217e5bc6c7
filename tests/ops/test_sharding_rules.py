"""Every sharding rule against numpy: the joined results of shards equal the global result.

For every name of a rule and 2, 3 and 4 ranks: the types state the result of the sharding (an axis
of the results, a partial sum, an Error), and the numbers must agree with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from irc.errors import Error
from irc.ir.core import Op
from irc.ir.dims import Shape, symbol
from irc.ir.sharding import Words, named_dims, operand_words, parse_rule
from irc.ir.types import TensorType
from irc.ops.factors import Group, factor_groups, reshape_rule
from tests.ops.compare import assert_close, run
from tests.ops.example import Example, inputs_of, module_of, names_of, operation
from tests.ops.examples import EXAMPLES

AXIS = "tp"
GROUP_SIZES = (2, 3, 4)
DRAWS = 400  # at most: a wrong sharding may show seldom, as with one short row among long ones
INDEX = {"embedding": "ids", "moe_combine": "chosen"}  # the operand of indices
# a dimension of theirs holds heads
HEADED = ("attention", "rope", "cache_update", "rope_and_cache", "fused_attention")
Array = np.ndarray[Any, Any]
BOUND = [
    example.bound() for examples in EXAMPLES.values() for example in examples if not example.prepare
]
RULED = [e for e in BOUND if operation(module_of(e, e.dtypes[0])).sharding_rule() is not None]
CASES = [
    pytest.param(example, dtype, id=f"{example}-{dtype}")
    for example in RULED
    for dtype in example.dtypes
]


@dataclass(frozen=True)
class Split:
    """One name of a rule: the dimension it stands for per operand and per result, if any."""

    name: str
    whole: bool
    index: int | None  # the operand whose numbers begin at 0 on every rank
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]

    @property
    def lost(self) -> bool:
        """Whether it was summed over."""
        return all(dim is None for dim in self.results)

    def fits(self, op: Op, group_size: int) -> bool:
        """Whether every dimension it stands for divides evenly."""
        pairs = [*zip(op.operands, self.operands, strict=True)]
        pairs += zip(op.results, self.results, strict=True)
        sizes = [value.type.shape[dim] for value, dim in pairs if dim is not None]
        return all(size and size % group_size == 0 for size in sizes)  # pyright: ignore[reportOperatorIssue]


def splits(op: Op) -> Iterator[Split]:
    """The names of the rule of `op` that its operands have."""
    text = op.sharding_rule()
    assert text is not None
    rule = parse_rule(text)
    operands = [words for _, words in operand_words(op, rule)]
    each = rule.results * len(op.results) if len(rule.results) == 1 else rule.results
    results = [named_dims(w, r.type.ndim) for w, r in zip(each, op.results, strict=True)]
    for name in dict.fromkeys(word for words in operands for word in words if word != "1"):
        yield Split(
            name,
            name in rule.replicated,
            op.operand_names.index(INDEX[op.opname]) if name in rule.positions else None,
            tuple(place(name, v.type, w) for v, w in zip(op.operands, operands, strict=True)),
            tuple(place(name, r.type, w) for r, w in zip(op.results, results, strict=True)),
        )


def place(name: str, type: TensorType, words: Words) -> int | None:
    """The dimension that `name` stands for; a leading one of size 1 broadcasts and is not split."""
    if name not in words:
        return None
    at = words.index(name)
    return None if name.startswith(".") and type.shape[at] == 1 else at


def put(type: TensorType, dim: int | None, summed: bool = False) -> TensorType:
    """The type sharded over the axis in one dimension, or partial over it."""
    axes = tuple((AXIS,) if i == dim else () for i in range(type.ndim))
    return type.replace(axes=axes, partial=(AXIS,) if summed else ())


def apply(example: Example, dtype: str, types: Sequence[TensorType]) -> Op:
    """The example's operation on operands of other types."""
    return operation(module_of(replace(example, mesh=f"{AXIS}=2"), dtype, types))


def refuses(example: Example, dtype: str, types: Sequence[TensorType]) -> str:
    """The message of the Error that the types must cause; it names the operation."""
    with pytest.raises(Error) as caught:
        apply(example, dtype, types)
    assert example.op in caught.value.message
    return caught.value.message


def test_every_name_is_sharded_in_some_example() -> None:
    missing: list[str] = []
    for op_name in dict.fromkeys(example.op for example in RULED):
        names: set[str] = set()
        tested: set[str] = set()
        for example in (e for e in RULED if e.op == op_name):
            for split in splits(operation(module_of(example, example.dtypes[0]))):
                if not split.whole:
                    names.add(split.name)
                    tested |= {split.name for _ in ranks(example, example.dtypes[0], split)}
        missing += [f"{name} of {op_name}" for name in sorted(names - tested)]
    assert not missing, "no example has a size that splits these"


@pytest.mark.parametrize(("example", "dtype"), CASES)
def test_replicated_names_refuse_a_sharding(example: Example, dtype: str) -> None:
    op = operation(module_of(example, dtype))
    for split in splits(op):
        if split.whole:
            pairs = zip(op.operands, split.operands, strict=True)
            message = refuses(example, dtype, [put(v.type, dim) for v, dim in pairs])
            assert f"{split.name!r} replicated" in message and AXIS in message


@pytest.mark.parametrize(("example", "dtype"), CASES)
def test_shards_give_the_global_result(
    example: Example, dtype: str, rng: np.random.Generator
) -> None:
    inputs = inputs_of(example, dtype, rng)
    whole = run(example, dtype, inputs)
    for split in splits(operation(module_of(example, dtype))):
        for group_size, one_rank, addends in ranks(example, dtype, split):
            shards = [
                run(one_rank, dtype, part(inputs, split, group_size, rank, addends))
                for rank in range(group_size)
            ]
            for i, (want, dim) in enumerate(zip(whole, split.results, strict=True)):
                what = f"{example.op} with {split.name} over {group_size}"
                got = joined([shard[i] for shard in shards], dim, split.lost)
                assert_close(got, want, what, factor=4)


def ranks(
    example: Example, dtype: str, split: Split
) -> Iterator[tuple[int, Example, tuple[int, ...]]]:
    """Per possible number of ranks: the number, the example on one rank, and the addends.

    Addends are operands that a contraction over the split adds, which must be partial too.
    """
    op = operation(module_of(example, dtype))
    if split.whole or all(dim is None for dim in split.operands):
        return
    names = [name for name, _ in op.named_operands()]
    added = getattr(op, "addends", ()) if split.lost else ()
    addends = tuple(i for i, name in enumerate(names) if name in added)
    types = [put(v.type, dim) for v, dim in zip(op.operands, split.operands, strict=True)]
    if addends:
        assert "once per rank" in refuses(example, dtype, types)
        types = [put(t, None, True) if i in addends else t for i, t in enumerate(types)]
    sharded = apply(example, dtype, types)
    for result, plain, dim in zip(sharded.results, op.results, split.results, strict=True):
        assert result.type == put(plain.type, dim, summed=split.lost), f"{example.op} {split.name}"
    for group_size in GROUP_SIZES:
        if split.fits(op, group_size):
            one_rank = on_one_rank(example, dtype, sharded, group_size)
            if one_rank is not None:
                yield group_size, one_rank, addends


def on_one_rank(example: Example, dtype: str, sharded: Op, group_size: int) -> Example | None:
    """The example with one rank's shapes; None where the split does not fall between heads."""
    results = tuple(local(r.type, group_size) for r in sharded.results)
    args = [
        replace(arg, shape=local(v.type, group_size).shape)
        for arg, v in zip(example.args, sharded.operands, strict=True)
    ]
    attributes = sharded.localized(results)
    if "inside" in attributes:  # the ids of other ranks' rows lie outside
        attributes |= {"inside": False}
    one_rank = replace(example, args=tuple(args), attributes=attributes)
    try:
        built = operation(module_of(one_rank, dtype))
    except Error:
        assert example.op in HEADED
        return None
    assert tuple(r.type for r in built.results) == results, f"{example.op}: another local type"
    return one_rank


def local(type: TensorType, group_size: int) -> TensorType:
    """One rank's type."""
    sizes = [
        int(size) // group_size if axes else size  # pyright: ignore[reportArgumentType]
        for size, axes in zip(type.shape, type.axes, strict=True)
    ]
    return TensorType(type.dtype, tuple(sizes))


def part(
    inputs: dict[str, Array], split: Split, group_size: int, rank: int, addends: Sequence[int]
) -> dict[str, Array]:
    """One rank's inputs. What is added to a contraction is zero except on rank 0."""
    parts: dict[str, Array] = {}
    for i, ((name, array), dim) in enumerate(zip(inputs.items(), split.operands, strict=True)):
        if dim is not None:
            array = np.split(array, group_size, dim)[rank]
        if i == split.index:
            array = array - rank * _positions(inputs, split) // group_size
        parts[name] = np.zeros_like(array) if i in addends and rank else array
    return parts


def _positions(inputs: dict[str, Array], split: Split) -> int:
    """How many positions there are on all ranks together."""
    sizes = zip(inputs.values(), split.operands, strict=True)
    return next(array.shape[dim] for array, dim in sizes if dim is not None)


def joined(parts: list[Array], dim: int | None, lost: bool) -> Array:
    """The global result from the ranks' results, according to the type."""
    if dim is not None:
        return np.concatenate(parts, dim)
    if not lost:
        for other in parts[1:]:
            assert_close(other, parts[0], "a result that no rank has more of than another")
        return parts[0]
    total = np.sum([p.astype(np.float64) for p in parts], axis=0)
    return np.asarray(total).astype(parts[0].dtype)


@pytest.mark.parametrize("example", [pytest.param(e, id=str(e)) for e in RULED])
def test_replicated_names_have_to_be(example: Example, rng: np.random.Generator) -> None:
    """A name marked `!` is one whose split gives a wrong result, or none, for some input."""
    dtype = example.dtypes[0]
    op = operation(module_of(example, dtype))
    for split in splits(op):
        group_size = [n for n in GROUP_SIZES if split.fits(op, n)]
        if split.whole and group_size and not trivial(op):
            draws = (inputs_of(example, dtype, rng) for _ in range(DRAWS))
            right = all(
                splits_anyway(example, dtype, split, n, d) for d in draws for n in group_size
            )
            assert not right, f"{example.op} could be sharded along {split.name}"


def trivial(op: Op) -> bool:
    """Whether there is nothing to compute, so that anything may be sharded."""
    return len(op.operands) == 1 and (op.opname == "concat" or 0 in op.operands[0].type.shape)


def splits_anyway(
    example: Example, dtype: str, split: Split, group_size: int, inputs: dict[str, Array]
) -> bool:
    """Whether shards give the global result along a dimension that the rule wants replicated."""
    op = operation(module_of(example, dtype))
    types = [put(v.type, dim) for v, dim in zip(op.operands, split.operands, strict=True)]
    results = [put(r.type, dim) for r, dim in zip(op.results, split.results, strict=True)]
    args = [
        replace(arg, shape=local(type, group_size).shape)
        for arg, type in zip(example.args, types, strict=True)
    ]
    attributes = op.localized(tuple(local(type, group_size) for type in results))
    one_rank = replace(example, args=tuple(args), attributes=attributes)
    try:
        whole = run(example, dtype, inputs)
        parts = [
            run(one_rank, dtype, part(inputs, split, group_size, r, ())) for r in range(group_size)
        ]
        for i, (want, dim) in enumerate(zip(whole, split.results, strict=True)):
            got = joined([p[i] for p in parts], dim, split.lost)
            assert_close(got, want, "shards", factor=4)
    except (Error, AssertionError):
        return False
    return True


@pytest.mark.parametrize("example", [pytest.param(e, id=str(e)) for e in RULED])
def test_sums_are_additive(example: Example, rng: np.random.Generator) -> None:
    """A partial sum in the operands of one group passes through, in numbers as in types."""
    dtype = "f32" if "f32" in example.dtypes else example.dtypes[0]
    op = operation(module_of(example, dtype))
    names = [name for name, _ in op.named_operands()]
    groups = {frozenset(group.intersection(names)) for group in op.sums} - {frozenset()}
    for group in sorted(groups, key=sorted):
        chosen = [i for i, name in enumerate(names) if name in group]
        summed = [put(v.type, None, i in chosen) for i, v in enumerate(op.operands)]
        for result in apply(example, dtype, summed).results:
            assert result.type.partial == (AXIS,)
        first, second = inputs_of(example, dtype, rng), inputs_of(example, dtype, rng)
        keys = names_of(example)
        for i, key in enumerate(keys):
            if i not in chosen:
                second[key] = first[key]
        both = {
            key: first[key] + second[key] if i in chosen else first[key]
            for i, key in enumerate(keys)
        }
        if all(first[keys[i]].dtype == np.bool_ for i in chosen):
            continue
        runs = [run(example, dtype, given) for given in (first, second, both)]
        for a, b, total in zip(*runs, strict=True):
            assert_close(a + b, total, f"{example.op} in {' '.join(sorted(group))}", factor=4)


@pytest.mark.parametrize("example", [pytest.param(e, id=str(e)) for e in RULED])
def test_other_partial_sums_are_refused(example: Example) -> None:
    op = operation(module_of(example, example.dtypes[0]))
    names = [name for name, _ in op.named_operands()]
    for i, name in enumerate(names):
        alone = names.count(name) == 1
        if alone and any(group.intersection(names) == {name} for group in op.sums):
            continue
        types = [put(v.type, None, i == at) for at, v in enumerate(op.operands)]
        assert AXIS in refuses(example, example.dtypes[0], types)


# groups of dimensions of a reshape, and the shardings that pass through it

B, S, H = symbol("B"), symbol("S"), symbol("H")


@pytest.mark.parametrize(
    ("old", "new", "groups"),
    [
        ((2, 3, 4), (6, 4), [([0, 1], [0]), ([2], [1])]),
        ((6, 4), (2, 3, 4), [([0], [0, 1]), ([1], [2])]),
        ((4, 6), (8, 3), [([0, 1], [0, 1])]),
        ((6, 4, 5), (4, 6, 5), [([0, 1], [0, 1]), ([2], [2])]),
        ((2, 1, 3), (1, 2, 3, 1), [([0], [1]), ([2], [2])]),
        ((B, S, 64), (B * S, 64), [([0, 1], [0]), ([2], [1])]),
        ((B * S, 8, 8), (B, S, 64), [([0], [0, 1]), ([1, 2], [2])]),
        ((B, 2 * S), (2 * B, S), [([0, 1], [0, 1])]),
        ((B, H * 4, S), (B, H, 4, S), [([0], [0]), ([1], [1, 2]), ([2], [3])]),
        ((B + 1, S), (S * (B + 1),), [([0, 1], [0])]),
        ((0, 3), (3, 0), []),
        ((1, 1), (), []),
    ],
)
def test_groups(old: Shape, new: Shape, groups: list[Group]) -> None:
    assert factor_groups(old, new) == groups


def test_only_the_first_of_a_group_may_be_sharded() -> None:
    assert reshape_rule((2, 3, 4), (6, 4)) == "g0 x1! g1 -> g0 g1"
    assert reshape_rule((1, 6), (2, 1, 3)) == "x0! g0 -> g0 1 1"
