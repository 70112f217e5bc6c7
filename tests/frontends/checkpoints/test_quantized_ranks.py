"""Quantized TensorRT-LLM folders: codes and scales of all ranks against the arrays they mean."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import irc
from irc.frontends.checkpoints import mixed_gemm
from irc.frontends.checkpoints import tensorrt_llm as checkpoint
from irc.frontends.checkpoints.mixed_gemm import is_interleaved, pack, quantize_columns, unpack
from irc.ir.core import Module
from irc.weights.checkpoint import Reader
from tests.fresh import fresh
from tests.frontends.checkpoints.rank_folders import Arrays, Conversion, write_folder
from tests.frontends.checkpoints.test_rank_folders import LLAMA, tensors_of

Array = np.ndarray
F8, F4 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
CONFIG = LLAMA | {"hidden_size": 32, "intermediate_size": 512, "num_hidden_layers": 2}
LINEAR = (".qkv.weight", ".dense.weight", ".fc.weight", ".gate.weight", ".proj.weight")
GROUP = 8


@dataclass
class Packed:
    """The tensors of a layer by the end of their keys, the weight that they mean, and factors."""

    tensors: Arrays
    weight: Array
    factors: Array | None = None


def _level() -> Arrays:
    return {"activation_scaling_factor": np.array([0.125], np.float32)}


def _scales(w: Array) -> Array:
    """A scale per row, the same for every part of a row."""
    return np.linspace(0.02, 0.05, len(w), dtype=np.float32)


def float8(w: Array, as_bytes: bool = False, same: bool = True) -> Packed:
    scale = np.float32(0.02 if same else np.abs(w).max() / 448)
    codes = (w / scale).astype(F8)
    stored = codes.view(np.int8) if as_bytes else codes
    tensors = {"weight": stored, "weights_scaling_factor": np.array([scale]), **_level()}
    return Packed(tensors, codes.astype(np.float32) * scale)


def float8_rows(w: Array) -> Packed:
    scale = _scales(w)
    codes = (w / scale[:, None]).astype(F8)
    return Packed(
        {"weight": codes, "per_channel_scale": scale}, codes.astype(np.float32) * scale[:, None]
    )


def int8_rows(w: Array, smooth: bool = True) -> Packed:
    scale = _scales(w)
    codes = np.clip(np.rint(w / scale[:, None]), -127, 127).astype(np.int8)
    tensors = {"weight": codes, "weights_scaling_factor": scale}
    packed = Packed(tensors, codes.astype(np.float32) * scale[:, None])
    return with_factors(packed, tensors | _level()) if smooth else packed


def int4_groups(w: Array, level: bool = False) -> Packed:
    """pack_int4_in_uint8 of ModelOpt: the even rows of a weight are the low halves of bytes."""
    blocks = w.reshape(len(w), -1, GROUP)
    scale = (np.abs(blocks).max(-1) / 7).astype(np.float32)
    codes = np.clip(np.rint(blocks / scale[..., None]), -8, 7).astype(np.int8)
    weight = (codes * scale[..., None]).reshape(w.shape)
    codes = codes.reshape(w.shape)
    stored = (codes[::2] & 15) | (codes[1::2] << 4)
    tensors = {"weight": stored.astype(np.int8), "weights_scaling_factor": scale}
    if level:
        tensors |= {"weights_scaling_factor_2": np.array([0.5], np.float32), **_level()}
    return with_factors(Packed(tensors, weight), tensors)


def float4(w: Array) -> Packed:
    whole, blocks = np.float32(2**-7), w.reshape(len(w), -1, 16)
    scale = (np.abs(blocks).max(-1) / 6 / whole).astype(F8)
    codes = (blocks / (scale.astype(np.float32) * whole)[..., None]).astype(F4)
    weight = codes.astype(np.float32) * (scale.astype(np.float32) * whole)[..., None]
    halves = codes.reshape(w.shape).view(np.uint8) & 15
    tensors = {"weight": halves[:, ::2] | halves[:, 1::2] << 4, "weights_scaling_factor": scale}
    tensors |= {"weights_scaling_factor_2": np.array([whole]), **_level()}
    return Packed(tensors, weight.reshape(w.shape))


def weight_only(w: Array, bits: int, plus: int = 0) -> Packed:
    """Codes as the kernels of one GPU read them; a rank has scales of its own."""
    codes, scales = quantize_columns(w.T, bits)
    codes = codes.astype(np.int16) + plus
    scales = scales.astype(np.float16)
    tensors = {"weight": mixed_gemm.pack(codes, bits), "per_channel_scale": scales}
    return Packed(tensors, (codes * scales.astype(np.float32)).T)


def with_factors(packed: Packed, tensors: Arrays) -> Packed:
    """The layer with factors of its input, which depend on the position only."""
    k = packed.weight.shape[1]
    factors = np.linspace(0.5, 2, k, dtype=np.float32)
    return Packed(tensors | {"prequant_scaling_factor": factors}, packed.weight, factors)


CASES: dict[str, tuple[str, Callable[[Array], Packed]]] = {
    "fp8": ("FP8", float8),
    "fp8 in bytes": ("FP8", lambda w: float8(w, as_bytes=True)),
    "fp8, also of the head": ("FP8", float8),
    "fp8 rows": ("FP8_PER_CHANNEL_PER_TOKEN", float8_rows),
    "int8 rows": ("W8A8_SQ_PER_CHANNEL", int8_rows),
    "int8 weights": ("W8A16", lambda w: int8_rows(w, smooth=False)),
    "int8 columns": ("W8A16", lambda w: weight_only(w, 8)),
    "int4 columns": ("W4A16", lambda w: weight_only(w, 4)),
    "awq": ("W4A16_AWQ", int4_groups),
    "awq with inputs in fp8": ("W4A8_AWQ", lambda w: int4_groups(w, level=True)),
    "nvfp4": ("NVFP4", float4),
}


Pack = Callable[[str, Array], Arrays]


def packing(packer: Callable[[Array], Packed], linear: tuple[str, ...] = LINEAR) -> Pack:
    """What stands in the files in place of a weight."""

    def pack(key: str, array: Array) -> Arrays:
        ends = packer(array).tensors if key.endswith(linear) else {"weight": array}
        return {key.removesuffix("weight") + end: x for end, x in ends.items()}

    return pack


def written(
    folder: Path, pack: Pack | None = None, config: Any = CONFIG, tp: int = 2, **section: Any
) -> Path:
    """A folder of ranks with a `quantization` in its config.json."""
    more: dict[str, Any] = {"quantization": {"group_size": GROUP, **section}}
    return write_folder(folder, config, tensors_of(config), Conversion(tp=tp), pack, **more)


@dataclass
class Folders:
    """A quantized folder, and one with the weights that it means."""

    quantized: Path
    floats: Path


def folders(path: Path, name: str, how: Conversion, fold: bool = False) -> Folders:
    """Both folders of a case; with `fold` the factors are in the weights of the second."""
    algorithm, packer = CASES[name]
    linear = (*LINEAR, "lm_head.weight") if "head" in name else LINEAR
    both = Folders(path / "quantized", path / "floats")

    def unpacked(array: Array) -> Packed:
        packed = packer(array)
        factors = packed.factors if fold and packed.factors is not None else 1
        return Packed({"weight": packed.weight * factors}, packed.weight)

    tensors = tensors_of(CONFIG)
    more = {"quantization": {"quant_algo": algorithm, "group_size": GROUP}}
    write_folder(both.quantized, CONFIG, tensors, how, packing(packer, linear), **more)
    write_folder(both.floats, CONFIG, tensors, how, packing(unpacked, linear))
    return both


def dequantized(module: Module, name: str) -> Array:
    """The weight that codes and scales of a module stand for."""
    read, site = Reader(module), name.removesuffix(".weight")
    found = read.read(module.weights[name]).astype(np.float32)
    for part in ("scale", "tensor_scale"):
        if f"{site}.{part}" not in module.weights:
            continue
        scale = read.read(module.weights[f"{site}.{part}"]).astype(np.float32)
        for dim in range(2):
            scale = np.repeat(scale, found.shape[dim] // scale.shape[dim], dim)
        found = found * scale
    return found


@pytest.mark.parametrize(
    ("name", "tp"), [(name, tp) for name in CASES for tp in (1, 2, 4) if (name, tp) != ("nvfp4", 4)]
)
def test_weights(name: str, tp: int, tmp_path: Path) -> None:
    how = Conversion(tp=tp, pp=1 + (tp == 4))
    made = folders(tmp_path, name, how)
    module, wanted = checkpoint.load(made.quantized), checkpoint.load(made.floats)
    assert str(irc.parse(str(module))) == str(module)
    for key, weight in wanted.weights.items():
        expected = Reader(wanted).read(weight)
        np.testing.assert_allclose(dequantized(module, key), expected, rtol=1e-6, err_msg=key)
    quantizes = sum(op.opname == "quantize" for op in module.ops())
    assert quantizes == (
        0 if CASES[name][0] in ("W8A16", "W4A16", "W4A16_AWQ") else 8 + ("head" in name)
    )


@pytest.mark.parametrize("how", [Conversion(), Conversion(tp=2)], ids=["1", "2"])
@pytest.mark.parametrize("name", ["awq", "int8 weights", "int4 columns"])
def test_logits_on_any_mesh(name: str, how: Conversion, tmp_path: Path) -> None:
    """Codes times factors give what the weights give into which the factors are folded."""
    made = folders(tmp_path, name, how, fold=how.tp == 1)
    module = checkpoint.load(made.quantized)
    factors = {key for key in module.weights if key.endswith(".factors")}
    assert len(factors) == (8 if name == "awq" else 0)
    ids = fresh().integers(0, CONFIG["vocab_size"], (2, 6)).astype(np.int32)
    found = [
        irc.compile(made.quantized, tmp_path / f"out{mesh}", mesh=mesh, backend="reference")
        for mesh in ("", "tp=2")
    ]
    logits = [artifact.run({"input_ids": ids})["logits"] for artifact in found]
    if how.tp == 1:
        floats = irc.compile(made.floats, tmp_path / "out_floats", backend="reference")
        logits.append(floats.run({"input_ids": ids})["logits"])
    for each in logits[1:]:
        np.testing.assert_allclose(each, logits[0], rtol=1e-3, atol=1e-3 * np.abs(logits[0]).max())


BUILT = ("fp8 rows", "int8 rows")  # whose products TensorRT fuses with both quantizations


@pytest.mark.needs_rtx
@pytest.mark.parametrize("name", [name for name in CASES if name != "nvfp4"])
def test_graphs_of_tensorrt(name: str, tmp_path: Path) -> None:
    made = folders(tmp_path, name, Conversion(tp=2))
    engine = {"build": name in BUILT, "target": "tensorrt-rtx-1.7/sm_89"}
    options: dict[str, Any] = {"backend": "tensorrt-rtx", "dtype": "bf16", "engine": engine}
    artifact = irc.compile(made.quantized, tmp_path / "out", mesh="tp=2", **options)
    assert artifact.module.mesh.ranks == 2


REFUSED = {
    "int8 of a converter": ("W8A16", float8_rows, "order that the GEMM plugin .*--quantize w8a16"),
    "int8 of older GPUs": ("W8A16", lambda w: weight_only(w, 8, 128), "is i8.*the GEMM plugin"),
    "gptq": ("W4A16_GPTQ", int4_groups, "weight is i8.*--quantize w4a16_gptq"),
    "awq of one GPU": (
        "W4A16_AWQ",
        lambda w: Packed(int4_groups(w).tensors | {"weight": w.astype(np.float16)[:, ::4]}, w),
        r"qkv.weight is f16\[32, 8\]: codes of W4A16_AWQ in the order",
    ),
    "another": (
        "FP8_BLOCK_SCALES",
        float8,
        "quant_algo='FP8_BLOCK_SCALES': irc reads FP8, FP8_PER",
    ),
    "different scales": (
        "FP8",
        lambda w: float8(w, same=False),
        "attention.qkv.weights_scaling_factor differs between ranks.*with tp_size=1",
    ),
    "none": (None, float8, "q_proj.weight_scale, but config.json has no"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    algorithm, packer, message = REFUSED[name]

    folder = written(tmp_path / "m", packing(packer), quant_algo=algorithm)
    with pytest.raises(irc.Error, match=message):
        checkpoint.load(folder)


def test_excluded_layers_and_caches(tmp_path: Path) -> None:
    """Scales of a layer that stayed in floats are not used, nor are those of caches."""

    def pack(key: str, array: Array) -> Arrays:
        name, own = key.removesuffix("weight"), {"weight": array}
        if key.endswith(".dense.weight"):
            ends = ("weights_scaling_factor", "activation_scaling_factor")
            own |= dict.fromkeys(ends, np.ones(1, np.float32))
            cache = {key.replace("dense.weight", "kv_cache_scaling_factor"): np.ones(1, np.float32)}
            return cache | {name + end: x for end, x in own.items()}
        own = float8(array).tensors if key.endswith(LINEAR) else own
        return {name + end: x for end, x in own.items()}

    folder = written(tmp_path / "m", pack, quant_algo="FP8", kv_cache_quant_algo="FP8")
    with pytest.warns(UserWarning, match="kv_cache_quant_algo=FP8; the caches stay"):
        module = checkpoint.load(folder)
    key = "model.layers.1.self_attn.o_proj.weight"
    np.testing.assert_array_equal(Reader(module).read(module.weights[key]), tensors_of(CONFIG)[key])


def test_inputs_are_clamped(tmp_path: Path) -> None:
    """As in Meta's recipe, whose first and last layers and attention are floats in the folder."""

    pack = packing(float8_rows, (".proj.weight",))
    section = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "use_meta_recipe": True}

    def loaded(*clamp: float) -> Module:
        return checkpoint.load(written(tmp_path, pack, tp=1, clamp_val=clamp or None, **section))

    inputs = [op.operands[0] for op in loaded(-0.5, 0.75).ops() if op.opname == "quantize"]
    clips = [x.producer for x in inputs if x.producer and x.producer.opname == "clip"]
    assert len(inputs) == len(clips) == CONFIG["num_hidden_layers"]
    for clip in clips:
        assert (clip.attributes["low"], clip.attributes["high"]) == (-0.5, 0.75)
        assert {op.opname for op in clip.result.users} == {"dynamic_scale", "quantize"}
    assert not any(op.opname == "clip" for op in loaded().ops())
    with pytest.raises(irc.Error, match="expected the lowest and the highest input"):
        loaded(1.0)


@pytest.mark.parametrize("equal", [False, True])
def test_factors_of_several_layers(equal: bool, tmp_path: Path) -> None:
    """Factors that all ranks have are not those, of as many bytes, that ranks split."""
    config = CONFIG | {"intermediate_size": 2 * CONFIG["hidden_size"]}

    def packer(array: Array) -> Packed:
        packed = int4_groups(array)
        if equal:
            packed.tensors["prequant_scaling_factor"][:] = 1
        return packed

    folder = written(tmp_path / "m", packing(packer), config, quant_algo="W4A16_AWQ")
    module = checkpoint.load(folder)
    for key, weight in module.weights.items():
        if key.endswith(".factors"):
            assert weight.type.shape == (64 if "down_proj" in key else 32,), key


def test_float_weights_to_quantize(tmp_path: Path) -> None:
    folder = written(tmp_path / "m", quant_algo="W4A16")
    assert checkpoint.scheme_of_floats(folder) == "w4a16"
    with pytest.warns(UserWarning, match="are floats; give --quantize w4a16"):
        checkpoint.load(folder)
    checkpoint.load(written(folder, quant_algo="NO_QUANT"))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("outer", [(), (3,)])
def test_codes(bits: int, outer: tuple[int, ...]) -> None:
    weight = fresh().standard_normal((*outer, 32, 24)).astype(np.float32)
    weight[..., 5] = 0.0
    codes, scales = quantize_columns(weight, bits)
    most = 2 ** (bits - 1)
    np.testing.assert_allclose(scales, np.abs(weight).max(-2) / most)
    assert (codes.min(), codes.max()) == (-most, most - 1) and not codes[..., 5].any()
    near = np.abs(codes * scales[..., None, :] - weight)
    assert (near <= 0.5001 * scales[..., None, :])[codes < most - 1].all()
    stored = pack(codes, bits)
    assert stored.shape == (*outer, 32, 24 * bits // 8) and stored.dtype == np.int8
    assert (unpack(stored, bits) == codes).all()
    assert not is_interleaved(stored, bits)
    assert is_interleaved(pack(codes.astype(np.int16) + most, bits), bits)  # as unsigned numbers


def test_halves_are_rounded_away_from_zero() -> None:
    codes, _ = quantize_columns(np.array([[-128.0], [2.5], [-2.5], [0.4]]), 8)
    assert codes[:, 0].tolist() == [-128, 3, -3, 0]


def test_bytes_are_those_of_transposed_codes() -> None:
    codes = np.arange(-8, 8, dtype=np.int8).reshape(4, 4)  # [K, N]
    assert pack(codes, 8).reshape(-1).tolist() == codes.T.reshape(-1).tolist()
    first = pack(codes, 4).reshape(-1).view(np.uint8)[0]
    assert (first & 15, first >> 4) == (codes[0, 0] & 15, codes[1, 0] & 15)
