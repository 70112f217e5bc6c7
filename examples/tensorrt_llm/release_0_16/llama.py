"""LLaMA from a Hugging Face folder, as scripts of TensorRT-LLM 0.8 to 1.x build it.

irc compile llama.py -o build/llama -- --model_dir tiny --tp_size 2 --pp_size 2
"""

import argparse

import tensorrt_llm
from tensorrt_llm import BuildConfig, Mapping
from tensorrt_llm.models import LLaMAForCausalLM
from tensorrt_llm.plugin import PluginConfig


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_dir", required=True)
    parser.add_argument("--output_dir", default="tmp/engine")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tp_size", type=int, default=1)
    parser.add_argument("--pp_size", type=int, default=1)
    parser.add_argument("--gpt_attention_plugin", default="auto")
    return parser.parse_args()


def build_rank(args, rank):
    mapping = Mapping(
        world_size=args.tp_size * args.pp_size,
        rank=rank,
        tp_size=args.tp_size,
        pp_size=args.pp_size,
    )
    llama = LLaMAForCausalLM.from_hugging_face(args.model_dir, args.dtype, mapping=mapping)
    plugins = PluginConfig()
    plugins.gpt_attention_plugin = args.gpt_attention_plugin or None
    build_config = BuildConfig(
        max_batch_size=4, max_input_len=32, max_seq_len=72, plugin_config=plugins
    )
    engine = tensorrt_llm.build(llama, build_config)
    engine.save(args.output_dir)


if __name__ == "__main__":
    args = parse_args()
    for rank in range(args.tp_size * args.pp_size):
        build_rank(args, rank)
