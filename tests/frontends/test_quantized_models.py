"""Models in quantized Hugging Face folders: logits, ranks, experts, shared inputs."""

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
from .quantized_folders import CASES, folder

assert irc.passes


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


# every shard holds complete groups and heads
SIZES = {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 192}
LIMITS = {  # MatMulNBits has 16 bits of its inputs, which is enough for another code in every row
    **dict.fromkeys(("fp8", "modelopt-fp8"), 1e-5),
    "int-token": 0.03,
}
MESHES = {"tp=2": {"num_key_value_heads": 2}, "tp=3": {"num_key_value_heads": 3}}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "name", ["awq", "gptq-order", "pack-asym", "fp8", "modelopt-fp8", "int-token"]
)
def test_a_compiled_model_over_ranks(name: str, mesh: str, tmp_path: Path) -> None:
    write_model(tmp_path, name, **SIZES, **MESHES[mesh])
    module = huggingface.load(tmp_path / "quantized")
    inputs = inputs_of(module, fresh(), ROWS)
    wanted = irc.evaluate(module, inputs)["logits"]
    dims = {"B": (1, 2, ROWS)}
    artifact = irc.compile(str(tmp_path / "quantized"), tmp_path / "out", mesh=mesh, dims=dims)
    found = artifact.run(inputs)["logits"]
    assert row_error(found, wanted) < LIMITS.get(name, 1e-3)


# groups of 16 hold two heads of the output projection, and blocks of 16 two of the keys
UNEVEN = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
EVEN = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("gptq", UNEVEN), ("awq", UNEVEN), ("ct-nvfp4a16", UNEVEN), ("float-block", EVEN)],
)
def test_blocks_that_ranks_would_cut(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    write_model(tmp_path, name, num_hidden_layers=1, intermediate_size=64, **sizes)
    module = huggingface.load(tmp_path / "quantized")
    inputs = inputs_of(module, fresh(), ROWS)
    wanted = irc.evaluate(module, inputs)["logits"]
    options: Any = {"dims": {"B": (1, 2, ROWS)}, "backend": "reference", "mesh": "tp=4"}
    artifact = irc.compile(str(tmp_path / "quantized"), tmp_path / "out", **options)
    caches = {key: np.zeros((ROWS, 4, 16, 8), np.float32) for key in ("k0", "v0")}  # of all ranks
    assert row_error(artifact.run(inputs | caches)["logits"], wanted) < 1e-5


@pytest.mark.needs_rtx
def test_an_engine_takes_scales_of_another_dtype(tmp_path: Path) -> None:
    """The scales of weights are f32; the builder wants those of weights and inputs in one dtype."""
    write_model(tmp_path, "int-static", num_hidden_layers=1)
    dims = {"B": (1, 1, 1), "S": (1, 4, 8), "T": (1, 1, 8), "C": (8, 8, 8)}
    folder = str(tmp_path / "quantized")
    irc.compile(folder, tmp_path / "out", backend="tensorrt-rtx", dtype="f16", dims=dims)
    assert (tmp_path / "out" / "rank0.engine").is_file()


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
