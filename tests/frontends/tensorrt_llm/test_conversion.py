"""Conversions of transformers' and Meta's checkpoints to TensorRT-LLM folders that irc compiles."""

# pyright: reportArgumentType=false
# (the binder takes the arguments of every release)

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import irc
from irc.frontends.checkpoints.mixed_gemm import quantize_columns
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.models import weights
from irc.frontends.tensorrt_llm.models.llama import LLaMAConfig, LLaMAForCausalLM, load_weights
from irc.frontends.tensorrt_llm.quantization import QuantConfig

from .llamas import Llama

IDS = np.array([[3, 7, 11, 5, 2]], np.int32)


def logits_of(folder: Path, out: Path, **options: Any) -> np.ndarray:
    """The logits of a TensorRT-LLM folder that irc compiles."""
    inputs = {"input_ids": IDS, "logit_positions": np.arange(5, dtype=np.int32)[None]}
    return irc.compile(folder, out, backend="reference", **options).run(inputs)["logits"]


def check(folder: Path, out: Path, model: Any) -> None:
    """The folder gives the logits of a model of transformers."""
    with torch.no_grad():
        wanted = model(torch.tensor(IDS)).logits.numpy()
    np.testing.assert_allclose(logits_of(folder, out), wanted, atol=2e-4)


def convert(source: Any, out: Path, tp: int = 1, pp: int = 1, **options: Any) -> None:
    """What convert_checkpoint.py does for every rank, one after the other."""
    for rank in range(tp * pp):
        mapping = Mapping(tp * pp, rank, tp_size=tp, pp_size=pp)
        given = {"dtype": "float32", "mapping": mapping, **options}
        LLaMAForCausalLM.from_hugging_face(source, **given).save_checkpoint(out, rank == 0)


def test_ranks_of_several_threads(llama: Llama, tmp_path: Path) -> None:
    """As convert_checkpoint.py with --workers does."""
    table = {"dtype": "float32"}
    with new_session("0.16"), ThreadPoolExecutor(4) as workers:

        def one(rank: int) -> None:
            mapping = Mapping(4, rank, tp_size=4)
            model = LLaMAForCausalLM.from_hugging_face(llama.torch, mapping=mapping, **table)
            model.save_checkpoint(tmp_path / "ranks", save_config=rank == 0)

        for result in [workers.submit(copy_context().run, one, rank) for rank in range(4)]:
            result.result()
    check(tmp_path / "ranks", tmp_path / "out", llama.torch)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_converted_folder(
    llama: Llama, tp: int, pp: int, in_memory: bool, tmp_path: Path
) -> None:
    out = tmp_path / "ranks"
    out.mkdir()
    table = {"use_parallel_embedding": tp > 1, "embedding_sharding_dim": pp - 1}
    with new_session("0.16"):
        convert(llama.torch if in_memory else llama.folder, out, tp, pp, **table)
    names = sorted(path.name for path in out.iterdir())
    assert names == ["config.json", *(f"rank{i}.safetensors" for i in range(tp * pp))]
    check(out, tmp_path / "out", llama.torch)
    with new_session("0.16"):  # what the folder says is what the script's classes read
        config = LLaMAConfig.from_checkpoint(out)
        assert config.mapping.tp_size == tp and config.hidden_size == 24
        again = LLaMAForCausalLM.from_checkpoint(out, rank=tp * pp - 1)
        assert again.config.mapping.rank == tp * pp - 1


def dequantized(model: Any, bits: int, tp: int) -> Any:
    """The model whose products have the weights that codes of every rank stand for."""
    copy = deepcopy(model)
    for name, parameter in copy.named_parameters():
        if "_proj" not in name:
            continue
        dim = int("o_proj" in name or "down_proj" in name)
        parts = np.split(parameter.detach().numpy(), tp, dim)
        products = [np.multiply(*quantize_columns(part.T, bits)).T for part in parts]
        with torch.no_grad():
            parameter.copy_(torch.tensor(np.concatenate(products, dim)))
    return copy


@pytest.mark.parametrize(("algorithm", "bits"), [("W8A16", 8), ("W4A16", 4)])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_weight_only_codes(
    llama: Llama, algorithm: str, bits: int, tp: int, pp: int, tmp_path: Path
) -> None:
    out = tmp_path / "ranks"
    out.mkdir()
    with new_session("0.13"):
        convert(llama.folder, out, tp, pp, quant_config=QuantConfig(quant_algo=algorithm))
    stored = load_file(out / "rank0.safetensors")
    codes = stored["transformer.layers.0.mlp.fc.weight"]
    assert codes.dtype == np.int8 and codes.shape == (24, 40 // tp * bits // 8)
    check(out, tmp_path / "out", dequantized(llama.torch, bits, tp))


def test_a_hook_changes_weights(llama: Llama, tmp_path: Path) -> None:
    def double(tensors: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(tensors["lm_head.weight"], torch.Tensor)
        return tensors | {"lm_head.weight": 2 * tensors["lm_head.weight"]}

    with new_session("0.16"):
        convert(llama.folder, tmp_path)
        model = LLaMAForCausalLM.from_checkpoint(tmp_path, preprocess_weights_hook=double)
        model.save_checkpoint(tmp_path)
    head = load_file(tmp_path / "rank0.safetensors")["lm_head.weight"]
    np.testing.assert_allclose(head, 2 * llama.torch.lm_head.weight.detach().numpy(), rtol=1e-6)


def test_arguments_of_0_9(llama: Llama, tmp_path: Path) -> None:
    """A preloaded model, keys in `override_fields`, and a rank of -1 for all ranks."""
    with new_session("0.9"):
        mapping = Mapping(world_size=2, rank=0, tp_size=2)
        model = LLaMAForCausalLM.from_hugging_face(
            "nowhere",
            "float32",
            mapping=mapping,
            quantization=QuantConfig(),
            load_by_shard=False,
            load_model_on_cpu=False,
            override_fields={"use_parallel_embedding": True, "embedding_sharding_dim": 1},
            preloaded_model=llama.torch,
        )
        assert model.transformer.vocab_embedding.weight.shape == (53, 12)
        tensors = load_weights(hf_llama=llama.torch, tensorrt_llm_llama=model)
        assert tensors["transformer.layers.0.mlp.fc.weight"].shape == (20, 24)
        LLaMAForCausalLM.quantize(
            llama.folder,
            tmp_path,
            quant_config=QuantConfig(quant_algo="W8A16"),
            dtype="float32",
            mapping=Mapping(world_size=2, rank=-1, tp_size=2),
            override_fields={},
        )
        assert (tmp_path / "rank1.safetensors").is_file()
        with pytest.raises(irc.Error, match=r"needs a calibration.* --quantize w8a8_sq"):
            LLaMAForCausalLM.quantize(
                llama.folder, tmp_path, quant_config=QuantConfig(quant_algo="W8A8_SQ_PER_CHANNEL")
            )


def test_dtypes() -> None:
    cases = [("auto", None, "float16"), ("auto", torch.float32, "float16")]
    cases += [("bf16", None, "bfloat16"), ("auto", "bfloat16", "bfloat16")]
    for dtype, source, name in cases:
        assert weights.infer_dtype(dtype, source) == name


META = {"o_proj": "wo", "q_proj": "wq", "k_proj": "wk", "v_proj": "wv"}
META |= {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def meta_key(key: str) -> str:
    for name, own in META.items():
        key = key.replace(name, own)
    key = key.replace("self_attn.", "attention.").replace("mlp.", "feed_forward.")
    key = key.replace("input_layernorm", "attention_norm").replace("lm_head", "output")
    key = key.replace("post_attention_layernorm", "ffn_norm").removeprefix("model.")
    return key.replace("embed_tokens", "tok_embeddings")


@pytest.mark.parametrize("parts", [1, 2])
def test_a_folder_of_meta(llama: Llama, parts: int, tmp_path: Path) -> None:
    """Files as Meta writes them: pairs of rows next to each other, split over model parallelism."""
    files: list[dict[str, Any]] = [{} for _ in range(parts)]
    for key, value in llama.torch.state_dict().items():
        array = value
        if ".q_proj." in key or ".k_proj." in key:
            array = value.view(-1, 2, 3, 24).transpose(1, 2).reshape(value.shape)
        dim = int(any(name in key for name in ("o_proj", "down_proj", "embed_tokens")))
        pieces = [array] * parts if "norm" in key else torch.tensor_split(array, parts, dim)
        for file, piece in zip(files, pieces, strict=True):
            file[meta_key(key)] = piece.clone()
    for index, file in enumerate(files):
        torch.save(file | {"rope.freqs": torch.ones(4)}, tmp_path / f"consolidated.{index:02d}.pth")
    sizes = {"dim": 24, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 53}
    sizes |= {"hidden_dim": 40, "norm_eps": 3e-6, "rope_theta": 20000.0}
    (tmp_path / "params.json").write_text(json.dumps(sizes))
    out = tmp_path / "ranks"
    out.mkdir()
    with new_session("0.13"):
        for rank in range(2):
            model = LLaMAForCausalLM.from_meta_ckpt(
                tmp_path, "float32", mapping=Mapping(2, rank, tp_size=2)
            )
            model.save_checkpoint(out, save_config=rank == 0)
    check(out, tmp_path / "out", llama.torch)


FP8 = QuantConfig(quant_algo="FP8")
REFUSED: dict[str, dict[str, Any]] = {  # message -> options
    "INT8 needs a calibration": {"quant_config": QuantConfig(kv_cache_quant_algo="INT8")},
    "needs a calibration.* --quantize fp8 --calibration PATH": {"quant_config": FP8},
    "compile the quantized folder": {"quant_ckpt_path": "x"},
    "remove_duplicated_kv_heads": {"remove_duplicated_kv_heads": True},
    "did you mean 'use_parallel_embedding'": {"use_paralel_embedding": True},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str, llama: Llama) -> None:
    options = REFUSED[message]
    with new_session("0.16"), pytest.raises(irc.Error, match=message):
        LLaMAForCausalLM.from_hugging_face(llama.folder, **options)


def test_a_source_that_is_none(tmp_path: Path) -> None:
    save_file({"a": np.ones(1, np.float32)}, tmp_path / "model.safetensors")
    assert weights.has_safetensors(tmp_path) and not weights.has_safetensors(tmp_path / "x")
    with new_session("0.16"), pytest.raises(irc.Error, match="found an object of SimpleNames"):
        LLaMAForCausalLM.from_hugging_face(SimpleNamespace())
