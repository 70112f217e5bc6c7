"""Prefill and decode times of one engine on CPU, printed as JSON.

python -m benchmarks.peers.run irc|genai|transformers FOLDER THREADS PROMPT NEW
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, TypeAlias

import numpy as np

# Each call begins a sequence; it stops before the prompt, and then behind each new token.
Sequences: TypeAlias = Callable[[], Iterator[None]]
# From a folder, threads, and the most tokens of a sequence: (seconds of loading, sequences).
Engine: TypeAlias = Callable[[str, int, "list[int]", int], "tuple[float, Sequences]"]


def prompt_ids(count: int) -> list[int]:
    """Token ids that any vocabulary of the benchmark has."""
    return [(37 * i) % 991 + 1 for i in range(count)]


def run_irc(folder: str, threads: int, prompt: list[int], new: int) -> tuple[float, Sequences]:
    """An artifact of irc."""
    import irc

    start = time.perf_counter()
    program = irc.load(folder, threads=threads).program
    load = time.perf_counter() - start

    def sequence() -> Iterator[None]:
        stream, ids, past = program.open({"B": 1, "C": len(prompt) + new + 1}), prompt, 0
        while True:
            yield
            count = len(ids)
            inputs = {
                "input_ids": np.array([ids], np.int32),
                "positions": np.arange(past, past + count, dtype=np.int32)[None],
                "past_lengths": np.array([past], np.int32),
                "logit_positions": np.array([[count - 1]], np.int32),
            }
            ids, past = [int(stream.step(inputs)["logits"][0, -1].argmax())], past + count

    return load, sequence


def load_genai(folder: str, threads: int) -> tuple[Any, Any, float]:
    """onnxruntime-genai, a model of it, and the seconds of loading the model."""
    import onnxruntime_genai

    og: Any = onnxruntime_genai  # its names come from a compiled module without type information
    start = time.perf_counter()
    config = og.Config(folder)
    overlay = {"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}
    config.overlay(json.dumps(overlay))
    model = og.Model(config)
    return og, model, time.perf_counter() - start


def run_genai(folder: str, threads: int, prompt: list[int], new: int) -> tuple[float, Sequences]:
    """A model of onnxruntime-genai."""
    og, model, load = load_genai(folder, threads)
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=len(prompt) + new + 1, do_sample=False)

    def sequence() -> Iterator[None]:
        generator = og.Generator(model, parameters)
        yield
        generator.append_tokens(np.array(prompt, np.int32))
        while True:
            generator.generate_next_token()
            yield

    return load, sequence


def run_transformers(
    folder: str, threads: int, prompt: list[int], new: int
) -> tuple[float, Sequences]:
    """A checkpoint in transformers, in f32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    load = time.perf_counter() - start

    def sequence() -> Iterator[None]:
        ids, caches = torch.tensor([prompt]), None
        while True:
            yield
            with torch.inference_mode():
                out = model(ids, past_key_values=caches, use_cache=True, logits_to_keep=1)
            ids, caches = out.logits[:, -1:].argmax(-1), out.past_key_values

    return load, sequence


ENGINES: dict[str, Engine] = {"irc": run_irc, "genai": run_genai, "transformers": run_transformers}


def main() -> None:
    engine, folder, *numbers = sys.argv[1:]
    threads, prompt, new = map(int, numbers)
    load, begin = ENGINES[engine](folder, threads, prompt_ids(prompt), new)
    prefills: list[float] = []
    decodes: list[float] = []
    for _ in range(2):
        sequence = begin()
        next(sequence)
        for times in [prefills] + [decodes] * (new - 1):
            start = time.perf_counter()
            next(sequence)
            times.append(time.perf_counter() - start)
    print(json.dumps({"load": load, "prefill": min(prefills), "decode": median(decodes)}))


if __name__ == "__main__":
    main()
