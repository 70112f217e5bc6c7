"""Embeddings of recommenders: slots, frozen keys, and SparseOperationKit's layer."""

from typing import Any

import numpy as np
import pytest

import irc
from irc.errors import Error
from irc.frontends import Module, layers
from irc.frontends.layers import All2AllDenseEmbedding, FrozenIndex, SlotEmbedding, frozen_levels
from tests.fresh import fresh

RESERVED = 2**63 - 1


def results(layer: Module, spec: irc.Spec, ids: Any, **weights: Any) -> Any:
    name = "ids" if isinstance(layer, SlotEmbedding) else "keys"
    module = irc.trace(layer, {name: spec})
    named = {key.replace("__", "."): array for key, array in weights.items()}
    return irc.evaluate(module, {name: ids}, weights=named)["result0"]


def table(rows: int, width: int) -> Any:
    return np.arange(1, rows * width + 1, dtype=np.float32).reshape(rows, width)


def test_slots_share_a_table() -> None:
    weight = table(9, 2)
    ids = np.array([[[0, 1], [3, 4]], [[4, -1], [5, 0]]], np.int64)
    found = results(SlotEmbedding((4, 5), 2), irc.Spec("i64", ("B", 2, 2)), ids, weight=weight)
    want = [[weight[[0, 1]], weight[[7, 8]]], [np.zeros((2, 2)), [np.zeros(2), weight[4]]]]
    assert np.array_equal(found, np.array(want, np.float32))


def test_dense_rows_without_a_hashtable() -> None:
    layer = All2AllDenseEmbedding(5, 3, 2, 4, use_hashtable=False, gpu_num=2)
    ids = fresh(1).integers(0, 10, (6, 2, 4)).astype(np.int64)
    found = results(layer, irc.Spec("i64", ("B", 2, 4)), ids, weight=table(10, 3))
    assert np.array_equal(found, table(10, 3)[ids])


def test_keys_of_a_hashtable() -> None:
    keys = fresh(2).choice(10**12, 200, replace=False).astype(np.int64) - 5 * 10**11
    levels = frozen_levels(keys)
    weights = {f"index.levels.{i}.keys": level for i, level in enumerate(levels)}
    weight, order = table(200, 3), np.sort(keys)
    asked = np.append(keys[:30], [keys.max() + 1, RESERVED, -RESERVED])
    spec = irc.Spec("i64", ("N",))
    layer = All2AllDenseEmbedding(100, 3, 1, 1, dynamic_input=True, gpu_num=2)
    found = results(layer, spec, asked, weight=weight, **weights)
    assert np.array_equal(found[:30], weight[np.searchsorted(order, keys[:30])])
    assert not found[30:].any()


def test_an_index_takes_narrow_keys() -> None:
    levels = {f"levels__{i}__keys": level for i, level in enumerate(frozen_levels([3, -7, 90], 2))}
    found = results(
        FrozenIndex(3, 2), irc.Spec("i32", ("N",)), np.array([90, -7, 4, 3], np.int32), **levels
    )
    assert found.tolist() == [2, 0, -1, 1]


def traced(shape: tuple[object, ...], **options: Any) -> Any:
    layer = All2AllDenseEmbedding(4, 2, 3, 1, **options)
    return irc.trace(layer, {"keys": irc.Spec("i64", shape)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: frozen_levels([1, 1]), "all distinct and below"),
        (lambda: frozen_levels([]), "expected at least one key"),
        (lambda: frozen_levels([RESERVED]), f"below {RESERVED}"),
        (lambda: FrozenIndex(0), "an index has at least 1 key"),
        (lambda: FrozenIndex(4, 1), "nodes of at least 2 children"),
        (lambda: All2AllDenseEmbedding(4, 2, 1, 1, key_dtype="f32"), "key_dtype is 'f32'"),
        (lambda: traced(("B", 2, 1)), r"keys are \[B, 3, 1\], not"),
        (lambda: traced(("B", 3, 1), dynamic_input=True), r"with dynamic_input keys are \[N\]"),
    ],
)
def test_wrong_arguments(make: Any, message: str) -> None:
    with pytest.raises(Error, match=message):
        make()


def test_inserting_keys_is_refused() -> None:
    class Training(Module):
        def __init__(self) -> None:
            self.layer = layers.All2AllDenseEmbedding(4, 2, 1, 1)

        def forward(self, keys: Any) -> Any:
            return self.layer(keys, training=True)

    with pytest.raises(Error, match="irc is for inference and inserts no keys; leave training out"):
        irc.trace(Training(), {"keys": irc.Spec("i64", ("B", 1, 1))})
