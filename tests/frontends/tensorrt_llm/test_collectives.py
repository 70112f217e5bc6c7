"""Collectives: groups in any order, fused residual and norm, parameters that nothing changes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from irc.errors import Error
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.module import Parameter
from irc.frontends.tensorrt_llm.network import Network, net_guard
from tests.fresh import fresh
from tests.frontends.tensorrt_llm.worlds import Array, Bound, every_rank, module_of

WORLDS = (1, 2, 4)
F = Bound("functional")
X = {"x": np.zeros((4, 3), "float32")}


def parts_of(tp: int, *shape: int) -> Array:
    """One array of small whole numbers per rank, so that sums are exact."""
    return fresh(tp).integers(-9, 10, (tp, *shape)).astype("float32")


def held(parts: Array, mapping: Mapping) -> Any:
    """The tensor of this rank."""
    return Parameter(parts[mapping.tp_rank]).value


CALLS: dict[str, Any] = {  # the positional arguments of allreduce by release
    "0.7": lambda x, group: F.allreduce(x, group, None, 5, F.AllReduceStrategy.RING),
    "0.10": lambda x, group: F.allreduce(x, group, F.AllReduceStrategy.AUTO, F.AllReduceConfig(0)),
    "0.13": lambda x, group: F.allreduce(x, group, 0, 0, F.AllReduceFusionParams(0, x * 0.0)),
    "0.16": lambda x, group: F.allreduce(x, group, F.AllReduceParams(F.AllReduceStrategy.UB)),
}


@pytest.mark.parametrize("release", list(CALLS))
@pytest.mark.parametrize("tp", WORLDS)
def test_allreduce_of_every_release(tp: int, release: Any) -> None:
    parts = parts_of(tp, 4, 3)

    def build(mapping: Mapping, x: Any) -> Any:
        return CALLS[release](held(parts, mapping) + x, mapping.tp_group)

    for (total,) in every_rank(build, X, tp, release):
        np.testing.assert_array_equal(total, parts.sum(0))


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
@pytest.mark.parametrize("tp", WORLDS)
def test_allgather_along_any_dimension(tp: int, dim: int) -> None:
    parts = parts_of(tp, 2, 3, 2)

    def build(mapping: Mapping, x: Any) -> Any:
        return F.allgather(held(parts, mapping), mapping.tp_group, dim)

    for (total,) in every_rank(build, X, tp):
        np.testing.assert_array_equal(total, np.concatenate(parts, dim))


@pytest.mark.parametrize("order", [[3, 1, 0, 2], [1, 0], [2, 0, 1], [0], [0, 1, 2, 3]])
def test_results_are_in_the_order_of_ranks(order: list[int]) -> None:
    """TensorRT-LLM's plugins hold the ranks of a group as a set."""
    tp = len(order)
    parts, whole = parts_of(tp, 2, 3), parts_of(tp, tp * 2, 3)

    def build(mapping: Mapping, x: Any) -> Any:
        gathered = F.allgather(held(parts, mapping), order, gather_dim=1)
        return gathered, F.reduce_scatter(held(whole, mapping), order)

    for rank, (gathered, scattered) in enumerate(every_rank(build, X, tp)):
        np.testing.assert_array_equal(gathered, np.concatenate(parts, 1))
        np.testing.assert_array_equal(scattered, np.split(whole.sum(0), tp)[rank])


def test_groups_of_both_axes_do_not_mix() -> None:
    parts = parts_of(4, 2, 3)

    def build(mapping: Mapping, x: Any) -> Any:
        own = Parameter(parts[mapping.rank]).value
        sums = F.allreduce(own, mapping.tp_group), F.allreduce(own, mapping.cp_group)
        return *sums, F.allgather(own, mapping.cp_group[::-1]), F.allreduce(own, [0, 1, 2, 3])

    for rank, outputs in enumerate(every_rank(build, X, 2, cp=2)):
        across = [rank % 2, rank % 2 + 2]  # the group over cp
        wanted = [parts[rank // 2 * 2 :][:2].sum(0), parts[across].sum(0)]
        wanted += [np.concatenate(parts[across]), parts.sum(0)]
        for array, expected in zip(outputs, wanted, strict=True):
            np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tp", WORLDS)
def test_residual_and_norm_behind_the_sum(tp: int, bias: bool, affine: bool) -> None:
    rng, parts = fresh(8), parts_of(tp, 4, 3)
    added, weight = (rng.normal(size=3).astype("float32") for _ in range(2))
    residual = rng.normal(size=(4, 3)).astype("float32")

    def build(mapping: Mapping, x: Any) -> Any:
        params = F.AllReduceParams(
            fusion_op=F.AllReduceFusionOp.RESIDUAL_RMS_NORM,
            bias=Parameter(added).value if bias else None,
            residual=x,
            norm_weight=Parameter(weight).value if affine else None,
            eps=1e-3,
        )
        return F.allreduce(held(parts, mapping), mapping.tp_group, params)

    total = (parts.sum(0) + (added if bias else 0) + residual).astype("float64")
    want = total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-3) * (weight if affine else 1)
    for normed, summed in every_rank(build, {"x": residual}, tp):
        np.testing.assert_allclose(summed, total, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(normed, want, rtol=1e-4, atol=1e-5)


def test_the_dtype_is_that_of_the_tensor() -> None:
    """TensorRT-LLM adds in the dtype of nccl_plugin, which rounds tables of f32."""
    parts = np.array([[1 + 2**-20], [0]], "float32")

    def build(mapping: Mapping, x: Any) -> Any:
        return F.allreduce(held(parts, mapping), mapping.tp_group)

    for (total,) in every_rank(build, X, 2):
        np.testing.assert_array_equal(total, parts[0])


def fused(x: Any, op: str, **more: Any) -> Any:
    """The sum over two ranks, and what follows it."""
    params = F.AllReduceParams(fusion_op=F.AllReduceFusionOp[op], **more)
    return F.allreduce(x, [0, 1], params)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: F.allreduce(x, [0, 2]), r"\[0, 2\] has the ranks of no axis"),
        (lambda x: F.allgather(x, [0, 1], gather_dim=2), "a dimension from -2 to 1, found 2"),
        (lambda x: F.reduce_scatter(x, [0, 1]), "equal shards; pad it"),
        (lambda x: fused(x, "RESIDUAL_RMS_NORM"), "RESIDUAL_RMS_NORM needs a residual"),
        (lambda x: fused(x, "LAST_PROCESS_FOR_UB", residual=x), "FOR_UB is not supported"),
        (lambda x: F.allreduce(x, [0, 1], workspce=None), "no argument 'workspce'; did you mean"),
    ],
)
def test_messages(call: Any, message: str) -> None:
    def build(mapping: Mapping, x: Any) -> Any:
        return call(x)

    with new_session(), pytest.raises(Error) as caught:
        module_of(build, {"x": np.zeros((3, 3), "float32")}, 2)
    assert re.search(message, caught.value.message)
    assert "test_collectives.py" in str(caught.value)


def test_a_group_without_a_mapping() -> None:
    message = r"the group \[4, 5\] needs a Mapping"
    with new_session(), pytest.raises(Error, match=message), net_guard(Network()):
        F.allreduce(Parameter(np.zeros(3, "float32")).value, [4, 5])
