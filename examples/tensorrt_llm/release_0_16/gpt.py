"""A GPT with an attention of its own, as scripts of TensorRT-LLM 0.8 to 1.x build it.

irc compile gpt.py -o build/gpt -- --weights gpt.safetensors --tp_size 2
"""

import argparse
import math

import tensorrt_llm
from safetensors import safe_open
from tensorrt_llm import BuildConfig
from tensorrt_llm.functional import Tensor, arange, concat, matmul, shape, softmax, unsqueeze, where
from tensorrt_llm.layers import MLP, ColumnLinear, Embedding, LayerNorm, RowLinear
from tensorrt_llm.models.modeling_utils import (
    DecoderLayerList,
    DecoderModelForCausalLM,
    PretrainedConfig,
)
from tensorrt_llm.module import Module
from tensorrt_llm.plugin import PluginConfig


class SelfAttention(Module):
    def __init__(self, config):
        super().__init__()
        mapping = config.mapping
        self.heads, self.size = config.num_attention_heads // mapping.tp_size, config.head_size
        parallel = {"tp_group": mapping.tp_group, "tp_size": mapping.tp_size}
        width, dtype = config.hidden_size, config.dtype
        self.query = ColumnLinear(width, width, dtype=dtype, gather_output=False, **parallel)
        self.key = ColumnLinear(width, width, dtype=dtype, gather_output=False, **parallel)
        self.value = ColumnLinear(width, width, dtype=dtype, gather_output=False, **parallel)
        self.dense = RowLinear(width, width, dtype=dtype, **parallel)

    def split_heads(self, x: Tensor) -> Tensor:
        return x.view(concat([shape(x, 0), shape(x, 1), self.heads, self.size])).transpose(1, 2)

    def forward(self, x, cache):
        query, key = self.split_heads(self.query(x)), self.split_heads(self.key(x))
        value = self.split_heads(self.value(x))
        key = concat([cache.select(1, 0), key], dim=2)
        value = concat([cache.select(1, 1), value], dim=2)
        present = concat([unsqueeze(key, 1), unsqueeze(value, 1)], dim=1)
        scores = matmul(query, key, transb=True) / math.sqrt(self.size)
        length = shape(key, 2)
        last = arange(length - shape(query, 2), length, dtype="int32")
        visible = unsqueeze(last, 1) >= unsqueeze(arange(0, length, dtype="int32"), 0)
        scores = where(unsqueeze(unsqueeze(visible, 0), 0), scores, -1e9)
        mixed = matmul(softmax(scores, dim=-1), value).transpose(1, 2)
        return self.dense(mixed.flatten(2, 3)), present


class GPTLayer(Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.input_layernorm = LayerNorm(config.hidden_size, dtype=config.dtype)
        self.attention = SelfAttention(config)
        self.post_layernorm = LayerNorm(config.hidden_size, dtype=config.dtype)
        self.mlp = MLP(
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            dtype=config.dtype,
            tp_group=config.mapping.tp_group,
            tp_size=config.mapping.tp_size,
        )

    def forward(self, hidden_states, use_cache=False, kv_cache_params=None, **_):
        cache = kv_cache_params.get_first_past_key_value()
        mixed, present = self.attention(self.input_layernorm(hidden_states), cache)
        hidden_states = hidden_states + mixed
        hidden_states = hidden_states + self.mlp(self.post_layernorm(hidden_states))
        return (hidden_states, present) if use_cache else hidden_states


class GPTModel(Module):
    def __init__(self, config):
        super().__init__()
        self.vocab_embedding = Embedding(config.vocab_size, config.hidden_size, dtype=config.dtype)
        self.position_embedding = Embedding(
            config.max_position_embeddings, config.hidden_size, dtype=config.dtype
        )
        self.layers = DecoderLayerList(GPTLayer, config)
        self.ln_f = LayerNorm(config.hidden_size, dtype=config.dtype)

    def forward(self, input_ids, position_ids, use_cache, kv_cache_params, **more):
        x = self.vocab_embedding(input_ids) + self.position_embedding(position_ids)
        x, presents = self.layers(x, use_cache=use_cache, kv_cache_params=kv_cache_params)
        return self.ln_f(x), presents


class GPTForCausalLM(DecoderModelForCausalLM):
    def __init__(self, config):
        head = ColumnLinear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            dtype=config.dtype,
            tp_group=config.mapping.tp_group,
            tp_size=config.mapping.tp_size,
        )
        super().__init__(config, GPTModel(config), head)


def load_weights(model, path, mapping):
    weights = {}
    with safe_open(path, "np") as file:
        for name in file.keys():  # noqa: SIM118 (a file of safetensors is no dict)
            value = file.get_tensor(name)
            columns = (".query.", ".key.", ".value.", ".fc.", "lm_head.")
            if any(each in name for each in columns):
                value = value.reshape(mapping.tp_size, -1, *value.shape[1:])[mapping.tp_rank]
            elif name.endswith(("dense.weight", "proj.weight")):
                rows = value.reshape(value.shape[0], mapping.tp_size, -1)
                value = rows[:, mapping.tp_rank].copy()
            weights[name] = value
    model.load(weights)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", required=True)
    parser.add_argument("--output_dir", default="engines")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tp_size", type=int, default=1)
    args = parser.parse_args()
    for rank in range(args.tp_size):
        config = PretrainedConfig.from_dict(
            {
                "architecture": "MyGPTForCausalLM",
                "dtype": args.dtype,
                "vocab_size": 96,
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "hidden_act": "gelu",
                "max_position_embeddings": 64,
                "mapping": {"world_size": args.tp_size, "tp_size": args.tp_size},
            }
        )
        config.set_rank(rank)
        model = GPTForCausalLM(config)
        load_weights(model, args.weights, config.mapping)
        plugins = PluginConfig()
        plugins.gpt_attention_plugin = None
        engine = tensorrt_llm.build(
            model,
            BuildConfig(max_batch_size=4, max_input_len=16, max_seq_len=56, plugin_config=plugins),
        )
        engine.save(args.output_dir)


if __name__ == "__main__":
    main()
