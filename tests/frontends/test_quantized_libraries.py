"""Folders that compressed-tensors and ModelOpt write, compared with the libraries themselves."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.frontends import huggingface
from irc.ir.core import Value, Weight
from irc.ir.dtypes import widened
from irc.weights.checkpoint import Reader

from ..fresh import fresh
from ..rows import ROWS, row_error
from .test_quantized_checkpoints import inputs_of

pytestmark = pytest.mark.oracle
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 96,
    "architectures": ["LlamaForCausalLM"],
}


def llama() -> Any:
    """A Llama of transformers with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    rng = fresh()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            values = rng.standard_normal(tuple(parameter.shape), np.float32)
            parameter.data = torch.from_numpy(values * np.float32(0.1))
    return model


def prompt(model: Any) -> dict[str, np.ndarray]:
    """The inputs of ROWS prompts, the same in every call."""
    return inputs_of(huggingface.model_of(model.config.to_dict()).trace("f32"), fresh(1), ROWS)


def logits(model: Any) -> np.ndarray:
    """The logits of the last tokens of the prompt."""
    import torch

    with torch.no_grad():
        ids = torch.from_numpy(prompt(model)["input_ids"]).long()
        return model(ids).logits[:, -1:].float().numpy()


# compressed-tensors


def scaled(layer: Any, utils: Any) -> None:
    """Give a layer the scales of its weight, and some of its inputs."""
    args, weight = layer.quantization_scheme.weights, layer.weight.data
    whole = None
    if args.strategy == "tensor_group":
        whole = utils.generate_gparam(weight.min(), weight.max())
        layer.weight_global_scale.data.copy_(whole)
    rows, columns = {
        "tensor": tuple(weight.shape),
        "channel": (1, weight.shape[1]),
        "block": tuple(args.block_structure or ()),
    }.get(args.strategy, (1, args.group_size))
    blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    scale, zero = utils.calculate_qparams(low, high, args, global_scale=whole)
    found = {"weight_scale": scale, "weight_zero_point": zero}
    for name, parameter in layer.named_parameters():
        if name in found:
            parameter.data.copy_(found[name].reshape(parameter.shape))
        if name.startswith("input_"):
            parameter.data.fill_({"input_scale": 0.02, "input_global_scale": 300}.get(name, 0))


PRESETS = "W4A16 W8A16 W4A16_ASYM W8A8 FP8 FP8_DYNAMIC FP8_BLOCK NVFP4A16 NVFP4 MXFP4A16 MXFP8A16"


@pytest.mark.parametrize("preset", PRESETS.split())
def test_compressed_tensors(preset: str, tmp_path: Path) -> None:
    library = pytest.importorskip("compressed_tensors.quantization", reason="not installed")
    schemes = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    model = llama()
    groups = {"group_0": schemes.preset_name_to_scheme(preset, ["Linear"])}
    config = library.QuantizationConfig(config_groups=groups, ignore=["lm_head"])
    library.apply_quantization_config(model, config)
    for layer in model.modules():
        if getattr(layer, "quantization_scheme", None) is not None:
            scaled(layer, utils)
    wanted = logits(model)
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    module = huggingface.load(tmp_path, "f32")
    assert " = dequantize " in str(module)
    found = irc.evaluate(module, prompt(model))["logits"]
    bound = 0.2 if preset == "W8A8" else 1e-4  # its scales of tokens are largest / 127.5, not / 127
    assert row_error(found, wanted) < bound


# ModelOpt


def computed(value: Value, reader: Reader) -> Any:
    """What operations make of weights."""
    if isinstance(value, Weight):
        return widened(reader.read(value))
    op = value.producer
    assert op is not None
    operands = {name: computed(operand, reader) for name, operand in op.named_operands()}
    return op.evaluate(*(operands.get(name) for name in (*op.operand_names, *op.optional_names)))


CONFIGS = "FP8_DEFAULT FP8_PER_CHANNEL_PER_TOKEN INT8_WEIGHT_ONLY NVFP4_DEFAULT W4A16_NVFP4"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", CONFIGS.split())
def test_modelopt(config: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("modelopt.torch.quantization", reason="not installed")
    export = pytest.importorskip("modelopt.torch.export")
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    import torch
    from safetensors.torch import load_file

    model = llama()
    quantization.quantize(model, getattr(quantization, f"{config}_CFG"), logits)
    export.export_hf_checkpoint(model, dtype=torch.float32, export_dir=tmp_path)
    module = huggingface.load(tmp_path, "f32")
    reader, tensors = Reader(module), load_file(tmp_path / "model.safetensors")
    layers = [key.removesuffix(".weight_scale") for key in tensors if key.endswith(".weight_scale")]
    assert len(layers) == 14
    for layer in layers:
        codes, scale = tensors[f"{layer}.weight"], tensors[f"{layer}.weight_scale"]
        if "NVFP4" in config:
            shape = torch.Size((codes.shape[0], 2 * codes.shape[1]))
            wanted = qtensor.NVFP4QTensor(shape, torch.float32, codes).dequantize(
                dtype=torch.float32,
                scale=scale,
                double_scale=tensors[f"{layer}.weight_scale_2"],
                block_sizes={-1: 16},
            )
        else:
            wanted = codes.float() * scale.reshape(-1, 1)
        (op,) = module.weights[f"{layer}.weight"].users
        found = computed(op.results[0], reader)
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-6)
