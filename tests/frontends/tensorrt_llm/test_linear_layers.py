"""Linear layers and feed-forwards on 1, 2 and 4 ranks, against torch on the complete weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from irc.errors import Error
from irc.frontends.tensorrt_llm import layers
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.functional import AllReduceFusionOp, AllReduceParams
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.module import Parameter
from tests.fresh import fresh
from tests.frontends.tensorrt_llm.worlds import Array, every_rank, module_of, parallel, shard

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle

WORLDS = (1, 2, 4)
K, N = 24, 16
L: Any = layers


def drawn(*shape: int) -> Array:
    """Random numbers, other ones for every shape."""
    return (fresh(sum(shape)).normal(size=shape) / np.sqrt(shape[-1])).astype("float32")


def linear(x: Array, weight: Array, bias: Array | None) -> Array:
    """torch's linear."""
    operands = (torch.from_numpy(array) for array in (x, weight, bias) if array is not None)
    return torch.nn.functional.linear(*operands).numpy()


def close(y: Array, want: Array) -> None:
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(5, K), (2, 3, K)], ids=["packed", "padded"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("tp", WORLDS)
def test_columns(tp: int, gather: bool, bias: bool, shape: tuple[int, ...]) -> None:
    x, weight = drawn(*shape), drawn(N, K)
    added = drawn(N) if bias else None

    def build(mapping: Mapping, x: Any) -> Any:
        layer = L.ColumnLinear(K, N, bias, **parallel(mapping), gather_output=gather)
        assert layer.weight.shape == (N // tp, K)
        layer.weight.value = shard(weight, 0, mapping)
        if added is not None:
            layer.bias.value = shard(added, 0, mapping)
        return layer(x)

    want = linear(x, weight, added)
    for rank, (y,) in enumerate(every_rank(build, {"x": x}, tp)):
        close(y, want if gather else shard(want, -1, Mapping(tp, rank, tp_size=tp)))


def row(mapping: Mapping, weight: Array, bias: Array | None, **more: Any) -> Any:
    """A RowLinear with this rank's part of a weight."""
    layer = L.RowLinear(K, N, bias is not None, **parallel(mapping), **more)
    layer.weight.value = shard(weight, 1, mapping)
    if layer.bias is not None:
        layer.bias.value = bias
    return layer


def held(array: Array, mapping: Mapping) -> Any:
    """This rank's features of an array, as a tensor."""
    return Parameter(shard(array, -1, mapping)).value


@pytest.mark.parametrize("version", ["0.7", "0.16"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tp", WORLDS)
def test_rows_add_the_bias_once_after_the_sum(tp: int, bias: bool, version: str) -> None:
    x, weight = drawn(2, 3, K), drawn(N, K)
    added = drawn(N) * 10 if bias else None

    def build(mapping: Mapping) -> Any:
        if version == "0.7":
            return row(mapping, weight, added, instance_id=4)(held(x, mapping), None)
        return row(mapping, weight, added)(held(x, mapping))

    for (y,) in every_rank(build, {}, tp, version):
        close(y, linear(x, weight, added))


@pytest.mark.parametrize("tp", WORLDS)
def test_experts_leave_the_sum_and_add_a_part_of_the_bias(tp: int) -> None:
    x, weight, bias = drawn(3, K), drawn(N, K), drawn(N)

    def build(mapping: Mapping) -> Any:
        return row(mapping, weight, bias, is_expert=True)(held(x, mapping))

    total = np.sum([output for (output,) in every_rank(build, {}, tp)], axis=0)
    close(total, linear(x, weight, bias))


@pytest.mark.parametrize("version", ["0.7", "0.16"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tp", WORLDS)
def test_rows_with_residual_and_norm(tp: int, bias: bool, version: str) -> None:
    x, weight, residual = drawn(3, K), drawn(N, K), drawn(3, N)
    norm, added = drawn(N), drawn(N) if bias else None
    fused = AllReduceFusionOp.RESIDUAL_RMS_NORM

    def build(mapping: Mapping, residual: Any) -> Any:
        params = AllReduceParams(
            fusion_op=fused, residual=residual, norm_weight=Parameter(norm).value, eps=1e-4
        )
        outputs = row(mapping, weight, added)(held(x, mapping), all_reduce_params=params)
        assert params.bias is None  # the layer does not change what it is given
        return outputs

    total = linear(x, weight, added) + residual
    operands = torch.from_numpy(total), (N,), torch.from_numpy(norm)
    for normed, summed in every_rank(build, {"residual": residual}, tp, version):
        close(normed, torch.nn.functional.rms_norm(*operands, eps=1e-4).numpy())
        close(summed, total)


@pytest.mark.parametrize("tp", WORLDS)
def test_two_layers_share_a_weight(tp: int) -> None:
    x, weight = drawn(3, K), drawn(N, K)

    def build(mapping: Mapping, x: Any) -> Any:
        first = L.Linear(K, N, False, **parallel(mapping))
        first.weight.value = shard(weight, 0, mapping)
        second = L.Linear(
            K, N, False, "float32", mapping.tp_group, mapping.tp_size, True, first.weight
        )
        return first(x), second(x)

    for both in every_rank(build, {"x": x}, tp):
        for y in both:
            close(y, linear(x, weight, None))


def test_the_weight_takes_the_dtype_of_x() -> None:
    x, weight = drawn(3, K).astype("float16"), drawn(N, K)

    def build(mapping: Mapping, x: Any) -> Any:
        more = {"strict_dtype": True, "pad_lda": 8, "pad_ldc": 8, "is_qkv": True}
        layer = L.Linear(K, N, False, "float32", **more)
        layer.weight.value = weight
        return layer(x)

    ((y,),) = every_rank(build, {"x": x})
    assert y.dtype == np.float16
    np.testing.assert_allclose(y, linear(x.astype("float32"), weight, None), atol=2e-2)


def test_loaders_of_the_sources_split_weights_and_join_those_of_qkv() -> None:
    with new_session():
        layer = L.Linear(2, 3, dtype="float16")
        assert (layer.tp_dim, L.RowLinear(2, 3).tp_dim) == (0, 1)
        parts = [torch.full((1, 2), float(i)) for i in range(3)]
        joined = layer.postprocess("attention.qkv.weight", parts, config=None)
    assert joined.dtype == torch.float16 and joined[:, 1].tolist() == [0, 1, 2]


def test_unset_weights_are_shards_of_the_checkpoint() -> None:
    def build(mapping: Mapping, ids: Any) -> Any:
        common = parallel(mapping)
        table = L.Embedding(5, K, **common, sharding_dim=0, tp_rank=mapping.tp_rank)
        column = L.Linear(K, N, True, **common, gather_output=False)
        return L.RowLinear(N, K, True, **common)(column(table(ids)))

    with new_session():
        module = module_of(build, {"ids": np.zeros(3, "int32")}, 2)
    refs = {str(weight.type.replicated): weight.ref for weight in module.weights.values()}
    assert {
        kind: (getattr(ref, "shape", None), [*map(str, ref.steps)]) for kind, ref in refs.items()
    } == {
        "f32[3, 24]": ((5, 24), [".shard(0, tp)"]),  # of 5 rows
        "f32[8, 24]": ((16, 24), [".shard(0, tp)"]),
        "f32[8]": ((16,), [".shard(0, tp)"]),
        "f32[24, 8]": ((24, 16), [".shard(1, tp)"]),
        "f32[24]": (None, []),
    }


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: L.Linear(K, 10, tp_group=m.tp_group, tp_size=4), "=10 is not a multiple"),
        (lambda m: L.RowLinear(10, N, tp_group=m.tp_group, tp_size=4), "pad it to 12"),
        (lambda m: L.Linear(K, N, tp_group=[0, 1], tp_size=4), "of tp_size=4 ranks, found [0, 1]"),
    ],
)  # fmt: skip
def test_messages(call: Any, message: str) -> None:
    def build(mapping: Mapping, x: Any) -> Any:
        call(mapping)
        return x

    with new_session(), pytest.raises(Error) as caught:
        module_of(build, {"x": drawn(3, K)}, 4)
    assert message in caught.value.message and "test_linear_layers.py" in str(caught.value)


ACTIVATIONS: dict[str, Any] = {
    "relu": torch.nn.functional.relu,
    "silu": torch.nn.functional.silu,
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def halves(name: str, y: Any) -> Any:
    """An activation that halves the features."""
    first, second = y.chunk(2, -1)
    return first * ACTIVATIONS[{"swiglu": "silu", "geglu": "gelu"}[name]](second)


def per_rank(parts: list[Array], mapping: Mapping) -> Array:
    """The rows of this rank of several weights, one behind the other."""
    return np.concatenate([shard(part, 0, mapping) for part in parts])


M = 32  # features of the feed-forwards


@pytest.mark.parametrize("act", ["relu", "gelu", "swiglu", "geglu"])
@pytest.mark.parametrize("tp", WORLDS)
def test_mlp(tp: int, act: str) -> None:
    x, down, bias = drawn(2, 3, K), drawn(K, M), drawn(K)
    ups, biases = [drawn(M, K), drawn(M, K)[::-1].copy()], [drawn(M), -drawn(M)]
    double = act in ("swiglu", "geglu")

    def rows(parts: list[Array], mapping: Mapping) -> Array:
        return per_rank(parts if double else parts[:1], mapping)

    def build(mapping: Mapping, x: Any) -> Any:
        layer = L.MLP(K, M, act, True, **parallel(mapping))
        layer.fc.weight.value, layer.fc.bias.value = rows(ups, mapping), rows(biases, mapping)
        layer.proj.weight.value, layer.proj.bias.value = shard(down, 1, mapping), bias
        return layer(x)

    up = [torch.from_numpy(linear(x, w, b)) for w, b in zip(ups, biases, strict=True)]
    inner = halves(act, torch.cat(up, -1)) if double else ACTIVATIONS[act](up[0])
    want = linear(inner.numpy(), down, bias)
    for (y,) in every_rank(build, {"x": x}, tp):
        close(y, want)


@pytest.mark.parametrize("act", ["silu", "gelu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("name", "version"), [("GatedMLP", "0.16"), ("FusedGatedMLP", "0.7"), ("FusedGatedMLP", "0.16")]
)
@pytest.mark.parametrize("tp", WORLDS)
def test_gated_mlp(tp: int, name: str, version: str, bias: bool, act: str) -> None:
    """fc is the activated branch; the fused weight of a rank is its gate, then its fc."""
    x, fc, gate, down = drawn(2, 3, K), drawn(M, K), drawn(M, K) * 2 + 0.1, drawn(K, M)
    biases = [drawn(M), drawn(M) * 3, drawn(K)]

    def build(mapping: Mapping, x: Any) -> Any:
        layer = getattr(layers, name)(K, M, act, bias, **parallel(mapping))
        if hasattr(layer, "fused_fc"):
            rows = [(layer.fused_fc, [gate, fc], [biases[1], biases[0]])]
        else:
            rows = [(layer.fc, [fc], biases[:1]), (layer.gate, [gate], biases[1:2])]
        for part, weights, added in rows:
            part.weight.value = per_rank(weights, mapping)
            if bias:
                part.bias.value = per_rank(added, mapping)
        layer.proj.weight.value = shard(down, 1, mapping)
        if bias:
            layer.proj.bias.value = biases[2]
        return layer(x)

    added = biases if bias else [None, None, None]
    branches = linear(x, fc, added[0]), linear(x, gate, added[1])
    inner = ACTIVATIONS[act](torch.from_numpy(branches[0])).numpy() * branches[1]
    want = linear(inner, down, added[2])
    for (y,) in every_rank(build, {"x": x}, tp, version):
        close(y, want)
