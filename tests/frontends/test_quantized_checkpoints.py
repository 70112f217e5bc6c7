"""Quantized Hugging Face folders: layers against their packers, models, ranks, and refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
import irc.passes
from irc.frontends import huggingface
from irc.frontends.module import Module, StackedParameter
from irc.ir.dtypes import numpy_dtype
from irc.pipeline import run_pipeline
from irc.weights.safetensors import read_header

from ..fresh import fresh
from ..models.golden import write_safetensors
from ..rows import ROWS, row_error
from ..tiny_checkpoint import CONFIG
from .quantized_layers import (
    AWQ,
    CASES,
    F8,
    FP8,
    GPTQ,
    INTS,
    MODELOPT,
    ROUND,
    TENSOR,
    TOKEN,
    Layer,
    Packed,
    awq,
    bound,
    float8,
    folder,
    gptq,
    group,
    pack_quantized,
    static8,
)

assert irc.passes


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


@pytest.mark.parametrize(
    "name", ["awq", "gptq", "pack", "fp8", "ct-nvfp4", "modelopt-nvfp4", "mxfp8"]
)
def test_scales_of_weights_are_positive_and_finite(name: str, tmp_path: Path) -> None:
    config, packer = CASES[name]
    packed = packer(fresh(), 32, 64)
    keys = [key for key in packed.tensors if "scale" in key and "input" not in key]
    for key in keys:
        scales = packed.tensors[key]
        in_bytes = scales.dtype == np.uint8  # exponents, of which 255 is NaN
        for value in (255,) if in_bytes else (0.0, -1.0, np.inf, np.nan):
            bad = scales.copy()
            bad.flat[-1] = value
            wrong = changed(packed, **{key: bad})
            if value == 0 and scales.dtype == numpy_dtype("f8e4m3"):  # a small one, rounded
                bound(tmp_path / "m", config, wrong)
                continue
            message = f"proj.{key} has scales from .* positive and finite"
            with pytest.raises(irc.Error, match=message):
                bound(tmp_path / "m", config, wrong)


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
    """Prompts of five tokens that share none, with empty caches."""
    found: dict[str, np.ndarray] = {}
    sizes = {"B": rows, "S": 5, "T": 1, "C": 16}
    for arg in module.main.args:
        shape = [
            sizes[str(size)] if str(size) in sizes else int(str(size)) for size in arg.type.shape
        ]
        found[str(arg.name)] = np.zeros(shape, np.int32 if arg.type.dtype == "i32" else np.float32)
    found["input_ids"][...] = rng.permutation(256)[: 5 * rows].reshape(rows, 5)
    found["positions"][...] = np.arange(5)
    found["logit_positions"][...] = 4
    return found


@pytest.mark.needs_rtx
@pytest.mark.parametrize("name", ["gptq-sym", "pack", "fp8", "mxfp8", "modelopt-nvfp4"])
def test_graphs_of_tensorrt_on_two_ranks(name: str, tmp_path: Path) -> None:
    """Weights of blocks, whose files do not state sizes, are joined there, and taken apart."""
    path = write_model(tmp_path, name, hidden_size=64, intermediate_size=128, head_dim=16)
    engine = {"build": False, "target": "tensorrt-rtx-1.7/sm_120"}
    options: dict[str, Any] = {"backend": "tensorrt-rtx", "dtype": "bf16", "engine": engine}
    artifact = irc.compile(path / "quantized", tmp_path / "out", mesh="tp=2", **options)
    assert artifact.module.mesh.ranks == 2


EXPERTS = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]} | {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
}


LOGITS = [
    *((name, EXPERTS) for name in ("awq", "gptq-sym", "pack", "ct-nvfp4a16")),
    *((name, {}) for name in ("awq", "gptq-sym", "gptq-order", "pack", "ct-nvfp4a16")),
]


@pytest.mark.parametrize(("name", "changes"), LOGITS)
def test_a_model_has_the_logits_of_its_dequantized_weights(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    path = write_model(tmp_path, name, **changes)
    module = huggingface.load(path / "quantized")
    assert " = dequantize " in str(module)
    inputs = inputs_of(module, fresh())
    wanted = irc.evaluate(huggingface.load(path / "float"), inputs)["logits"]
    found = irc.evaluate(module, inputs)["logits"]
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())


# every shard holds complete groups and heads; in MatMulNBits 16 bits of its inputs are enough for
# another code in every row
WHOLE = {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 192}
LIMITS = {"fp8": 1e-5, "modelopt-fp8": 1e-5, "int-token": 0.03}
# groups of 16 hold two heads of the output projection, and blocks of 16 two of the keys
CUT = {"num_hidden_layers": 1, "intermediate_size": 64, "head_dim": 8}
UNEVEN = CUT | {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
EVEN = CUT | {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
RANKS: list[tuple[str, str, str, dict[str, Any], float]] = [
    *(("onnx", f"tp={tp}", name, WHOLE | {"num_key_value_heads": tp}, LIMITS.get(name, 1e-3))
      for name in ("awq", "gptq-order", "pack-asym", "fp8", "modelopt-fp8", "int-token")
      for tp in (2, 3)),
    *(("reference", "tp=4", name, UNEVEN, 1e-5) for name in ("gptq", "awq", "ct-nvfp4a16")),
    ("reference", "tp=4", "float-block", EVEN, 1e-5),
]  # fmt: skip


@pytest.mark.parametrize(("backend", "mesh", "name", "sizes", "limit"), RANKS)
def test_a_compiled_model_over_ranks(
    backend: str, mesh: str, name: str, sizes: dict[str, Any], limit: float, tmp_path: Path
) -> None:
    write_model(tmp_path, name, **sizes)
    module = huggingface.load(tmp_path / "quantized")
    inputs = inputs_of(module, fresh(), ROWS)
    wanted = irc.evaluate(module, inputs)["logits"]
    options: Any = {"dims": {"B": (1, 2, ROWS)}, "backend": backend, "mesh": mesh}
    artifact = irc.compile(str(tmp_path / "quantized"), tmp_path / "out", **options)
    if backend == "reference":  # the caches of all ranks
        inputs |= {key: np.zeros((ROWS, 4, 16, 8), np.float32) for key in ("k0", "v0")}
    assert row_error(artifact.run(inputs)["logits"], wanted) < limit


@pytest.mark.needs_rtx
def test_an_engine_takes_scales_of_another_dtype(tmp_path: Path) -> None:
    """The scales of weights are f32; the builder wants those of weights and inputs in one dtype."""
    write_model(tmp_path, "int-static", num_hidden_layers=1)
    dims = {"B": (1, 1, 1), "S": (1, 4, 8), "T": (1, 1, 8), "C": (8, 8, 8)}
    source = str(tmp_path / "quantized")
    irc.compile(source, tmp_path / "out", backend="tensorrt-rtx", dtype="f16", dims=dims)
    assert (tmp_path / "out" / "rank0.engine").is_file()


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


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
CACHES = [  # of ModelOpt and of compressed-tensors
    ("modelopt-fp8", {"kv_cache_quant_algo": "FP8"}, "{0}_proj.{0}_scale", "fp8"),
    ("int-token", {"kv_cache_scheme": FLOAT8}, "{0}_scale", "fp8"),
    ("awq", {"kv_cache_scheme": FLOAT8 | {"type": "int"}}, "{0}_scale", "int8"),
]


@pytest.mark.filterwarnings("ignore:.*is the scale of a quantized KV cache")
@pytest.mark.parametrize(("name", "scheme", "key", "kind"), CACHES)
def test_caches_have_the_scales_of_the_checkpoint(
    name: str, scheme: dict[str, Any], key: str, kind: str, tmp_path: Path
) -> None:
    path = write_model(tmp_path, name, num_hidden_layers=1) / "quantized"
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= scheme
    (path / "config.json").write_text(json.dumps(config))
    scales = {"k": 0.02, "v": 0.07}
    keys = {f"model.layers.0.self_attn.{key.format(part)}": s for part, s in scales.items()}
    write_safetensors(path / "s.safetensors", {k: np.array([s], "f4") for k, s in keys.items()})
    weights = dict.fromkeys(read_header(path / "model.safetensors"), "model.safetensors")
    index = {"weight_map": weights | dict.fromkeys(keys, "s.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))

    module = huggingface.load(path)
    inputs = inputs_of(module, fresh())
    plain = irc.evaluate(module, inputs)
    options: dict[str, Any] = {"backend": "reference", "dtype": "f32"}
    compiled = irc.compile(path, tmp_path / "out", kv_cache=kind, **options).module
    code, most = numpy_dtype("i8" if kind == "int8" else "f8e4m3"), 127 if kind == "int8" else 448
    empty = {name: np.zeros(array.shape, code) for name, array in inputs.items() if name[1:] == "0"}
    results = irc.evaluate(compiled, inputs | empty)
    for part, scale in scales.items():
        numbers = np.clip(plain[f"{part}0"] / np.float32(scale), -most - (kind == "int8"), most)
        wanted = (np.rint(numbers) if kind == "int8" else numbers).astype(code)
        np.testing.assert_array_equal(results[f"{part}0"].astype("f4"), wanted.astype("f4"))
    if kind == "fp8":
        with pytest.raises(irc.Error, match="a cache in int8 needs statistics"):
            irc.compile(path, tmp_path / "other", kv_cache="int8", **options)
