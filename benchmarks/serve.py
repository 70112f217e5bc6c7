"""Tokens/s of the engine of `irc serve` on CPU beside onnxruntime-genai, equal threads.

    python -m benchmarks.serve [--shape 1b] [--threads 2] [--rows 16] [--prompt 64] [--new 128]
        [--rounds 2]

W4A16 from bf16 beside onnxruntime-genai's int4 in blocks of 32: the same prompts and random weights
in one process, in turns. The table has medians of the rounds, with the least and the most: new
tokens/s from the first arrival to the last token, and tokens/s of the steps in which all rows
decode. Below it is what a long prompt costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TypeAlias

import numpy as np

import irc
from benchmarks import compile as compiling
from benchmarks.checkpoints import make
from benchmarks.peers.run import load_genai, prompt_ids
from irc.generation.settings import GenerationSettings
from irc.server.engine import Engine

Prompts: TypeAlias = Sequence[list[int]]
LONG, PIECE = 1000, 256  # tokens of the long prompt, and of the pieces in which prompts are read


@dataclass
class Round:
    """Seconds of all `tokens`, and those of each step of full rows."""

    tokens: int
    rows: int
    seconds: float = 0.0
    steps: list[float] = field(default_factory=list[float])

    @property
    def rates(self) -> tuple[float, float]:
        """Tokens/s, of the round and of its full steps."""
        return self.tokens / self.seconds, self.rows / median(self.steps or [np.nan])


def prompts_of(rows: int, length: int) -> Prompts:
    """Different prompts."""
    return [prompt_ids(length + row)[row:] for row in range(rows)]


def ask(engine: Engine, prompt: list[int], new: int) -> list[float]:
    """The times of the arrival of a request, of its tokens, and of its end, as they come."""
    times, settings = [perf_counter()], GenerationSettings(max_new_tokens=new)
    engine.submit(prompt, settings, lambda event: times.append(perf_counter()))
    return times


def turn(engine: Engine) -> float:
    """The seconds of a step of an engine without its thread."""
    begin = perf_counter()
    engine.turn()
    if engine.failure is not None:
        raise engine.failure
    return perf_counter() - begin


def serve(engine: Engine, prompts: Prompts, new: int, gap: float = 0.0) -> Round:
    """Requests that arrive `gap` seconds after each other."""
    waiting, begin, before = [*prompts], perf_counter(), engine.stats
    result = Round(len(prompts) * new, engine.slots)
    while waiting or before.running or before.waiting:
        while waiting and perf_counter() - begin >= gap * (len(prompts) - len(waiting)):
            ask(engine, waiting.pop(0), new)
        seconds, after = turn(engine), engine.stats
        if after.completion_tokens - before.completion_tokens == after.running == engine.slots:
            result.steps.append(seconds)
        before = after
    result.seconds = perf_counter() - begin
    return result


def long_prompt(engine: Engine, rows: int, length: int) -> str:
    """What a long prompt costs requests that run, and one that arrives right behind it."""
    others = [ask(engine, prompt, LONG) for prompt in prompts_of(rows, length)]
    while any(len(times) < 3 for times in others):
        turn(engine)
    long = ask(engine, prompt_ids(LONG), 1)
    turn(engine)
    late = ask(engine, prompt_ids(length), 1)
    while len(late) < 2:
        turn(engine)
    gaps = (np.diff([moment for moment in times if moment > long[0]]) for times in others)
    return (
        f"a prompt of {LONG} tokens beside {rows} rows: first token after {long[1] - long[0]:.1f} "
        f"s; one of {length} right behind it after {late[1] - late[0]:.1f} s; the rows wait "
        f"{max(map(np.max, gaps)):.2f} s at most"
    )


def genai(folder: Path, threads: int) -> Callable[[Prompts, int], Round]:
    """Batches of onnxruntime-genai."""
    og, model, _ = load_genai(str(folder), threads)

    def run(prompts: Prompts, new: int) -> Round:
        result, length = Round(len(prompts) * new, len(prompts)), len(prompts[0]) + new
        parameters = og.GeneratorParams(model)
        parameters.set_search_options(batch_size=len(prompts), max_length=length, min_length=length)
        begin = perf_counter()
        generator = og.Generator(model, parameters)
        generator.append_tokens(np.array(prompts, np.int32))
        for _ in range(new):
            start = perf_counter()
            generator.generate_next_token()
            result.steps.append(perf_counter() - start)
        result.seconds = perf_counter() - begin
        return result

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1b", choices=("tiny", "1b"))
    parser.add_argument("--work", type=Path, default=Path("build/benchmarks"))
    sizes = {"threads": 2, "rows": 16, "prompt": 64, "new": 128, "rounds": 2}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    rows, new, work = options.rows, options.new, options.work.resolve()
    folder, peer_folder = work / "irc-serve", work / "genai-run-int4"
    checkpoint = make(options.shape, work / f"{options.shape}-bf16", "bf16")
    compiling.irc_run(checkpoint, folder, "--quantize", "w4a16", "--dims", f"B=1:{rows}:{rows}")
    if not (peer_folder / "genai_config.json").exists():
        compiling.genai(checkpoint, peer_folder, "int4")
    model = irc.load(folder, threads=options.threads).model
    model.ends = ()  # every answer has `new` tokens
    many, one = Engine(model, rows, PIECE), Engine(model, 1, PIECE)
    peer, prompts = genai(peer_folder, options.threads), prompts_of(rows, options.prompt)
    engines: dict[str, Callable[[], Round]] = {
        f"irc, {rows} slots": lambda: serve(many, prompts, new),
        f"genai, batch of {rows}": lambda: peer(prompts, new),
        f"irc, {rows} slots, arrivals 0.5 s apart": lambda: serve(many, prompts, new, 0.5),
        "irc, one at a time": lambda: serve(one, prompts[:2], new),
    }
    rounds = [{label: run() for label, run in engines.items()} for _ in range(options.rounds)]
    print(f"{'':36s}{'tokens/s':>24s}{'tokens/s, full rows':>24s}")
    rates: list[float] = []
    for label in engines:
        columns = [*zip(*(results[label].rates for results in rounds), strict=True)]
        cells = [f"{median(c):.1f} [{min(c):.1f}, {max(c):.1f}]" for c in columns]
        print(f"{label:36s}" + "".join(f"{cell:>24s}" for cell in cells))
        rates.append(median(columns[0]))
    print(
        f"{rates[0] / rates[1]:.2f} of genai's batch, {rates[0] / rates[-1]:.2f} of one at a time"
    )
    print(long_prompt(many, rows // 2, options.prompt))


if __name__ == "__main__":
    main()
