"""`embedding` and the layers over it: every branch, release and kind of ids, on every rank.

Tables have distinct rows and ids the full range, so that a row of another rank, a wrong offset and
a missing mask all show.
"""

# pyright: reportCallIssue=false
# (the binder takes the arguments of every release)

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from irc.backends.reference.evaluate import evaluate_ranks
from irc.errors import Error
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.functional import recv, send
from irc.frontends.tensorrt_llm.layers import Embedding, PromptTuningEmbedding
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.module import Parameter
from tests.fresh import fresh
from tests.frontends.tensorrt_llm.worlds import (
    Array,
    Bound,
    every_rank,
    module_of,
    parallel,
    shard,
    used,
)

WORLDS = (1, 2, 3, 4, 8)
embedding = Bound("functional").embedding  # whose positional arguments depend on the release


def table_of(rows: int, width: int, dtype: str = "float32") -> Array:
    """A table of distinct rows, with infinities, NaN and subnormal numbers among them."""
    values = fresh(1).normal(size=(rows, width)).astype(dtype)
    specials = [np.inf, -np.inf, np.nan, np.finfo(dtype).smallest_subnormal]
    places = fresh(2).permutation(values.size)[: len(specials)]
    values.flat[places] = specials
    return values


def border_ids(rows: int, tp: int, dtype: str) -> Array:
    """Ids at the borders of shards, negative, beyond the table, duplicates, and random ones."""
    part = -(-rows // tp)
    borders = [rank * part + near for rank in range(tp + 1) for near in (-1, 0, 1)]
    far = [np.iinfo(dtype).min, np.iinfo(dtype).max, -rows, 2**30 + 1]
    far += [2**31, 2**32, 2**32 + 1, -(2**32)] if dtype == "int64" else []
    some = fresh(3).integers(-2, rows + 2, 9).tolist()
    return np.array([*borders, *far, *some, rows - 1, rows, rows - 1], dtype)


def expected(table: Array, ids: Array) -> Array:
    """Rows of the table, zeros for ids that it does not have."""
    rows = np.zeros((*ids.shape, table.shape[1]), table.dtype)
    for place, id in np.ndenumerate(ids):
        if 0 <= id < len(table):
            rows[place] = table[id]
    return rows


def looked_up(mapping: Mapping, ids: Any, table: Array, dim: int, *more: Any) -> Any:
    """What `embedding` gives for this rank's shard of a table."""
    weight = Parameter(shard(table, dim, mapping)).value
    return embedding(ids, weight, mapping.tp_size, mapping.tp_group, dim, mapping.tp_rank, *more)


def layer(table: Array, dim: int, **more: Any) -> Any:
    """Builds an Embedding of a global table."""

    def build(mapping: Mapping, ids: Any) -> Any:
        place = parallel(mapping, sharding_dim=dim, tp_rank=mapping.tp_rank) | more
        module = Embedding(*table.shape, **place | {"dtype": str(table.dtype)})
        module.weight.value = shard(table, dim, mapping)
        return module(ids)

    return build


def check(build: Any, ids: Array, want: Array, tp: int, *version: str, dynamic: int = 0) -> None:
    """Every rank has the rows, bit for bit but for the sign of zeros."""
    ranks = every_rank(build, {"ids": ids}, tp, *version, dynamic=dynamic)
    for rank, (rows,) in enumerate(ranks):
        assert rows.dtype == want.dtype
        np.testing.assert_array_equal(rows, want, err_msg=f"rank {rank} of {tp}")


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("rows", [1, 3, 16, 29])
@pytest.mark.parametrize("tp", WORLDS)
def test_rows_over_ranks(rows: int, tp: int, dtype: str) -> None:
    table, ids = table_of(rows, 4), border_ids(rows, tp, dtype)
    check(layer(table, 0), ids, expected(table, ids), tp)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("tp", (1, 2, 4))
def test_columns_over_ranks(tp: int, dtype: str) -> None:
    table, ids = table_of(13, 8), border_ids(13, tp, dtype)
    check(layer(table, 1), ids, expected(table, ids), tp)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (2, 1, 3), (1, 2, 3, 2), (0,), (2, 0)])
def test_ids_of_any_shape(shape: tuple[int, ...], dim: int) -> None:
    table = table_of(7, 4, "float16")
    ids = fresh(4).integers(-3, 10, shape).astype("int32")
    for dynamic in {0, len(shape)}:
        check(layer(table, dim), ids, expected(table, ids), 2, dynamic=dynamic)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_no_rounding_in_any_dtype(dtype: str) -> None:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    table = fresh(5).normal(size=(9, 4)).astype(kind)
    ids = np.arange(-1, 10, dtype="int32")
    check(layer(table, 0), ids, expected(table, ids), 4)


@pytest.mark.parametrize("dim", [0, 1])
def test_both_orders_of_positional_arguments(dim: int) -> None:
    table, ids = table_of(12, 4), np.arange(-1, 13, dtype="int32")

    def old(mapping: Mapping, ids: Any) -> Any:
        return looked_up(mapping, ids, table, dim, None, 7)

    def new(mapping: Mapping, ids: Any) -> Any:
        return looked_up(mapping, ids, table, dim, None, Parameter(shape=(2, 4)).value)

    check(old, ids, expected(table, ids), 2, "0.7")
    check(new, ids, expected(table, ids), 2, "0.16")


@pytest.mark.parametrize("version", ["0.7", "0.16"])
def test_without_a_group_the_weight_is_that_of_all(version: str) -> None:
    table, ids = table_of(6, 4), np.array([5, 0, 6, -1], "int64")

    def build(mapping: Mapping, ids: Any) -> Any:
        return embedding(ids, Parameter(table).value, tp_size=mapping.tp_size, tp_rank=None)

    module = module_of(build, {"ids": ids}, 2)
    assert {op.opname for op in module.ops()} == {"embedding", "return"}
    check(build, ids, expected(table, ids), 2, version)


def test_a_group_that_does_not_begin_at_rank_0() -> None:
    table, ids = table_of(10, 4), np.arange(-1, 11, dtype="int32")

    def build(mapping: Mapping, ids: Any, received: Any) -> Any:
        if mapping.is_first_pp_rank():
            return send(ids, mapping.next_pp_rank())
        assert mapping.tp_group == [2, 3]
        return looked_up(mapping, recv(received, mapping.prev_pp_rank()), table, 0)

    with new_session():
        inputs = {"ids": ids, "received": np.zeros_like(ids)}
        module = module_of(build, inputs, 2, 2)
        ranks = evaluate_ranks(module, used(module, inputs))
    for rank in (2, 3):
        np.testing.assert_array_equal(ranks[rank]["out0"], expected(table, ids))


def test_ranks_numbered_the_other_way() -> None:
    table, ids = table_of(10, 4), np.arange(-1, 11, dtype="int32")

    def build(mapping: Mapping, ids: Any) -> Any:
        place = mapping.tp_size - 1 - mapping.tp_rank
        part = shard(table, 0, Mapping(2, place, tp_size=2))
        return embedding(ids, Parameter(part).value, 2, [1, 0], 0, place)

    check(build, ids, expected(table, ids), 2)


def test_rows_of_padding_are_never_found() -> None:
    table, ids = table_of(5, 4), np.arange(-1, 9, dtype="int32")

    def build(mapping: Mapping, ids: Any) -> Any:
        module = Embedding(5, 4, None, 4, mapping.tp_group, 0, mapping.tp_rank)
        is_row = np.arange(2)[:, None] + 2 * mapping.tp_rank < 5
        module.weight.value = np.where(is_row, shard(table, 0, mapping), np.float32(77))
        return module(ids)

    check(build, ids, expected(table, ids), 4)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_factor_per_row(tp: int, whole: bool, dim: int) -> None:
    """The factors are those of all rows or of the rank's; TensorRT-LLM confuses them."""
    rng, rows = fresh(6), 10
    codes = rng.integers(-127, 128, (rows, 4)).astype("int8")
    factors = rng.uniform(0.5, 2, rows).astype("float32")
    ids = border_ids(rows, tp, "int32")
    want = expected(codes.astype("float32") * factors[:, None], ids)

    def build(mapping: Mapping, ids: Any) -> Any:
        scale = Parameter(factors if whole or dim == 1 else shard(factors, 0, mapping))
        return looked_up(mapping, ids, codes, dim, scale.value, None)

    check(build, ids, want, tp)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sharding_dim": 2, "tp_rank": 0}, "expected sharding_dim 0 .* or 1 .*, found 2"),
        ({"sharding_dim": 0, "tp_rank": None}, "needs tp_rank, found None"),
        ({"sharding_dim": 0, "tp_rank": 2}, "tp_rank from 0 to 1"),
        (
            {"sharding_dim": 1, "per_token_scale": Parameter(np.ones(3, "float32"))},
            r"per_token_scale of the 4 rows of the weight, .* found f32\[3\]",
        ),
        ({"sharding_dim": 0, "tp_rank": 0, "tp_group": [0]}, "tp_group of tp_size=2 ranks"),
    ],
)
def test_value_errors(arguments: dict[str, Any], message: str) -> None:
    def build(mapping: Mapping, ids: Any) -> Any:
        group = {"tp_group": mapping.tp_group} | arguments
        return embedding(ids, Parameter(table_of(4, 4)).value, tp_size=2, **group)

    with new_session(), pytest.raises(ValueError, match=message) as caught:
        module_of(build, {"ids": np.zeros(3, "int32")}, 2)
    assert isinstance(caught.value, Error) and "test_embedding.py" in str(caught.value)


def test_collectives_may_have_one_id() -> None:
    table, ids = table_of(4, 4), np.array([0, 3, 9])

    def build(mapping: Mapping, ids: Any) -> Any:
        return sum(looked_up(mapping, ids, table, 0, None, 3) for _ in range(2))

    check(build, ids, 2 * expected(table, ids), 2, "0.7")


@pytest.mark.parametrize("version", ["0.7", "0.16"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("tp", "dim"), [(1, 0), (2, 0), (4, 0), (2, 1)])
def test_prompt_tuning(tp: int, dim: int, packed: bool, version: str) -> None:
    rng, rows, prompts = fresh(7), 11, 3
    table = rng.normal(size=(rows, 4)).astype("float32")
    prompt = rng.normal(size=(2 * prompts, 4)).astype("float32")
    tokens = rng.integers(0, rows + prompts, (3, 5)).astype("int32")
    tokens[0, :3] = rows - 1, rows, rows + prompts - 1
    tasks = np.array([1, 0, 1], "int32")
    places = np.where(tokens >= rows, tokens - rows + prompts * tasks[:, None], 0)
    want = np.where((tokens >= rows)[..., None], prompt[places], expected(table, tokens))
    inputs = {"tokens": tokens, "prompt": prompt, "tasks": tasks[:, None]}
    if packed:
        inputs |= {"tokens": tokens.reshape(-1), "tasks": np.repeat(tasks, 5)}
        want = want.reshape(-1, 4)
    inputs["size"] = np.array([prompts], "int32")

    def build(mapping: Mapping, tokens: Any, prompt: Any, tasks: Any, size: Any) -> Any:
        place = parallel(mapping, sharding_dim=dim, tp_rank=mapping.tp_rank)
        layer = PromptTuningEmbedding(rows, 4, **place)
        layer.weight.value = shard(table, dim, mapping)
        return layer(tokens, prompt, tasks, size)

    for (outputs,) in every_rank(build, inputs, tp, version):
        np.testing.assert_array_equal(outputs, want)
