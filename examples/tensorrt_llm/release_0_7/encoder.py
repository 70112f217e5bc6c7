"""A BERT encoder, as scripts of TensorRT-LLM 0.5 to 0.7 build it.

irc compile encoder.py -o build/encoder -- --weights bert.npz --world_size 2
"""

import argparse
import os
from collections import OrderedDict

import numpy as np
import tensorrt as trt
import tensorrt_llm
from tensorrt_llm import Mapping, Tensor
from tensorrt_llm.layers import MLP, BertAttention, ColumnLinear, Embedding, LayerNorm
from tensorrt_llm.module import Module, ModuleList
from tensorrt_llm.network import net_guard


class BertEmbedding(Module):
    def __init__(self, vocab_size, hidden_size, positions, types, dtype):
        super().__init__()
        self.vocab_embedding = Embedding(vocab_size, hidden_size, dtype=dtype)
        self.position_embedding = Embedding(positions, hidden_size, dtype=dtype)
        self.token_embedding = Embedding(types, hidden_size, dtype=dtype)
        self.embedding_ln = LayerNorm(normalized_shape=hidden_size, eps=1e-12, dtype=dtype)

    def forward(self, input_ids, position_ids, token_type_ids):
        x = self.vocab_embedding(input_ids) + self.position_embedding(position_ids)
        return self.embedding_ln(x + self.token_embedding(token_type_ids))


class BertLayer(Module):
    def __init__(self, hidden_size, num_heads, positions, mapping, dtype):
        super().__init__()
        self.attention = BertAttention(
            hidden_size=hidden_size,
            num_attention_heads=num_heads,
            max_position_embeddings=positions,
            tp_group=mapping.tp_group,
            tp_size=mapping.tp_size,
            dtype=dtype,
        )
        self.input_layernorm = LayerNorm(normalized_shape=hidden_size, eps=1e-12, dtype=dtype)
        self.mlp = MLP(
            hidden_size=hidden_size,
            ffn_hidden_size=4 * hidden_size,
            hidden_act="gelu",
            tp_group=mapping.tp_group,
            tp_size=mapping.tp_size,
            dtype=dtype,
        )
        self.post_layernorm = LayerNorm(normalized_shape=hidden_size, eps=1e-12, dtype=dtype)

    def forward(self, hidden_states, attention_mask=None, input_lengths=None):
        mixed = self.attention(
            hidden_states, attention_mask=attention_mask, input_lengths=input_lengths
        )
        hidden_states = self.input_layernorm(hidden_states + mixed)
        return self.post_layernorm(hidden_states + self.mlp(hidden_states))


class BertModel(Module):
    def __init__(self, args, mapping):
        super().__init__()
        self.dtype = args.dtype
        self.embedding = BertEmbedding(
            args.vocab_size, args.n_embd, args.n_positions, 2, args.dtype
        )
        self.layers = ModuleList(
            [
                BertLayer(args.n_embd, args.n_head, args.n_positions, mapping, args.dtype)
                for _ in range(args.n_layer)
            ]
        )
        self.pooler = ColumnLinear(args.n_embd, args.n_embd, dtype=args.dtype)

    def forward(self, input_ids, input_lengths, position_ids, token_type_ids):
        x = self.embedding(input_ids, position_ids, token_type_ids)
        self.register_network_output("embedding_output", x)
        for layer in self.layers:
            x = layer(x, input_lengths=input_lengths)
        x.mark_output("hidden_states", tensorrt_llm.str_dtype_to_trt(self.dtype))
        first = tensorrt_llm.functional.select(x, 1, 0)
        pooled = tensorrt_llm.functional.tanh(self.pooler(first))
        pooled.mark_output("pooled", trt.float32)


def load(model, path, mapping):
    weights = np.load(path)
    tp, rank = mapping.tp_size, mapping.tp_rank
    for name, parameter in model.named_parameters():
        value = weights[name]
        if "qkv" in name:
            three = np.split(value, 3, axis=0)
            value = np.concatenate([np.split(t, tp, axis=0)[rank] for t in three])
        elif ".mlp.fc." in name:
            value = np.split(value, tp, axis=0)[rank]
        elif name.endswith(("dense.weight", "proj.weight")):
            value = np.split(value, tp, axis=1)[rank]
        parameter.value = value


def prepare_inputs(args):
    batch = [[1, (args.max_batch_size + 1) // 2, args.max_batch_size]]
    tokens = [[1, (args.max_input_len + 1) // 2, args.max_input_len]]
    sizes = OrderedDict([("batch_size", batch), ("input_len", tokens)])
    ids = {
        name: Tensor(name=name, dtype=trt.int32, shape=[-1, -1], dim_range=sizes)
        for name in ("input_ids", "position_ids", "token_type_ids")
    }
    lengths = Tensor(
        name="input_lengths",
        dtype=trt.int32,
        shape=[-1],
        dim_range=OrderedDict([("batch_size", batch)]),
    )
    return ids["input_ids"], lengths, ids["position_ids"], ids["token_type_ids"]


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", required=True)
    parser.add_argument("--world_size", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--vocab_size", type=int, default=120)
    parser.add_argument("--n_layer", type=int, default=2)
    parser.add_argument("--n_positions", type=int, default=64)
    parser.add_argument("--n_embd", type=int, default=32)
    parser.add_argument("--n_head", type=int, default=4)
    parser.add_argument("--max_batch_size", type=int, default=8)
    parser.add_argument("--max_input_len", type=int, default=48)
    parser.add_argument("--output_dir", default="bert_outputs")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_arguments()
    os.makedirs(args.output_dir, exist_ok=True)
    builder = tensorrt_llm.Builder()
    for rank in range(args.world_size):
        mapping = Mapping(args.world_size, rank, tp_size=args.world_size)
        config = builder.create_builder_config(
            name="BertModel", precision=args.dtype, tensor_parallel=args.world_size
        )
        model = BertModel(args, mapping)
        load(model, args.weights, mapping)
        network = builder.create_network()
        network.plugin_config.to_legacy_setting()
        network.plugin_config.set_bert_attention_plugin(dtype=args.dtype)
        with net_guard(network):
            network.set_named_parameters(model.named_parameters())
            model(*prepare_inputs(args))
        engine = builder.build_engine(network, config)
        name = f"BertModel_{args.dtype}_tp{args.world_size}_rank{rank}.engine"
        with open(os.path.join(args.output_dir, name), "wb") as f:
            f.write(bytearray(engine))
        builder.save_config(config, os.path.join(args.output_dir, "config.json"))
