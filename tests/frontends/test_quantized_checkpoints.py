"""Quantized Hugging Face folders: every layout against its packer, models, ranks and refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
import irc.passes
from irc.frontends import huggingface
from irc.frontends.layers import Linear
from irc.frontends.module import Module, StackedParameter
from irc.pipeline import run_pipeline

from ..fresh import fresh
from ..models.golden import write_safetensors
from ..tiny_checkpoint import CONFIG
from .packed_layers import (
    F8,
    Packed,
    awq,
    by_block,
    by_token,
    float8,
    gptq,
    int_quantized,
    nvfp4,
    pack_quantized,
    static8,
)

assert irc.passes
Packer = Callable[[Any, int, int], Packed]


def group(**weights: Any) -> dict[str, Any]:
    """The quantization_config of compressed-tensors for one group."""
    inputs = weights.pop("inputs", None)
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    own = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
    return own | {"config_groups": {"group_0": scheme}}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": False}
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
INTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
TENSOR = TOKEN | {"strategy": "tensor", "dynamic": False}
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}

# name -> (quantization_config, packer); N and K must fit the groups and words of the layout
CASES: dict[str, tuple[dict[str, Any], Packer]] = {
    "awq": (AWQ, lambda r, n, k: awq(r, n, k, 16)),
    "gptq": (GPTQ, lambda r, n, k: gptq(r, n, k, 16)),
    "gptq2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda r, n, k: gptq(r, n, k, 16, less=0)),
    "gptq-sym": (GPTQ | {"sym": True}, lambda r, n, k: gptq(r, n, k, 16, sym=True)),
    "gptq-8": (GPTQ | {"bits": 8, "sym": True}, lambda r, n, k: gptq(r, n, k, 16, 8, True)),
    "gptq-rows": (GPTQ | {"group_size": -1}, lambda r, n, k: gptq(r, n, k, k)),
    "gptq-order": (GPTQ | {"desc_act": True}, lambda r, n, k: gptq(r, n, k, 16, ordered=False)),
    "pack": (group(**INTS), lambda r, n, k: pack_quantized(r, n, k, 16)),
    "pack-asym": (
        group(**INTS | {"symmetric": False}),
        lambda r, n, k: pack_quantized(r, n, k, 16, sym=False),
    ),
    "pack-8": (group(**INTS | {"num_bits": 8}), lambda r, n, k: pack_quantized(r, n, k, 16, 8)),
    "int-token": (
        group(num_bits=8, type="int", strategy="channel", inputs=TOKEN),
        lambda r, n, k: int_quantized(r, n, k, False),
    ),
    "int-static": (
        group(num_bits=8, type="int", strategy="channel", inputs=TENSOR),
        lambda r, n, k: int_quantized(r, n, k, True),
    ),
    "float-rows": (
        group(**FLOAT, strategy="channel", inputs=TOKEN | {"type": "float"}),
        lambda r, n, k: float8(r, n, k, "weight_scale", (1, k), inputs=by_token(F8, 448)),
    ),
    "float-block": (
        group(
            **FLOAT,
            strategy="block",
            block_structure=[16, 16],
            inputs=TOKEN | {"type": "float", "strategy": "group", "group_size": 16},
        ),
        lambda r, n, k: float8(r, n, k, "weight_scale", (16, 16), inputs=by_block(16, F8, 448)),
    ),
    "ct-nvfp4": (
        group(**FP4, inputs=FP4 | {"dynamic": "local"}),
        lambda r, n, k: nvfp4(r, n, k, "compressed-tensors"),
    ),
    "ct-nvfp4a16": (group(**FP4), lambda r, n, k: nvfp4(r, n, k, "compressed-tensors", False)),
    "modelopt-fp8": (MODELOPT, static8),
    "modelopt-nvfp4": (
        MODELOPT | {"quant_algo": "NVFP4"},
        lambda r, n, k: nvfp4(r, n, k, "modelopt"),
    ),
    "fp8": (
        FP8,
        lambda r, n, k: float8(r, n, k, "weight_scale_inv", (16, 16), inputs=by_block(16, F8, 448)),
    ),
}


class Layer(Module):
    def __init__(self, n: int, k: int) -> None:
        self.proj = Linear(k, n, bias=False)

    def forward(self, x: Any) -> Any:
        return self.proj(x)


def folder(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    write_safetensors(path / "model.safetensors", tensors)
    return path


def bound(path: Path, config: dict[str, Any], packed: Packed, **more: np.ndarray) -> irc.Module:
    """y = x · weightᵀ over x f32 [B, K], bound to a folder with the packed layer."""
    tensors = {f"proj.{key}": array for key, array in packed.tensors.items()} | more
    n, k = packed.weight.shape
    module = irc.trace(Layer(n, k), {"x": irc.Spec("f32", ("B", k))})
    return huggingface.bind(module, folder(path, config, tensors))


def check(module: irc.Module, packed: Packed) -> None:
    """The product is that of the quantized inputs and the weight, and the text parses back."""
    k = packed.weight.shape[1]
    x = fresh(k).standard_normal((5, k)).astype(np.float32)
    wanted = packed.inputs(x) @ packed.weight.T
    found = irc.evaluate(module, {"x": x})["result0"]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    assert str(irc.parse(str(module))) == str(module)


@pytest.mark.parametrize("shape", [(24, 32), (40, 48)])
@pytest.mark.parametrize("name", CASES)
def test_a_layer(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    config, packer = CASES[name]
    packed = packer(fresh(shape[0]), *shape)
    check(bound(tmp_path / "m", config, packed), packed)


@pytest.mark.parametrize(("n", "k"), [(20, 12), (331, 120), (24, 331), (9, 576)])
def test_blocks_that_do_not_divide_a_weight(n: int, k: int, tmp_path: Path) -> None:
    """Inputs of such a width are not quantized."""
    packed = float8(fresh(n), n, k, "weight_scale_inv", (128, 128))
    check(bound(tmp_path / "m", FP8 | {"weight_block_size": [128, 128]}, packed), packed)


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


# Models


def write_model(path: Path, name: str, **changes: Any) -> Path:
    """Two folders: path/quantized, and path/float with the weights that it stands for."""
    quantization, packer = CASES[name]
    rng = fresh()
    module = huggingface.model_of(CONFIG | changes).trace("f32")
    stored: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    for weight in module.weights.values():
        keys = [source.key for source in weight.ref.sources()]  # type: ignore[attr-defined]
        for key in keys:
            shape = tuple(int(str(size)) for size in weight.type.shape)[-2:]
            if len(shape) == 2 and ("proj" in key or ".experts." in key):
                packed = packer(rng, *shape)
                plain[key] = np.ascontiguousarray(packed.weight, np.float32)
                layer = key.removesuffix(".weight")
                stored |= {f"{layer}.{each}": array for each, array in packed.tensors.items()}
            else:
                values = rng.standard_normal(shape).astype(np.float32) * 0.3
                plain[key] = stored[key] = values if len(shape) == 2 else np.ones_like(values)
    for kind, tensors in (("float", plain), ("quantized", stored)):
        own = {"quantization_config": quantization} if kind == "quantized" else {}
        (path / kind).mkdir()
        (path / kind / "config.json").write_text(json.dumps(CONFIG | changes | own))
        write_safetensors(path / kind / "model.safetensors", tensors)
    return path


def inputs_of(module: irc.Module, rng: Any, rows: int = 2) -> dict[str, np.ndarray]:
    """A prompt of five tokens with empty caches."""
    found: dict[str, np.ndarray] = {}
    sizes = {"B": rows, "S": 5, "T": 1, "C": 16}
    for arg in module.main.args:
        shape = [
            sizes[str(size)] if str(size) in sizes else int(str(size)) for size in arg.type.shape
        ]
        found[str(arg.name)] = np.zeros(shape, np.int32 if arg.type.dtype == "i32" else np.float32)
    found["input_ids"][...] = rng.integers(0, 256, found["input_ids"].shape)
    found["positions"][...] = np.arange(5)
    found["logit_positions"][...] = 4
    return found


WEIGHT_ONLY = ["awq", "gptq-sym", "gptq-order", "pack", "ct-nvfp4a16"]


def check_logits(path: Path) -> None:
    """The logits of path/quantized are those of path/float."""
    module = huggingface.load(path / "quantized")
    assert " = dequantize " in str(module)
    inputs = inputs_of(module, fresh())
    wanted = irc.evaluate(huggingface.load(path / "float"), inputs)["logits"]
    found = irc.evaluate(module, inputs)["logits"]
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_a_model_has_the_logits_of_its_dequantized_weights(name: str, tmp_path: Path) -> None:
    check_logits(write_model(tmp_path, name))


@pytest.mark.parametrize(
    "name", ["awq", "gptq-order", "pack-asym", "fp8", "modelopt-fp8", "int-token"]
)
def test_a_compiled_model_on_two_ranks(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, name)
    module = huggingface.load(tmp_path / "quantized")
    inputs = inputs_of(module, fresh())
    wanted = irc.evaluate(module, inputs)["logits"]
    artifact = irc.compile(str(tmp_path / "quantized"), tmp_path / "out", mesh="tp=2")
    found = artifact.run(inputs)["logits"]
    assert np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()


@pytest.mark.parametrize("name", ["awq", "gptq-sym", "pack", "ct-nvfp4a16"])
def test_a_mixture_of_experts(name: str, tmp_path: Path) -> None:
    mixtral = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    write_model(tmp_path, name, **mixtral, **more)
    check_logits(tmp_path)


class Experts(Module):
    def __init__(self, n: int, k: int) -> None:
        self.up = StackedParameter(3, (n, k), "w1.weight")

    def forward(self, x: Any) -> Any:
        return x @ self.up.transpose(1, 2)


@pytest.mark.parametrize("name", ["fp8", "modelopt-fp8", "modelopt-nvfp4", "int-token", "awq"])
def test_inputs_of_experts(name: str, tmp_path: Path) -> None:
    """Static scales are those of the expert with the largest inputs."""
    config, packer = CASES[name]
    packed = [packer(fresh(i), 24, 32) for i in range(3)]
    tensors = {f"{i}.w1.{key}": a for i, p in enumerate(packed) for key, a in p.tensors.items()}
    path = folder(tmp_path / "m", config, tensors)
    module = irc.trace(Experts(24, 32), {"x": irc.Spec("f32", (3, "B", 32))})
    huggingface.bind(module, path)
    x = fresh(5).standard_normal((3, 4, 32)).astype(np.float32)
    widest = max(packed, key=lambda each: float(each.tensors.get("input_scale", 0)))
    wanted = np.stack([widest.inputs(x)[i] @ p.weight.T for i, p in enumerate(packed)])
    found = irc.evaluate(module, {"x": x})["result0"]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


def test_shards_hold_their_codes_and_scales(tmp_path: Path) -> None:
    write_model(tmp_path, "awq", intermediate_size=64)
    module = huggingface.load(tmp_path / "quantized")
    run_pipeline(module, 'shard{mesh="tp=2"}')
    types = {name: str(weight.type) for name, weight in module.weights.items()}
    assert types["model.layers.0.mlp.up_proj.weight"] == "u4[64@tp, 32]"
    assert types["model.layers.0.mlp.up_proj.scale"] == "f32[64@tp, 2]"
    assert types["model.layers.0.mlp.down_proj.weight"] == "u4[32, 64@tp]"
    assert types["model.layers.0.mlp.down_proj.zero"] == "u4[32, 4@tp]"
    assert types["model.layers.0.self_attn.o_proj.weight"] == "u4[32, 32@tp]"


def test_an_input_is_quantized_once(tmp_path: Path) -> None:
    write_model(tmp_path, "int-token", num_hidden_layers=1)
    module = huggingface.load(tmp_path / "quantized")
    assert str(module).count(" = quantize ") == 4  # of q, k, v; o; gate, up; down


def test_hf_quant_config_of_modelopt(tmp_path: Path) -> None:
    packed = static8(fresh(), 24, 32)
    path = tmp_path / "m"
    module = bound(path, MODELOPT, packed)
    (path / "config.json").write_text("{}")
    own = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    again = irc.trace(Layer(24, 32), {"x": irc.Spec("f32", ("B", 32))})
    assert str(huggingface.bind(again, path)) == str(module)


# Refusals

REFUSED = {
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "codes are indices into tables"),
    "unknown": ({"quant_method": "quip"}, "quant_method='quip'.*irc reads awq, gptq"),
    "no method": ({"bits": 4}, "lacks the key quant_method"),
    "gemv": (AWQ | {"version": "gemv"}, "version='gemv': irc reads the layout gemm"),
    "3 bits": (GPTQ | {"bits": 3}, "bits=3: irc reads GPTQ with 4 and 8 bits"),
    "marlin": (GPTQ | {"checkpoint_format": "marlin"}, "irc reads gptq and gptq_v2"),
    "modelopt": (MODELOPT | {"quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ': irc reads FP8"),
    "sparse": (group(**INTS) | {"format": "marlin-24"}, "format='marlin-24': irc reads pack-q"),
    "ignored": (AWQ | {"modules_to_not_convert": ["proj"]}, "leaves proj as it was"),
    "mixed": (FP8, "mixes formats: proj.qweight is none of weight_scale_inv, weight_scale"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_configs(name: str, tmp_path: Path) -> None:
    config, message = REFUSED[name]
    with pytest.raises(irc.Error, match=message):
        bound(tmp_path / "m", config, awq(fresh(), 24, 32, 16))


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
    for value in (0.0, -1.0, np.inf, np.nan):
        scale = np.array(value, np.float32)
        with pytest.raises(irc.Error, match="a scale is positive and finite"):
            bound(tmp_path / "m", MODELOPT, changed(static, input_scale=scale))


def test_a_config_is_needed(tmp_path: Path) -> None:
    with pytest.raises(irc.Error, match="has no quantization_config"):
        bound(tmp_path / "m", {}, awq(fresh(), 24, 32, 16))


def test_scales_of_caches_are_not_used(tmp_path: Path) -> None:
    scale = np.ones(1, np.float32)
    with pytest.warns(UserWarning, match="proj.k_scale.*--kv-cache"):
        bound(tmp_path / "m", MODELOPT, static8(fresh(), 24, 32), **{"proj.k_scale": scale})
