"""LLaMAs of transformers with random weights, and networks of TensorRT-LLM's models of them."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import irc
from irc.frontends.tensorrt_llm.context import Session, current_network, new_session
from irc.frontends.tensorrt_llm.layers import MoeConfig
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.models import llama
from tests.fresh import session_seed
from tests.frontends.checkpoints.rank_folders import Conversion, write_folder
from tests.frontends.checkpoints.test_rank_folders import LLAMA as LLAMA
from tests.frontends.checkpoints.test_rank_folders import MIXTRAL as MIXTRAL

from .worlds import trace

Array = np.ndarray[Any, Any]
VOCAB, ROWS, CAPACITY = 53, 2, 24


@dataclass
class Llama:
    """A model of transformers, and the folder that it is saved in."""

    folder: Path
    config: dict[str, Any]
    torch: Any

    def states(self, ids: Array) -> list[Array]:
        """The embeddings, what each layer gives, the last one's normed, and the logits."""
        with torch.no_grad():
            results = self.torch(torch.tensor(ids), output_hidden_states=True)
        return [states.numpy() for states in (*results.hidden_states, results.logits)]

    def ranks(self, how: Conversion, **more: Any) -> Path:
        """A new folder of TensorRT-LLM's checkpoint for some ranks."""
        tensors, folder = (
            load_file(self.folder / "model.safetensors"),
            tempfile.mkdtemp(dir=self.folder),
        )
        return write_folder(Path(folder), self.config, tensors, how, **more)


def made(folder: Path, keys: dict[str, Any]) -> Llama:
    """A random model of a config, with weights that keep activations near 1."""
    torch.manual_seed(session_seed())
    own = {name: value for name, value in keys.items() if name != "model_type"}
    config = AutoConfig.for_model(keys["model_type"], **own)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder, save_original_format=True)
    return Llama(folder, json.loads((folder / "config.json").read_text()), model)


def keywords(config: dict[str, Any], how: Conversion, mapping: Mapping) -> dict[str, Any]:
    """The arguments of LLaMAForCausalLM in 0.5 to 0.7."""
    rope = config["rope_parameters"]
    scaling = {"type": rope["rope_type"], "factor": rope.get("factor", 1.0)}
    experts = config.get("num_local_experts", 0)
    renamed = {
        "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads", "mlp_hidden_size": "intermediate_size",
    }  # fmt: skip
    same = "hidden_size", "vocab_size", "hidden_act", "max_position_embeddings", "rms_norm_eps"
    return {
        **{name: config[renamed.get(name, name)] for name in (*renamed, *same)},
        **({"hidden_act": "swiglu"} if experts else {}),
        "dtype": "float32",
        "mapping": mapping,
        "rotary_base": rope["rope_theta"],
        "rotary_scaling": None if scaling["type"] == "default" else scaling,
        "use_parallel_embedding": how.table_dim is not None,
        "embedding_sharding_dim": how.table_dim or 0,
        "attn_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "moe_config": MoeConfig(
            num_experts=experts,
            top_k=config.get("num_experts_per_tok", 0),
            tp_mode=1 if how.moe_ep > 1 else 2,
        ),
    }


def steps_of(
    model: Any, how: Conversion, plugin: bool = False, version: Any = "0.16", **options: Any
) -> Steps:
    """The module of all ranks of `model(mapping)`; `options` are those of prepare_inputs."""

    def build(mapping: Mapping) -> None:
        network = model(mapping)
        current_network().plugin_config.set_gpt_attention_plugin("float32" if plugin else None)
        limits = [ROWS, 16, CAPACITY - 16 if version == "0.7" else CAPACITY]
        options_of_all = {"max_num_tokens": None, "max_beam_width": 1, **options}
        inputs = network.prepare_inputs(*limits, **options_of_all)
        network(**inputs) if version == "0.16" else network(*inputs)

    with new_session(version) as session:
        module = trace(build, how.tp, how.pp, moe_ep_size=how.moe_ep)
    return Steps(module, session)


def of_keywords(source: Llama, how: Conversion, **more: Any) -> Any:
    """The model of 0.5 to 0.7 of a rank, with the weights of the rank's file."""

    folder = source.ranks(how)

    def build(mapping: Mapping) -> Any:
        given = keywords(source.config, how, mapping) | more
        model = llama.LLaMAForCausalLMOfKeywords(**given)
        file = load_file(folder / f"rank{mapping.rank}.safetensors")
        for name, parameter in model.named_parameters():
            key = name.replace("experts_weight_1", "fc.weight")
            key = key.replace("experts_weight_2", "proj.weight")
            value = file[key if key in file else f"transformer.{key}"]
            if key.endswith("router.weight"):  # each rank has a shard of its inputs
                value = np.split(value, mapping.tp_size, 1)[mapping.tp_rank]
            parameter.value = value
        return model

    return build


def of_ranks(source: Llama, how: Conversion, **more: Any) -> Any:
    """The model of 0.8 and later of a checkpoint folder of TensorRT-LLM."""
    folder = source.ranks(how, **more)
    return lambda mapping: llama.LLaMAForCausalLM.from_checkpoint(folder, rank=mapping.rank)


def of_hugging_face(source: Llama, how: Conversion, **more: Any) -> Any:
    """The model of 0.8 and later of the folder of transformers."""
    table = {
        "use_parallel_embedding": how.table_dim is not None,
        "embedding_sharding_dim": how.table_dim or 0,
        "use_fused_mlp": how.fused,
    }
    cls = llama.LLaMAForCausalLM
    return lambda mapping: cls.from_hugging_face(
        source.folder, "float32", mapping=mapping, **table, **more
    )


class Steps:
    """Calls a module again and again with the caches that it returned."""

    def __init__(self, module: irc.Module, session: Session) -> None:
        self.module, self.past = module, 0
        self.session = session  # which keeps the arrays
        self.caches: dict[str, Array] = {}
        self.args = {str(arg.name): arg for arg in module.main.args}

    def __call__(self, ids: Array, **given: Array) -> dict[str, Array]:
        """The outputs for the next ids [B, S], or packed [T] or [1, T]."""
        rows, count = ids.shape if ids.ndim == 2 else (1, len(ids))
        end = self.past + count
        fixed = {
            "input_ids": ids,
            "position_ids": np.tile(np.arange(self.past, end), (rows, 1)),
            "last_token_ids": np.full(rows, count),
            "attention_mask": np.ones((rows, end)),
            "sequence_length": np.full(rows, end),
            "host_past_key_value_lengths": np.full(rows, self.past),
            "host_request_types": np.full(rows, int(self.past > 0)),
            "context_lengths": np.full(rows, end if self.past == 0 else self.past),
            "host_sink_token_length": np.zeros(1),
            "cache_indirection": np.zeros((rows, 1, CAPACITY)),
        }
        fixed["host_context_lengths"] = fixed["context_lengths"]
        feeds = {name: self._filled(name, given.get(name, fixed.get(name))) for name in self.args}
        outputs = irc.evaluate(self.module, feeds)
        caches = {n: x for n, x in outputs.items() if n.startswith("present_key")}
        self.caches |= {name.replace("present", "past"): x for name, x in caches.items()}
        self.past = end
        return outputs

    def _filled(self, name: str, array: Array | None) -> Array:
        """An array of the input's dtype; by default the last one or zeros."""
        type = self.args[name].type
        if array is None:
            array = self.caches.get(name)
        if array is None:
            layout = type.global_type
            sizes = {"batch_size_beam_width": ROWS, "max_seq_len": CAPACITY, "past_key_len": 0}
            array = np.zeros(
                [sizes[str(n)] if str(n) in sizes else int(str(n)) for n in layout.shape]
            )
        return array.astype({"i32": np.int32, "f32": np.float32}[type.dtype])
