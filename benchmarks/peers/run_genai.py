"""Prefill and decode times of onnxruntime-genai: `run_genai FOLDER THREADS PROMPT NEW`."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai

from benchmarks.peers.prompt import prompt_ids, report

og: Any = onnxruntime_genai  # its names come from a compiled module without type information


def main() -> None:
    folder, threads, prompt, new = Path(sys.argv[1]), *map(int, sys.argv[2:])
    start = time.perf_counter()
    config = og.Config(str(folder))
    overlay = {"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}
    config.overlay(json.dumps(overlay))
    model = og.Model(config)
    load = time.perf_counter() - start
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=prompt + new + 1, do_sample=False)
    prefills: list[float] = []
    decodes: list[float] = []
    for _ in range(2):
        generator = og.Generator(model, parameters)
        start = time.perf_counter()
        generator.append_tokens(np.array(prompt_ids(prompt), np.int32))
        generator.generate_next_token()
        prefills.append(time.perf_counter() - start)
        for _ in range(new - 1):
            start = time.perf_counter()
            generator.generate_next_token()
            decodes.append(time.perf_counter() - start)
        del generator
    report(load, prefills, decodes)


if __name__ == "__main__":
    main()
