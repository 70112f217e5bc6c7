"""Prefill and decode times of an irc artifact: `run_irc FOLDER THREADS PROMPT NEW`."""

from __future__ import annotations

import sys
import time

import numpy as np

import irc
from benchmarks.peers.prompt import prompt_ids, report
from irc.backends.base import Stream


def main() -> None:
    folder = sys.argv[1]
    threads, prompt, new = map(int, sys.argv[2:])
    start = time.perf_counter()
    program = irc.load(folder, threads=threads).program
    load = time.perf_counter() - start
    prefills: list[float] = []
    decodes: list[float] = []
    for _ in range(2):
        stream = program.open({"B": 1, "C": prompt + new + 1})
        start = time.perf_counter()
        token = step(stream, prompt_ids(prompt), 0)
        prefills.append(time.perf_counter() - start)
        for i in range(new - 1):
            start = time.perf_counter()
            token = step(stream, [token], prompt + i)
            decodes.append(time.perf_counter() - start)
    report(load, prefills, decodes)


def step(stream: Stream, ids: list[int], past: int) -> int:
    """One call; the likeliest next token."""
    count = len(ids)
    inputs = {
        "input_ids": np.array([ids], np.int32),
        "positions": np.arange(past, past + count, dtype=np.int32)[None],
        "past_lengths": np.array([past], np.int32),
        "logit_positions": np.array([[count - 1]], np.int32),
    }
    return int(stream.step(inputs)["logits"][0, -1].argmax())


if __name__ == "__main__":
    main()
