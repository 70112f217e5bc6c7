"""Prefill and decode times in transformers: `run_transformers FOLDER THREADS PROMPT NEW`."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import sys
import time

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.prompt import prompt_ids, report


def main() -> None:
    folder = sys.argv[1]
    threads, prompt, new = map(int, sys.argv[2:])
    torch.set_num_threads(threads)
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    load = time.perf_counter() - start
    prefills: list[float] = []
    decodes: list[float] = []
    with torch.inference_mode():
        for _ in range(2):
            ids = torch.tensor([prompt_ids(prompt)])
            start = time.perf_counter()
            out = model(ids, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1:].argmax(-1)
            prefills.append(time.perf_counter() - start)
            for _ in range(new - 1):
                start = time.perf_counter()
                out = model(token, past_key_values=out.past_key_values, logits_to_keep=1)
                token = out.logits[:, -1:].argmax(-1)
                decodes.append(time.perf_counter() - start)
    report(load, prefills, decodes)


if __name__ == "__main__":
    main()
