"""A GPT with an attention of its own, as scripts of TensorRT-LLM 0.5 to 0.7 build it.

irc compile gpt.py -o build/gpt -- --weights gpt.npz --world_size 2
"""

import argparse
import math
from collections import OrderedDict
from pathlib import Path

import numpy as np
import tensorrt as trt
import tensorrt_llm
from tensorrt_llm import Mapping
from tensorrt_llm.functional import (
    Tensor,
    arange,
    concat,
    expand_dims,
    gather_last_token_logits,
    matmul,
    shape,
    softmax,
    split,
    where,
)
from tensorrt_llm.layers import MLP, ColumnLinear, Embedding, LayerNorm, RowLinear
from tensorrt_llm.module import Module, ModuleList
from tensorrt_llm.network import net_guard


class GPTAttention(Module):
    def __init__(self, hidden_size, num_heads, dtype, mapping, layer_id):
        super().__init__()
        self.num_heads = num_heads // mapping.tp_size
        self.head_size = hidden_size // num_heads
        group, size = mapping.tp_group, mapping.tp_size
        self.qkv = ColumnLinear(
            hidden_size,
            3 * hidden_size,
            dtype=dtype,
            tp_group=group,
            tp_size=size,
            gather_output=False,
        )
        self.dense = RowLinear(
            hidden_size,
            hidden_size,
            dtype=dtype,
            tp_group=group,
            tp_size=size,
            instance_id=2 * layer_id,
        )

    def forward(self, x, past_key_value, workspace=None):
        qkv = self.qkv(x)
        query, key, value = split(qkv, self.num_heads * self.head_size, dim=2)

        def heads(t):
            sizes = concat([shape(t, 0), shape(t, 1), self.num_heads, self.head_size])
            return t.view(sizes).permute([0, 2, 1, 3])

        query, key, value = heads(query), heads(key), heads(value)
        past_key, past_value = past_key_value.split(1, dim=1)
        sizes = concat([shape(past_key, 0), self.num_heads, shape(past_key, 3), self.head_size])
        key = concat([past_key.view(sizes), key], dim=2)
        value = concat([past_value.view(sizes), value], dim=2)
        present = concat([expand_dims(key, 1), expand_dims(value, 1)], dim=1)

        scores = matmul(query, key, transb=True) / math.sqrt(self.head_size)
        queries, keys = shape(scores, 2), shape(scores, 3)
        places = arange(0, keys, dtype="int32")
        mine = arange(keys - queries, keys, dtype="int32")
        visible = expand_dims(places, 0) <= expand_dims(mine, 1)
        scores = where(expand_dims(visible, [0, 1]), scores, -1e9)
        context = matmul(softmax(scores, dim=-1), value).permute([0, 2, 1, 3])
        width = self.num_heads * self.head_size
        context = context.view(concat([shape(context, 0), shape(context, 1), width]))
        return self.dense(context, workspace), present


class GPTLayer(Module):
    def __init__(self, hidden_size, num_heads, dtype, mapping, layer_id):
        super().__init__()
        self.input_layernorm = LayerNorm(hidden_size, dtype=dtype)
        self.attention = GPTAttention(hidden_size, num_heads, dtype, mapping, layer_id)
        self.post_layernorm = LayerNorm(hidden_size, dtype=dtype)
        self.mlp = MLP(
            hidden_size,
            4 * hidden_size,
            "gelu",
            dtype=dtype,
            tp_group=mapping.tp_group,
            tp_size=mapping.tp_size,
            instance_id=2 * layer_id + 1,
        )

    def forward(self, x, past_key_value, workspace=None):
        mixed, present = self.attention(self.input_layernorm(x), past_key_value, workspace)
        x = x + mixed
        return x + self.mlp(self.post_layernorm(x), workspace), present


class GPT(Module):
    def __init__(self, num_layers, num_heads, hidden_size, vocab_size, n_positions, dtype, mapping):
        super().__init__()
        self.num_layers, self.num_heads, self.hidden_size = num_layers, num_heads, hidden_size
        self.dtype, self.mapping = dtype, mapping
        self.vocab_embedding = Embedding(
            vocab_size,
            hidden_size,
            dtype=dtype,
            tp_size=mapping.tp_size,
            tp_group=mapping.tp_group,
            sharding_dim=0,
            tp_rank=mapping.tp_rank,
            instance_id=2 * num_layers,
        )
        self.position_embedding = Embedding(n_positions, hidden_size, dtype=dtype)
        self.layers = ModuleList(
            [GPTLayer(hidden_size, num_heads, dtype, mapping, i) for i in range(num_layers)]
        )
        self.ln_f = LayerNorm(hidden_size, dtype=dtype)
        self.lm_head = ColumnLinear(
            hidden_size,
            vocab_size,
            bias=False,
            dtype=dtype,
            tp_group=mapping.tp_group,
            tp_size=mapping.tp_size,
            gather_output=True,
        )

    def forward(self, input_ids, position_ids, last_token_ids, past_key_value, workspace=None):
        x = self.vocab_embedding(input_ids, workspace) + self.position_embedding(position_ids)
        for i, layer in enumerate(self.layers):
            x, present = layer(x, past_key_value[i], workspace)
            present.mark_output(f"present_key_value_{i}", tensorrt_llm.str_dtype_to_trt(self.dtype))
        x = gather_last_token_logits(self.ln_f(x), last_token_ids, False)
        logits = self.lm_head(x)
        logits.mark_output("logits", trt.float32)

    def prepare_inputs(self, max_batch_size, max_input_len, max_new_tokens):
        batch = [[1, (max_batch_size + 1) // 2, max_batch_size]]
        tokens = [[1, max_input_len // 2, max_input_len]]
        past = [[0, max_input_len, max_input_len + max_new_tokens]]

        def ids(name):
            return Tensor(
                name=name,
                dtype=trt.int32,
                shape=[-1, -1],
                dim_range=OrderedDict([("batch_size", batch), ("input_len", tokens)]),
            )

        heads = self.num_heads // self.mapping.tp_size
        size = self.hidden_size // self.num_heads
        caches = [
            Tensor(
                name=f"past_key_value_{i}",
                dtype=tensorrt_llm.str_dtype_to_trt(self.dtype),
                shape=[-1, 2, heads, -1, size],
                dim_range=OrderedDict(
                    [
                        ("batch_size", batch),
                        ("kv", [2]),
                        ("num_heads", [heads]),
                        ("past_key_len", past),
                        ("head_size", [size]),
                    ]
                ),
            )
            for i in range(self.num_layers)
        ]
        last = Tensor(
            name="last_token_ids",
            dtype=trt.int32,
            shape=[-1],
            dim_range=OrderedDict([("batch_size", batch)]),
        )
        workspace = None
        if self.mapping.tp_size > 1:
            pointers = 3 * self.mapping.tp_size
            workspace = Tensor(
                name="all_reduce_workspace",
                dtype=trt.int64,
                shape=[pointers],
                dim_range=OrderedDict([("workspace_size", [pointers])]),
            )
        return ids("input_ids"), ids("position_ids"), last, caches, workspace


def load(model, path, mapping):
    weights = np.load(path)

    def part(name, dim):
        return np.split(weights[name], mapping.tp_size, axis=dim)[mapping.tp_rank]

    for name, parameter in model.named_parameters():
        if "qkv" in name:  # the rows of query, key and value are sharded separately
            three = np.split(weights[name], 3, axis=0)
            parts = [np.split(t, mapping.tp_size, axis=0)[mapping.tp_rank] for t in three]
            parameter.value = np.concatenate(parts)
        elif name.endswith(("fc.weight", "fc.bias")) or name == "lm_head.weight":
            parameter.value = part(name, 0)
        elif name == "vocab_embedding.weight":
            table = weights[name]
            rows = -(-len(table) // mapping.tp_size)
            table = np.pad(table, ((0, rows * mapping.tp_size - len(table)), (0, 0)))
            parameter.value = table[mapping.tp_rank * rows :][:rows]
        elif name.endswith(("dense.weight", "proj.weight")):
            parameter.value = part(name, 1)
        else:
            parameter.value = weights[name]


def build_rank(args, rank):
    mapping = Mapping(args.world_size, rank, tp_size=args.world_size)
    model = GPT(
        args.n_layer,
        args.n_head,
        args.n_embd,
        args.vocab_size,
        args.n_positions,
        args.dtype,
        mapping,
    )
    load(model, args.weights, mapping)
    builder = tensorrt_llm.Builder()
    config = builder.create_builder_config(
        name="gpt", precision=args.dtype, tensor_parallel=args.world_size
    )
    network = builder.create_network()
    network.plugin_config.set_nccl_plugin(args.dtype)
    with net_guard(network):
        network.set_named_parameters(model.named_parameters())
        inputs = model.prepare_inputs(args.max_batch_size, args.max_input_len, args.max_output_len)
        model(*inputs)
    engine = builder.build_engine(network, config)
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    path = Path(args.output_dir) / f"gpt_{args.dtype}_tp{args.world_size}_rank{rank}.engine"
    with open(path, "wb") as file:
        file.write(bytearray(engine))
    if rank == 0:
        builder.save_config(config, str(Path(args.output_dir) / "config.json"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", required=True)
    parser.add_argument("--world_size", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--n_layer", type=int, default=2)
    parser.add_argument("--n_head", type=int, default=4)
    parser.add_argument("--n_embd", type=int, default=64)
    parser.add_argument("--vocab_size", type=int, default=96)
    parser.add_argument("--n_positions", type=int, default=64)
    parser.add_argument("--max_batch_size", type=int, default=4)
    parser.add_argument("--max_input_len", type=int, default=32)
    parser.add_argument("--max_output_len", type=int, default=32)
    parser.add_argument("--output_dir", default="engines")
    args = parser.parse_args()
    for rank in range(args.world_size):
        build_rank(args, rank)


if __name__ == "__main__":
    main()
