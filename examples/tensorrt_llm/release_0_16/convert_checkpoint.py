"""Writes a checkpoint folder of TensorRT-LLM from one of Hugging Face, as convert_checkpoint.py.

python -m irc.frontends.tensorrt_llm convert_checkpoint.py --model_dir tiny --output_dir checkpoint
"""

import argparse

from tensorrt_llm import Mapping
from tensorrt_llm.models import LLaMAForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--model_dir", required=True)
parser.add_argument("--output_dir", required=True)
parser.add_argument("--dtype", default="auto")
parser.add_argument("--tp_size", type=int, default=1)
parser.add_argument("--pp_size", type=int, default=1)
args = parser.parse_args()

world_size = args.tp_size * args.pp_size
for rank in range(world_size):
    mapping = Mapping(world_size=world_size, rank=rank, tp_size=args.tp_size, pp_size=args.pp_size)
    model = LLaMAForCausalLM.from_hugging_face(args.model_dir, dtype=args.dtype, mapping=mapping)
    model.save_checkpoint(args.output_dir, save_config=rank == 0)
