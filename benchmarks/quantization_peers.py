"""4-bit weights of a language model: perplexity and divergence, compared with other libraries.

    python -m benchmarks.quantization_peers [--model FOLDER] [--group N] [--work FOLDER]

Every library quantizes the linears of all layers, symmetrically where it can, from the same windows
of the calibration text. The weights that it makes, as numbers, become a checkpoint, and all of them
run on ONNX Runtime in f32. torchao searches the factors of AWQ for each linear, irc for each input.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import argparse
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader
from onnxruntime.quantization import matmul_nbits_quantizer as nbits
from safetensors.torch import load_file, save_file
from torchao.prototype.awq.core import AWQObserver
from torchao.quantization import IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerGroup
from transformers import AutoModelForCausalLM

import irc
from irc.driver import open_model
from irc.generation.model import Model
from irc.generation.quality import measure_quality

EXAMPLE = Path(__file__).parents[1] / "examples" / "outlier_llama"
WINDOW, ROWS, BATCHES = 512, 8, 6  # of the calibration
TOKENS = 8192  # of the text that is predicted
SCHEMES = ("w4a16", "w4a16_asym", "w4a16_awq", "w4a16_gptq")
Arrays: TypeAlias = dict[str, "np.ndarray[Any, Any]"]
# From weights [N, K] and inputs [tokens, K] by name to the weights after quantization.
Quantize: TypeAlias = Callable[[Arrays, Arrays, int], Arrays]


def torchao_nearest(weights: Arrays, inputs: Arrays, group: int) -> Arrays:
    """Rounding to nearest by torchao."""
    return {name: _rounded(torch.from_numpy(weight), group) for name, weight in weights.items()}


def torchao_awq(weights: Arrays, inputs: Arrays, group: int) -> Arrays:
    """Rounding to nearest with the factors of torchao's AWQ."""
    found: Arrays = {}
    for name, array in weights.items():
        weight = torch.from_numpy(array)
        observer = AWQObserver(weight, None, _config(group))
        observer(torch.from_numpy(inputs[name]), weight)
        factors = observer.calculate_qparams()
        found[name] = _rounded(weight * factors, group) / factors.numpy()
    return found


def _config(group: int) -> IntxWeightOnlyConfig:
    return IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, "int4"),  # noqa: B009
        granularity=PerGroup(group),
    )


def _rounded(weight: torch.Tensor, group: int) -> Any:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    quantize_(linear, _config(group))
    return linear.weight.dequantize().numpy()


class Inputs(CalibrationDataReader):
    """The inputs of all linears, in one batch."""

    def __init__(self, inputs: Arrays) -> None:
        self.left: Iterator[Arrays] = iter([inputs])

    def get_next(self) -> Any:
        return next(self.left, None)


def _onnxruntime(config: Callable[[Inputs, int], Any]) -> Quantize:
    """An algorithm of onnxruntime.quantization, on a model of nothing but the linears."""

    def quantize(weights: Arrays, inputs: Arrays, group: int) -> Arrays:
        model, settings = _products(weights), config(Inputs(inputs), group)
        quantizer: Any = nbits.MatMulNBitsQuantizer(
            model, block_size=group, is_symmetric=True, algo_config=settings
        )
        quantizer.process()
        session = onnxruntime.InferenceSession(quantizer.model.model.SerializeToString())
        ones = {name: np.eye(w.shape[1], dtype=np.float32) for name, w in weights.items()}
        found: Any = session.run([f"{name}.y" for name in weights], ones)
        return {name: np.ascontiguousarray(y.T) for name, y in zip(weights, found, strict=True)}

    return quantize


def _products(weights: Arrays) -> onnx.ModelProto:
    def value(name: str, size: int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size])

    nodes = [helper.make_node("MatMul", [n, f"{n}.w"], [f"{n}.y"], n) for n in weights]
    tensors = [numpy_helper.from_array(w.T.copy(), f"{n}.w") for n, w in weights.items()]
    given = [value(n, w.shape[1]) for n, w in weights.items()]
    made = [value(f"{n}.y", w.shape[0]) for n, w in weights.items()]
    graph = helper.make_graph(nodes, "linears", given, made, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])


PEERS: dict[str, Quantize] = {
    "torchao, nearest": torchao_nearest,
    "torchao, AWQ": torchao_awq,
    "onnxruntime, nearest": _onnxruntime(
        lambda _, group: nbits.DefaultWeightOnlyQuantConfig(group, is_symmetric=True)
    ),
    "onnxruntime, HQQ": _onnxruntime(lambda _, group: nbits.HQQWeightOnlyQuantConfig(group)),
    "onnxruntime, GPTQ": _onnxruntime(
        lambda inputs, group: nbits.GPTQWeightOnlyQuantConfig(inputs, block_size=group)
    ),
}


def quantized(model: Path, out: Path, ids: list[int], group: int, by: Quantize) -> Path:
    """A copy of a checkpoint folder with the weights that a library makes."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(model, out)
    tensors = {key: each.float() for key, each in load_file(model / "model.safetensors").items()}
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for layer in network.model.layers:
        prefix = next(name for name, each in network.named_modules() if each is layer)
        linears = {
            f"{prefix}.{name}": each
            for name, each in layer.named_modules()
            if isinstance(each, torch.nn.Linear)
        }
        weights = {name: each.weight.detach().numpy() for name, each in linears.items()}
        found = by(weights, _inputs(network, linears, ids), group)
        for name, weight in found.items():
            tensors[f"{name}.weight"] = torch.from_numpy(weight).contiguous()
    save_file(tensors, out / "model.safetensors")
    return out


@torch.no_grad()
def _inputs(network: Any, linears: dict[str, torch.nn.Linear], ids: list[int]) -> Arrays:
    """What linears multiply when the model runs on windows of the text."""
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in linears}

    def watch(name: str, linear: torch.nn.Linear) -> Any:
        return linear.register_forward_pre_hook(lambda _, given: seen[name].append(given[0]))

    hooks = [watch(name, each) for name, each in linears.items()]
    rows = torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).reshape(-1, WINDOW)
    for batch in rows[: ROWS * BATCHES].split(ROWS):
        network(batch)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(each).flatten(0, -2).numpy() for name, each in seen.items()}


def main() -> None:
    """Quantize by all libraries, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=EXAMPLE)
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--work", type=Path, default=Path("build/quantization_peers"))
    args = parser.parse_args()
    logging.disable(logging.INFO)  # onnxruntime logs every linear
    args.work.mkdir(parents=True, exist_ok=True)
    plain = _compiled(args.model, args.work)
    ids = plain.tokenizer.encode((args.model / "calibration.txt").read_text())
    heldout = plain.tokenizer.encode((args.model / "heldout.txt").read_text())[:TOKENS]
    calibration = args.work / "calibration"
    cut: dict[str, Any] = {"length": WINDOW, "batch_size": ROWS, "batches": BATCHES}
    data = args.model / "calibration.txt"
    irc.calibrate(args.model, data, calibration, gram=True, dtype="f32", **cut)
    print(f"{'groups of ' + str(args.group):24} perplexity      KL   top-1")

    def show(name: str, model: Model) -> None:
        found = measure_quality(model, plain, heldout)
        print(f"{name:24} {found.perplexity:10.3f} {found.kl:7.4f} {found.top1:7.1%}", flush=True)

    show("unquantized", plain)
    options = {"calibration": calibration, "group": args.group}
    for scheme in SCHEMES:
        show(f"irc, {scheme}", _compiled(args.model, args.work, quantize=scheme, **options))
    for name, by in PEERS.items():
        folder = quantized(args.model, args.work / "peer", ids, args.group, by)
        show(name, _compiled(folder, args.work))


def _compiled(source: Path, work: Path, **options: Any) -> Model:
    out = work / f"artifact-{options.get('quantize', source.name)}"
    irc.compile(source, out, dtype="f32", **options)
    return open_model(out)


if __name__ == "__main__":
    main()
