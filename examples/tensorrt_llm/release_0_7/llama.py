"""LLaMA over tensor and pipeline parallel ranks, as scripts of TensorRT-LLM 0.5 to 0.7 build it.

irc compile llama.py -o build/llama -- --model_dir tiny --world_size 4 --tp_size 2 --pp_size 2
"""

import argparse
import json
import os

import numpy as np
import torch
from safetensors.torch import load_file
from tensorrt_llm import Mapping
from tensorrt_llm.builder import Builder
from tensorrt_llm.layers import PositionEmbeddingType
from tensorrt_llm.logger import logger
from tensorrt_llm.models import LLaMAForCausalLM
from tensorrt_llm.network import net_guard
from tensorrt_llm.quantization import QuantMode


def split(array, parts, rank, dim=0):
    return np.ascontiguousarray(np.split(array, parts, axis=dim)[rank])


def load_from_hf_llama(model, folder, config, mapping):
    logger.info("Loading weights from HF LLaMA...")
    tensors = load_file(os.path.join(folder, "model.safetensors"))
    tensors = {name: tensor.to(torch.float32).numpy() for name, tensor in tensors.items()}
    tp, rank = mapping.tp_size, mapping.tp_rank
    layers = mapping.pp_layers(config["num_hidden_layers"])
    if mapping.is_first_pp_rank():
        model.vocab_embedding.weight.value = tensors["model.embed_tokens.weight"]
    if mapping.is_last_pp_rank():
        model.ln_f.weight.value = tensors["model.norm.weight"]
        head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
        padded = -(-len(head) // tp) * tp
        head = np.pad(head, ((0, padded - len(head)), (0, 0)))
        model.lm_head.weight.value = split(head, tp, rank)
    for place, index in enumerate(layers):
        layer, prefix = model.layers[place], f"model.layers.{index}."
        q, k, v = (tensors[f"{prefix}self_attn.{each}_proj.weight"] for each in "qkv")
        qkv = np.concatenate([split(each, tp, rank) for each in (q, k, v)])
        layer.attention.qkv.weight.value = qkv
        dense = tensors[f"{prefix}self_attn.o_proj.weight"]
        layer.attention.dense.weight.value = split(dense, tp, rank, dim=1)
        layer.mlp.fc.weight.value = split(tensors[f"{prefix}mlp.gate_proj.weight"], tp, rank)
        layer.mlp.gate.weight.value = split(tensors[f"{prefix}mlp.up_proj.weight"], tp, rank)
        down = tensors[f"{prefix}mlp.down_proj.weight"]
        layer.mlp.proj.weight.value = split(down, tp, rank, dim=1)
        layer.input_layernorm.weight.value = tensors[f"{prefix}input_layernorm.weight"]
        layer.post_layernorm.weight.value = tensors[f"{prefix}post_attention_layernorm.weight"]


def get_engine_name(model, dtype, tp_size, pp_size, rank):
    if pp_size == 1:
        return f"{model}_{dtype}_tp{tp_size}_rank{rank}.engine"
    return f"{model}_{dtype}_tp{tp_size}_pp{pp_size}_rank{rank}.engine"


def serialize_engine(engine, path):
    logger.info(f"Serializing engine to {path}...")
    with open(path, "wb") as f:
        f.write(bytearray(engine))


def build_rank_engine(builder, builder_config, engine_name, rank, args, config):
    mapping = Mapping(
        world_size=args.world_size, rank=rank, tp_size=args.tp_size, pp_size=args.pp_size
    )
    rope = config.get("rope_parameters") or config
    model = LLaMAForCausalLM(
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        hidden_act=config["hidden_act"],
        max_position_embeddings=config["max_position_embeddings"],
        dtype=args.dtype,
        mlp_hidden_size=config["intermediate_size"],
        position_embedding_type=PositionEmbeddingType.rope_gpt_neox,
        mapping=mapping,
        rotary_base=rope.get("rope_theta", 10000.0),
        rotary_scaling=None,
        use_parallel_embedding=False,
        quant_mode=QuantMode(0),
        rms_norm_eps=config["rms_norm_eps"],
    )
    load_from_hf_llama(model, args.model_dir, config, mapping)
    network = builder.create_network()
    network.trt_network.name = engine_name
    if args.use_gpt_attention_plugin:
        network.plugin_config.set_gpt_attention_plugin(dtype=args.dtype)
    if args.world_size > 1:
        network.plugin_config.set_nccl_plugin(args.dtype)
    with net_guard(network):
        network.set_named_parameters(model.named_parameters())
        inputs = model.prepare_inputs(
            args.max_batch_size,
            args.max_input_len,
            args.max_output_len,
            True,
            args.max_beam_width,
            args.max_num_tokens,
        )
        model(*inputs)
    return builder.build_engine(network, builder_config)


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--world_size", type=int, default=1)
    parser.add_argument("--tp_size", type=int, default=1)
    parser.add_argument("--pp_size", type=int, default=1)
    parser.add_argument("--model_dir", type=str, required=True)
    parser.add_argument("--dtype", type=str, default="float32")
    parser.add_argument("--max_batch_size", type=int, default=4)
    parser.add_argument("--max_input_len", type=int, default=32)
    parser.add_argument("--max_output_len", type=int, default=40)
    parser.add_argument("--max_beam_width", type=int, default=1)
    parser.add_argument("--max_num_tokens", type=int, default=None)
    parser.add_argument("--use_gpt_attention_plugin", action="store_true")
    parser.add_argument("--output_dir", type=str, default="engine_outputs")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_arguments()
    logger.set_level("info")
    os.makedirs(args.output_dir, exist_ok=True)
    with open(os.path.join(args.model_dir, "config.json")) as f:
        hf_config = json.load(f)
    builder = Builder()
    for cur_rank in range(args.world_size):
        builder_config = builder.create_builder_config(
            name="llama",
            precision=args.dtype,
            timing_cache=None,
            tensor_parallel=args.tp_size,
            pipeline_parallel=args.pp_size,
            num_layers=hf_config["num_hidden_layers"],
            num_heads=hf_config["num_attention_heads"],
            num_kv_heads=hf_config["num_key_value_heads"],
            hidden_size=hf_config["hidden_size"],
            vocab_size=hf_config["vocab_size"],
            hidden_act=hf_config["hidden_act"],
            max_position_embeddings=hf_config["max_position_embeddings"],
            max_batch_size=args.max_batch_size,
            max_beam_width=args.max_beam_width,
            max_input_len=args.max_input_len,
            max_output_len=args.max_output_len,
            max_num_tokens=args.max_num_tokens,
            int8=False,
        )
        name = get_engine_name("llama", args.dtype, args.tp_size, args.pp_size, cur_rank)
        engine = build_rank_engine(builder, builder_config, name, cur_rank, args, hf_config)
        assert engine is not None, f"Failed to build engine for rank {cur_rank}"
        if cur_rank == 0:
            builder.save_config(builder_config, os.path.join(args.output_dir, "config.json"))
        serialize_engine(engine, os.path.join(args.output_dir, name))
