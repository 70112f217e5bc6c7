"""A bidirectional encoder with mean pooling, as scripts of TensorRT-LLM 0.8 to 1.x build it.

irc compile encoder.py -o build/encoder -- --weights encoder.safetensors --tp_size 2
"""

import argparse
from collections import OrderedDict

import tensorrt as trt
import tensorrt_llm
from safetensors.numpy import load_file
from tensorrt_llm import Builder, Mapping
from tensorrt_llm.functional import Tensor, expand_dims, layer_norm, sum
from tensorrt_llm.layers import BertAttention, Embedding, FusedGatedMLP, RmsNorm
from tensorrt_llm.models.modeling_utils import PretrainedConfig, PretrainedModel
from tensorrt_llm.module import Module, ModuleList
from tensorrt_llm.network import net_guard


class EncoderLayer(Module):
    def __init__(self, config):
        super().__init__()
        group = {"tp_group": config.mapping.tp_group, "tp_size": config.mapping.tp_size}
        self.norm1 = RmsNorm(config.hidden_size, dtype=config.dtype)
        self.attention = BertAttention(
            config.hidden_size,
            config.num_attention_heads,
            max_position_embeddings=config.max_position_embeddings,
            bias=False,
            dtype=config.dtype,
            **group,
        )
        self.norm2 = RmsNorm(config.hidden_size, dtype=config.dtype)
        self.mlp = FusedGatedMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            bias=False,
            dtype=config.dtype,
            **group,
        )

    def forward(self, x, lengths):
        x = x + self.attention(self.norm1(x), input_lengths=lengths)
        return x + self.mlp(self.norm2(x))


class Encoder(PretrainedModel):
    def __init__(self, config):
        super().__init__(config)
        mapping = config.mapping
        self.embedding = Embedding(
            config.vocab_size,
            config.hidden_size,
            dtype=config.dtype,
            tp_size=mapping.tp_size,
            tp_group=mapping.tp_group,
            sharding_dim=1,
            tp_rank=mapping.tp_rank,
        )
        self.positions = Embedding(
            config.max_position_embeddings, config.hidden_size, dtype=config.dtype
        )
        self.layers = ModuleList([EncoderLayer(config) for _ in range(config.num_hidden_layers)])

    def forward(self, input_ids, position_ids, input_lengths, mask):
        x = self.embedding(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            x = layer(x, input_lengths)
        weights = expand_dims(mask, -1).cast(self.config.dtype)
        pooled = sum(x * weights, dim=1) / sum(weights, dim=1)
        pooled = layer_norm(pooled, self.config.hidden_size)
        pooled.mark_output("embedding", trt.float32)


def inputs():
    batch, tokens = [[1, 4, 8]], [[1, 16, 48]]

    def tensor(name, dtype, **dims):
        return Tensor(name=name, dtype=dtype, shape=[-1] * len(dims), dim_range=OrderedDict(dims))

    return {
        "input_ids": tensor("input_ids", trt.int32, batch_size=batch, input_len=tokens),
        "position_ids": tensor("position_ids", trt.int32, batch_size=batch, input_len=tokens),
        "input_lengths": tensor("input_lengths", trt.int32, batch_size=batch),
        "mask": tensor("mask", trt.float32, batch_size=batch, input_len=tokens),
    }


def load(model, weights, mapping):
    tp, rank = mapping.tp_size, mapping.tp_rank
    for name, parameter in model.named_parameters():
        value = weights[name]
        if name == "embedding.weight":
            value = value.reshape(len(value), tp, -1)[:, rank]
        elif "qkv" in name or "fused_fc" in name:  # each part is sharded by itself
            parts = 3 if "qkv" in name else 2
            value = value.reshape(parts, tp, -1, value.shape[1])[:, rank]
            value = value.reshape(-1, value.shape[2])
        elif name.endswith(("dense.weight", "proj.weight")):
            value = value.reshape(len(value), tp, -1)[:, rank]
        parameter.value = value.copy()


def build(rank, args, weights):
    config = PretrainedConfig(
        architecture="Encoder",
        dtype=args.dtype,
        vocab_size=120,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_act="silu",
        max_position_embeddings=64,
        mapping=Mapping(world_size=args.tp_size, rank=rank, tp_size=args.tp_size),
    )
    model = Encoder(config)
    load(model, weights, config.mapping)
    builder = Builder()
    network = builder.create_network()
    network.plugin_config.to_legacy_setting()
    with net_guard(network):
        network.set_named_parameters(model.named_parameters())
        model(**inputs())
    settings = builder.create_builder_config(precision=args.dtype, tensor_parallel=args.tp_size)
    engine = builder.build_engine(network, settings)
    with open(f"{args.output}.rank{rank}", "wb") as file:
        file.write(engine)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tp_size", type=int, default=1)
    parser.add_argument("--output", default="encoder.engine")
    arguments = parser.parse_args()
    tensorrt_llm.logger.set_level("info")
    for number in range(arguments.tp_size):
        build(number, arguments, load_file(arguments.weights))
