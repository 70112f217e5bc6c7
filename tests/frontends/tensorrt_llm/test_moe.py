"""Mixtures of experts that are sharded, distributed, or both, against all experts in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from irc.errors import Error
from irc.frontends.tensorrt_llm.api import release
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.functional import AllReduceFusionOp, AllReduceParams
from irc.frontends.tensorrt_llm.layers import MOE, MoeConfig
from irc.frontends.tensorrt_llm.layers.mlp import ExpertScaleNormalizationMode, ParallelismMode
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.quantization import QuantMode
from tests.fresh import fresh
from tests.frontends.tensorrt_llm.worlds import Array, every_rank, module_of, parallel, part

E, K, H, M = 4, 2, 8, 16


def moe(**fields: Any) -> Any:
    """A config, made in the session of the call."""
    return MoeConfig(**{"num_experts": E, "top_k": K, **fields})


WORLDS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]  # tp_size, moe_ep_size


class Weights:
    """The weights of all experts; with gated activations `linear` is the other branch."""

    def __init__(self) -> None:
        rng = fresh(21)

        def drawn(*shape: int) -> Array:
            return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype("float32")

        self.router = drawn(E, H) * 3
        self.linear, self.fc, self.proj = drawn(E, M, H), drawn(E, M, H), drawn(E, H, M)
        self.linear_bias, self.fc_bias, self.proj_bias = drawn(E, M), drawn(E, M), drawn(E, H)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    power = np.exp(x - x.max(-1, keepdims=True))
    return power / power.sum(-1, keepdims=True)


def expected(w: Weights, x: Array, act: str, bias: bool, normalize: bool) -> Array:
    """Every token through its best experts, one by one."""
    scores = softmax(x.reshape(-1, H) @ w.router.T)
    mixed = np.zeros((len(scores), H))
    for row, (token, score) in enumerate(zip(x.reshape(-1, H), scores, strict=True)):
        best = np.argsort(-score)[:K]
        weights = score[best] / (score[best].sum() if normalize else 1)
        for weight, e in zip(weights, best, strict=True):
            inner = w.fc[e] @ token + (w.fc_bias[e] if bias else 0)
            inner = np.maximum(inner, 0) if act == "relu" else silu(inner)
            if act == "swiglu":
                inner = inner * (w.linear[e] @ token + (w.linear_bias[e] if bias else 0))
            mixed[row] += weight * (w.proj[e] @ inner + (w.proj_bias[e] if bias else 0))
    return mixed.reshape(x.shape)


def set_experts(
    layer: Any, w: Weights, act: str, mapping: Mapping, by_expert: bool = False
) -> None:
    """This rank's part of the experts; with `by_expert` the ranks hold different ones."""
    tp, ep = (1, mapping.tp_size) if by_expert else (mapping.moe_tp_size, mapping.moe_ep_size)
    own = range(mapping.tp_rank % ep * E // ep, (mapping.tp_rank % ep + 1) * E // ep)
    branches = [w.linear, w.fc] if act == "swiglu" else [w.fc]
    biases = [w.linear_bias, w.fc_bias] if act == "swiglu" else [w.fc_bias]

    def cut(array: Array, dim: int) -> Array:
        return part(array[own], dim, tp, mapping.tp_rank // ep)

    split = 1 if release() > 8 else mapping.tp_size
    layer.router.weight.value = part(w.router, 1, split, mapping.tp_rank % split)
    one, two = layer.projections  # fc and proj, up to 0.9 experts_weight_1 and so on
    assert one.weight is (layer.fc.weight if release() > 9 else layer.experts_weight_1)
    one.weight.value = np.concatenate([cut(branch, 1) for branch in branches], 1)
    two.weight.value = cut(w.proj, 2)
    if one.bias is not None:
        one.bias.value = np.concatenate([cut(bias, 1) for bias in biases], 1)
        two.bias.value = w.proj_bias[own]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("act", ["silu", "swiglu", "relu"])
@pytest.mark.parametrize(("tp", "ep"), WORLDS)
def test_experts_over_ranks(tp: int, ep: int, act: str, bias: bool) -> None:
    w, x = Weights(), fresh(22).normal(size=(2, 5, H)).astype("float32")
    normalize = act != "relu"
    modes = ExpertScaleNormalizationMode
    config = moe(normalization_mode=modes.RENORMALIZE if normalize else modes.NONE)

    def build(mapping: Mapping, x: Any) -> Any:
        layer: Any = MOE(config, H, M, act, mapping, bias, **parallel(mapping))
        set_experts(layer, w, act, mapping)
        return layer(x)

    want = expected(w, x, act, bias, normalize)
    for (y,) in every_rank(build, {"x": x}, tp, moe_ep_size=ep, dynamic=2 * bias):
        np.testing.assert_allclose(y, want, rtol=1e-3, atol=1e-5)


def test_scores_are_in_f32_in_a_model_of_f16() -> None:
    def build(mapping: Mapping, x: Any) -> Any:
        return MOE(moe(), H, M, "swiglu", mapping, dtype="float16")(x)

    with new_session():
        module = module_of(build, {"x": np.zeros((3, H), "float16")})
    found = [op.operands[0].type.dtype for op in module.ops() if op.opname in ("softmax", "topk")]
    assert found == ["f32", "f32"] and str(module.main.returned[0].type) == f"f16[3, {H}]"


@pytest.mark.parametrize("mode", list(ParallelismMode)[1:])
def test_the_old_generation_divides_by_tp_mode(mode: ParallelismMode) -> None:
    w, x = Weights(), fresh(23).normal(size=(5, H)).astype("float32")
    by_expert = mode == ParallelismMode.EXPERT_PARALLEL

    def build(mapping: Mapping, x: Any) -> Any:
        config = MoeConfig(num_experts=E, top_k=K, tp_mode=mode)
        group, size = mapping.tp_group, mapping.tp_size
        sizes: Any = config, H, M, "swiglu", True, "float32", group, size, mapping.tp_rank
        layer: Any = MOE(*sizes)
        set_experts(layer, w, "swiglu", mapping, by_expert)
        return layer(x)

    want = expected(w, x, "swiglu", True, True)
    for (y,) in every_rank(build, {"x": x}, 2, "0.7"):
        np.testing.assert_allclose(y, want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_residual_and_a_norm_behind_the_experts(tp: int) -> None:
    w, x = Weights(), fresh(25).normal(size=(5, H)).astype("float32")

    def build(mapping: Mapping, x: Any) -> Any:
        layer: Any = MOE(moe(), H, M, "relu", mapping, False, **parallel(mapping))
        set_experts(layer, w, "relu", mapping)
        fusion = AllReduceFusionOp.RESIDUAL_RMS_NORM
        return layer(x, all_reduce_params=AllReduceParams(fusion_op=fusion, residual=x, eps=1e-3))

    total = expected(w, x, "relu", False, True) + x
    norm = total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-3)
    for normed, summed in every_rank(build, {"x": x}, tp):
        np.testing.assert_allclose(normed, norm, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(summed, total, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        ({"top_k": 5}, {}, "found top_k=5, num_experts=4"),
        ({"top_k": 0}, {}, "found top_k=0, num_experts=4"),
        ({"normalization_mode": 2}, {}, "SPARSE_MIXER is not supported; use NONE"),
        ({"num_experts": 3}, {"moe_ep_size": 2}, "3 experts cannot be distributed over 2 ranks"),
        ({}, {"quant_mode": QuantMode.FP8_QDQ}, "or by the options of the build"),
        ({}, {"hidden_act": "sillu"}, "no activation called 'sillu'; did you mean 'silu'"),
    ],
)
def test_messages(config: dict[str, Any], more: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"hidden_act": "silu"} | more
    world: dict[str, Any] = {"moe_ep_size": arguments.pop("moe_ep_size", 1)}

    def build(mapping: Mapping, x: Any) -> Any:
        sizes: Any = {"hidden_size": H, "ffn_hidden_size": M, **parallel(mapping), **arguments}
        return MOE(moe(**config), mapping=mapping, **sizes)(x)

    with new_session(), pytest.raises(Error, match=message) as caught:
        module_of(build, {"x": np.zeros((3, H), "float32")}, 2, **world)
    assert "test_moe.py" in str(caught.value)


def test_all_classes_of_experts_are_one() -> None:
    with new_session():
        layer: Any = MOE(moe(), H, M, "relu", dtype="float32")
        assert layer.to(MOE) is layer
        with pytest.raises(Error, match="quant_config is not supported: give the layer its quant"):
            layer.to(MOE, quant_config=1)


def test_a_config_file_holds_it() -> None:
    config = MoeConfig(num_experts=E, top_k=K, shared_expert_intermediate_size=7)
    assert MoeConfig.from_dict(config.to_dict()) == config and config.has_moe()
    with pytest.raises(Error, match="no argument 'topk'; did you mean 'top_k'"):
        MoeConfig.from_dict({"topk": 2})
    assert not MoeConfig().validate().has_moe()
