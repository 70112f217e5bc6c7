"""Layers on several ranks as ONNX Runtime runs them, and as engines that are built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import irc
from irc.frontends.tensorrt_llm import layers
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.functional import AllReduceFusionOp, AllReduceParams, embedding
from irc.frontends.tensorrt_llm.functional.quantized import (
    PackedWeight,
    quantize_per_token,
    smooth_quant_gemm,
)
from irc.frontends.tensorrt_llm.layers import quantized
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.module import Module, Parameter
from irc.frontends.tensorrt_llm.quantization import QuantMode
from tests.fresh import fresh
from tests.frontends.tensorrt_llm.worlds import Array, module_of

K, N = 32, 16
INT4 = {"quant_mode": QuantMode.use_weight_only(True)}
IDS = fresh(41).integers(-2, 23, (2, 3)).astype("int32")
X = fresh(42).normal(size=(2, 3, K)).astype("float32")


def filled(layer: Any) -> Any:
    """The layer with random values, on every rank the same; those of scales are positive."""
    rng = fresh(43)
    for name, parameter in layer.named_parameters():
        kind = parameter.type.dtype
        if isinstance(parameter, PackedWeight):
            packed = rng.integers(-128, 128, (parameter.shape[0], parameter.type.shape[0] // 2))
            parameter.value = packed.astype("int8").view(parameter.stored)
            continue
        value: Any = rng.integers(-7, 8, parameter.shape)
        if kind.startswith("f32"):
            value = rng.uniform(0.01, 0.1, parameter.shape)
            value *= 1 if "scal" in name else rng.choice([-1, 1], parameter.shape)
        types: Any = {"f32": "float32", "i8": "int8", "i4": ml_dtypes.int4}
        parameter.value = value.astype(types.get(kind, ml_dtypes.float8_e4m3fn))
    return layer


def common(mapping: Mapping) -> dict[str, Any]:
    """What all layers take."""
    return {"dtype": "float32", "tp_group": mapping.tp_group, "tp_size": mapping.tp_size}


class Pair(Module):
    """A column layer and a row layer behind it."""

    def __init__(self, mapping: Mapping, column: Any, row: Any, more: dict[str, Any]) -> None:
        both = {"bias": True, **common(mapping), **more}
        self.first = column(in_features=K, out_features=K, gather_output=False, **both)
        self.second = row(in_features=K, out_features=K, **both)

    def forward(self, x: Any, params: Any = None) -> Any:
        return self.second(self.first(x), **({"all_reduce_params": params} if params else {}))


def pair(name: str, more: dict[str, Any]) -> Any:
    """Builds a pair of quantized layers."""
    kinds = getattr(quantized, f"{name}Linear"), getattr(quantized, f"{name}RowLinear")
    return lambda mapping, x: filled(Pair(mapping, *kinds, more))(x)


def normed(mapping: Mapping, x: Any) -> Any:
    fusion = AllReduceFusionOp.RESIDUAL_RMS_NORM
    pair = filled(Pair(mapping, layers.ColumnLinear, layers.RowLinear, {}))
    return pair(x, AllReduceParams(fusion_op=fusion, residual=x))


def mlp(name: str, act: str) -> Any:
    """Builds a feed-forward."""
    cls = getattr(layers, name)
    sizes = {"hidden_size": K, "ffn_hidden_size": 2 * K, "hidden_act": act}
    return lambda mapping, x: filled(cls(**sizes, **common(mapping)))(x)


def experts(mapping: Mapping, x: Any) -> Any:
    sizes: Any = {"hidden_size": K, "ffn_hidden_size": N, "hidden_act": "swiglu"}
    config = layers.MoeConfig(num_experts=4, top_k=2)
    return filled(layers.MOE(config, **sizes, mapping=mapping, **common(mapping)))(x)


def table(cls: Any, dim: int) -> Any:
    """Builds an embedding, of 21 rows."""

    def build(mapping: Mapping, ids: Any) -> Any:
        place: Any = {"sharding_dim": dim, "tp_rank": mapping.tp_rank, **common(mapping)}
        return filled(cls(num_embeddings=21, embedding_dim=K, **place))(ids)

    return build


def drawn(rows: int, factors: int) -> tuple[Any, Any]:
    """Codes i8 [rows, K], and factors."""
    codes = fresh(44).integers(-7, 8, (rows, K)).astype("int8")
    return Parameter(codes).value, Parameter(np.linspace(0.01, 0.1, factors, dtype="f4")).value


def coded_rows(mapping: Mapping, ids: Any) -> Any:
    table, factors = drawn(-(-21 // mapping.tp_size), 21)
    place: Any = {"tp_size": mapping.tp_size, "tp_group": mapping.tp_group, "sharding_dim": 0}
    return embedding(ids, table, **place, tp_rank=mapping.tp_rank, per_token_scale=factors)


def smooth(mapping: Mapping, x: Any) -> Any:
    weight, factors = drawn(N, N)
    codes, scales = quantize_per_token(x)
    product: Any = smooth_quant_gemm
    return product(codes, weight, scales, factors, True, True, "float32")


CASES: dict[str, tuple[Any, Array]] = {
    "rows": (table(layers.Embedding, 0), IDS),
    "columns": (table(layers.Embedding, 1), IDS),
    "quantized rows": (coded_rows, IDS),
    "residual and norm": (normed, X),
    "gegelu": (mlp("MLP", "gegelu"), X),
    "fused": (mlp("FusedGatedMLP", "silu"), X),
    "experts": (experts, X),
    "int4": (pair("WeightOnlyQuant", INT4), X),
    "smoothquant": (smooth, X),
}


def traced(name: str, tp: int) -> tuple[irc.Module, dict[str, Array]]:
    """The module of a case, and its inputs."""
    build, given = CASES[name]
    inputs = {"ids" if given is IDS else "x": given}
    return module_of(build, inputs, tp, moe_ep_size=2 if name == "experts" else 1), inputs


@pytest.mark.parametrize("name", CASES)
def test_onnx_runtime_agrees_with_the_reference(name: str, tmp_path: Path) -> None:
    with new_session():
        module, inputs = traced(name, 4 if name == "experts" else 2)
        wanted = irc.evaluate(module, inputs)
        irc.compile(module, tmp_path / "out")
        found = irc.load(tmp_path / "out", threads=1).run(inputs)
    assert found.keys() == wanted.keys()
    for key in wanted:
        np.testing.assert_allclose(found[key], wanted[key], rtol=1e-3, atol=1e-3)


@pytest.mark.needs_rtx
@pytest.mark.parametrize("name", ["quantized rows", "gegelu", "experts", "int4", "smoothquant"])
def test_engines_are_built(name: str, tmp_path: Path) -> None:
    with new_session():
        module, _ = traced(name, 2)
        engine = {"target": "tensorrt-rtx/sm_89"}
        irc.compile(module, tmp_path / "out", backend="tensorrt-rtx", engine=engine)
    # quantized weights are constants of the engine, so each rank has its own
    constant = any(op.opname == "dequantize" for op in module.ops())
    assert len(list((tmp_path / "out").glob("*.engine"))) == 1 + constant
