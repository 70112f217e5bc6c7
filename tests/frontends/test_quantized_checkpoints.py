"""Layers of quantized Hugging Face folders: every layout against its packer, and refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.frontends import huggingface
from irc.ir.dtypes import numpy_dtype

from ..fresh import fresh
from .packed_layers import F8, Packed, awq, float8, gptq, pack_quantized, static8
from .quantized_folders import (
    AWQ,
    CASES,
    FP8,
    GPTQ,
    INTS,
    MODELOPT,
    ROUND,
    TENSOR,
    TOKEN,
    Layer,
    bound,
    group,
)


def check(module: irc.Module, packed: Packed) -> None:
    """The product is that of the quantized inputs and the weight, and the text parses back."""
    k = packed.weight.shape[1]
    x = fresh(k).standard_normal((5, k)).astype(np.float32)
    wanted = packed.inputs(x) @ packed.weight.T
    found = irc.evaluate(module, {"x": x})["result0"]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    assert str(irc.parse(str(module))) == str(module)


@pytest.mark.parametrize("shape", [(24, 32), (40, 96)])
@pytest.mark.parametrize("name", CASES)
def test_a_layer(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    config, packer = CASES[name]
    packed = packer(fresh(shape[0]), *shape)
    check(bound(tmp_path / "m", config, packed), packed)


@pytest.mark.parametrize(("n", "k"), [(20, 12), (331, 120), (24, 331), (9, 576)])
def test_blocks_that_do_not_divide_a_weight(n: int, k: int, tmp_path: Path) -> None:
    """Inputs of such a width are not quantized."""
    packed = float8(fresh(n), n, k, "weight_scale_inv", (128, 128))
    with pytest.warns(UserWarning, match="the inputs of proj.weight stay floats"):
        module = bound(tmp_path / "m", FP8 | {"weight_block_size": [128, 128]}, packed)
    check(module, packed)


@pytest.mark.parametrize(("n", "k"), [(10, 44), (7, 36)])
@pytest.mark.parametrize("sym", [True, False])
def test_words_that_rows_do_not_fill(n: int, k: int, sym: bool, tmp_path: Path) -> None:
    packed = pack_quantized(fresh(n), n, k, 4, sym=sym)
    check(bound(tmp_path / "m", group(**INTS | {"symmetric": sym}), packed), packed)


def test_groups_that_do_not_divide_the_inputs(tmp_path: Path) -> None:
    packed = gptq(fresh(), 16, 40, 16)
    check(bound(tmp_path / "m", GPTQ, packed), packed)


IN_PLACE = {
    "pack-asym": "proj.weight : u4[24, 32] = bytes(@ckpt, ",
    "modelopt-nvfp4": "proj.weight : f4e2m1[24, 32] = bytes(@ckpt, ",
    "fp8": 'proj.weight : f8e4m3[24, 32] = @ckpt["proj.weight"]\n',
    "int-token": 'proj.weight : i8[24, 32] = @ckpt["proj.weight"]\n',
    "awq": '= unpacked(@ckpt["proj.qweight"], "awq", u4[32, 24]).transpose(1, 0)\n',
    "pack": "proj.weight : i4[24, 32] = unpacked(",
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_references(name: str, tmp_path: Path) -> None:
    config, packer = CASES[name]
    assert IN_PLACE[name] in str(bound(tmp_path / "m", config, packer(fresh(), 24, 32)))


def test_hf_quant_config_of_modelopt(tmp_path: Path) -> None:
    packed = static8(fresh(), 24, 32)
    path = tmp_path / "m"
    module = bound(path, MODELOPT, packed)
    (path / "config.json").write_text("{}")
    own = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    again = irc.trace(Layer(24, 32), {"x": irc.Spec("f32", ("B", 32))})
    assert str(huggingface.bind(again, path)) == str(module)


REFUSED = {
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "codes are indices into tables"),
    "unknown": ({"quant_method": "quip"}, "quant_method='quip'.*irc reads awq, auto-round, gptq"),
    "no method": ({"bits": 4}, "lacks the key quant_method"),
    "gemv": (AWQ | {"version": "gemv"}, "version='gemv': irc reads the layout gemm"),
    "3 bits": (GPTQ | {"bits": 3}, "bits=3: irc reads GPTQ with 4 and 8 bits"),
    "auto-round": (ROUND | {"packing_format": "auto_round:itrex"}, "irc reads awq, auto_awq, gptq"),
    "extra": (ROUND | {"extra_config": {"proj": {"bits": 8}}}, "proj has other bits, groups or"),
    "zeros": (ROUND | {"extra_config": {"proj": {"sym": False}}}, "groups or zero points"),
    "inputs": (ROUND | {"act_bits": 8}, "act_bits=8: irc reads codes of weights alone"),
    "no object": (GPTQ | {"quantization": 5}, "quantization_config: quantization is 5; expected"),
    "marlin": (GPTQ | {"checkpoint_format": "marlin"}, "irc reads gptq and gptq_v2"),
    "modelopt": (
        MODELOPT | {"quant_algo": "W4A8_MXFP4_FP8"},
        "quant_algo='W4A8_MXFP4_FP8': irc reads FP8",
    ),
    "a word": (
        MODELOPT | {"quantized_layers": {"proj": "FP8"}},
        "quantized_layers=.*: proj is 'FP8'; expected an object with quant_algo",
    ),
    "rotated": (group(**INTS) | {"transform_config": {"config_groups": {}}}, "does not rotate"),
    "ignored": (AWQ | {"modules_to_not_convert": ["proj"]}, "leaves proj as it was"),
    "mixed": (FP8, "mixes formats: proj.qweight is none of weight_scale_inv, weight_scale"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_configs(name: str, tmp_path: Path) -> None:
    config, message = REFUSED[name]
    with pytest.raises(irc.Error, match=message):
        bound(tmp_path / "m", config, awq(fresh(), 24, 32, 16))


REFUSED_GROUPS = (
    ({"num_bits": 3}, None, "proj: weights sets num_bits=3: irc reads integers of 4 and 8 bits"),
    ({}, TOKEN | {"symmetric": False}, "symmetric=False: irc finds dynamic scales of symmetric"),
    ({}, TENSOR | {"dynamic": True}, "strategy='tensor': irc finds dynamic scales per token and"),
    ({}, TENSOR | {"num_bits": 6}, "num_bits=6: irc quantizes inputs to int8, FP8 and FP4"),
)


@pytest.mark.parametrize(("weights", "inputs", "message"), REFUSED_GROUPS)
def test_refused_groups(weights: Any, inputs: Any, message: str, tmp_path: Path) -> None:
    config = group(**INTS | weights, inputs=inputs)
    with pytest.raises(irc.Error, match=message):
        bound(tmp_path / "m", config, pack_quantized(fresh(), 24, 32, 16))
    config["config_groups"]["group_0"]["targets"] = ["Embedding", "re:lm_head"]
    with pytest.raises(irc.Error, match="have no target for proj"):
        bound(tmp_path / "m", config, pack_quantized(fresh(), 24, 32, 16))


def changed(packed: Packed, **tensors: np.ndarray | None) -> Packed:
    every = packed.tensors | tensors
    found = {key: array for key, array in every.items() if array is not None}
    return Packed(found, packed.weight)


def test_refused_tensors(tmp_path: Path) -> None:
    packed = gptq(fresh(), 24, 32, 16)
    uneven = np.array([1, 0, 0, 0] * 8, np.int32)
    for tensors, message in (
        ({"g_idx": uneven}, r"proj.g_idx has groups of unequal sizes, expected 16"),
        ({"scales": None}, "lacks the tensor proj.scales"),
        (
            {"qweight": np.zeros((5, 24), np.int32)},
            r"qweight is i32\[5, 24\]; expected i32\[4, 24\]",
        ),
        ({"weight": np.zeros((24, 32), np.float32)}, "both proj.weight and proj.qweight"),
        ({"extra": np.zeros(2, np.float32)}, "the model does not use them"),
    ):
        with pytest.raises(irc.Error, match=message):
            bound(tmp_path / "m", GPTQ, changed(packed, **tensors))
    static = static8(fresh(), 24, 32)
    turned = changed(static, weight=np.ascontiguousarray(static.tensors["weight"].T))
    with pytest.raises(
        irc.Error, match=r"f8e4m3\[32, 24\]; expected the bytes of f8e4m3\[24, 32\]"
    ):
        bound(tmp_path / "m", MODELOPT, turned)
    for value in (0.0, -1.0, np.inf, np.nan):
        scale = np.array(value, np.float32)
        with pytest.raises(irc.Error, match="a scale is positive and finite"):
            bound(tmp_path / "m", MODELOPT, changed(static, input_scale=scale))


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
@pytest.mark.parametrize("name", ["awq", "gptq", "pack", "fp8", "ct-nvfp4", "modelopt-nvfp4"])
def test_scales_of_weights_are_positive_and_finite(name: str, value: float, tmp_path: Path) -> None:
    config, packer = CASES[name]
    packed = packer(fresh(), 32, 64)
    for key, scales in packed.tensors.items():
        if "scale" not in key or "input" in key:
            continue
        bad = scales.copy()
        bad.flat[-1] = value
        if value == 0 and scales.dtype == numpy_dtype("f8e4m3"):  # a small one, rounded
            bound(tmp_path / "m", config, changed(packed, **{key: bad}))
            continue
        with pytest.raises(irc.Error, match=f"proj.{key} has scales from .* positive and finite"):
            bound(tmp_path / "m", config, changed(packed, **{key: bad}))


def test_scales_in_bytes_hold_no_nan(tmp_path: Path) -> None:
    config, packer = CASES["mxfp8"]
    packed = packer(fresh(), 32, 64)
    bad = packed.tensors["weight_scale"].copy()
    bad.flat[3] = 255
    with pytest.raises(
        irc.Error, match=r"proj.weight_scale has scales from .* positive and finite"
    ):
        bound(tmp_path / "m", config, changed(packed, weight_scale=bad))


def test_biases_of_zeros_need_no_model_that_adds_them(tmp_path: Path) -> None:
    packed = gptq(fresh(), 24, 32, 16)
    check(bound(tmp_path / "m", GPTQ, changed(packed, bias=np.zeros(24, np.float16))), packed)
    bias = np.eye(1, 24, dtype=np.float16)[0]
    with pytest.raises(irc.Error, match=r"the model does not use them:\n *proj.bias"):
        bound(tmp_path / "m", GPTQ, changed(packed, bias=bias))


def test_a_config_is_needed(tmp_path: Path) -> None:
    with pytest.raises(irc.Error, match="has no quantization_config"):
        bound(tmp_path / "m", {}, awq(fresh(), 24, 32, 16))


def test_scales_of_caches_are_not_used(tmp_path: Path) -> None:
    scale = np.ones(1, np.float32)
    with pytest.warns(UserWarning, match="proj.k_scale.*--kv-cache"):
        bound(tmp_path / "m", MODELOPT, static8(fresh(), 24, 32), **{"proj.k_scale": scale})


BUILT = {
    "rows": (F8, (1, 32), TOKEN | {"type": "float"}),
    "groups": (F8, (1, 16), TOKEN | {"type": "float"}),
    "groups of int8": (np.int8, (1, 16), TOKEN),
    "squares": (F8, (16, 16), TOKEN | {"type": "float"}),
}


@pytest.mark.needs_rtx
@pytest.mark.parametrize("name", BUILT)
def test_engines_of_inputs_quantized_by_token(name: str, tmp_path: Path) -> None:
    """TensorRT has no kernel for codes of both where weights have groups."""
    kind, block, inputs = BUILT[name]
    packed = float8(fresh(), 32, 32, "weight_scale", block)
    if kind is np.int8:
        packed.tensors["weight"] = packed.tensors["weight"].view(np.int8)
    weights = {"num_bits": 8, "type": inputs["type"], "strategy": "group", "group_size": 16}
    if name == "squares":
        weights |= {"strategy": "block", "block_structure": [*block]}
    module = bound(tmp_path / "m", group(**weights, symmetric=True, inputs=inputs), packed)
    engine = {"target": "tensorrt-rtx-1.7/sm_89"}
    options: dict[str, Any] = {"backend": "tensorrt-rtx", "dims": {"B": (1, 2, 4)}}
    irc.compile(module, tmp_path / "out", **options, engine=engine)
    assert list((tmp_path / "out").glob("*.engine"))
