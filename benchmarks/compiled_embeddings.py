"""The lookups of embedding_schemes.py as programs of `--backend cuda`, beside hand-written calls.

    python -m benchmarks.compiled_embeddings --ranks 2

The pass rewrite-embeddings makes each scheme from one module. A program looks up ten times, each
time other ids, as the graph of hand-written calls does; both are timed in the same processes.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import irc
from benchmarks.decode_gpu_models import opened
from benchmarks.embedding_schemes import ROWS, SCATTERED, SCHEMES, TOKENS, WIDTH, Lookup
from benchmarks.rank import start_ranks
from irc.backends.ranks.communicator import Communicator

REPEATED = 10  # lookups in one program
REPLAYS = 15
SECONDS = 200.0  # in which the ranks measure


def text_of(scheme: str, ranks: int) -> str:
    """Ten lookups of rows that are sharded, before a scheme is chosen."""
    scattered = scheme in SCATTERED
    all = f"{ranks}*T" if scattered else "T"
    wanted, made = (f"{all}@tp", "reduce_scatter") if scattered else (all, "all_reduce")
    dim = ", dim=0" if scattered else ""
    ids, results, lines, names = list[str](), list[str](), list[str](), list[str]()
    for i in range(REPEATED):
        ids.append(f"%ids{i}: i32[{all}]")
        results.append(f"y{i}: bf16[{wanted}, {WIDTH}]")
        lines.append(f"%e{i} = embedding %ids{i}, @table : bf16[{all}, {WIDTH}]{{sum tp}}")
        lines.append(f'%y{i} = {made} %e{i} {{axis="tp"{dim}}} : bf16[{wanted}, {WIDTH}]')
        names.append(f"%y{i}")
    body = "\n    ".join([*lines, f"return {', '.join(names)}"])
    return f"""module @lookups mesh(tp={ranks}) dims(T=1:64:{max(TOKENS)}) {{
  weight @table : bf16[{ROWS}@tp, {WIDTH}] = random("table", 1, 0.5)
  func @forward({", ".join(ids)}) -> ({", ".join(results)}) {{
    {body}
  }}
}}"""


def compiled(folder: Path, scheme: str, ranks: int) -> Path:
    """The artifact of a scheme."""
    passes = f'rewrite-embeddings{{scheme="{scheme}"}}, localize, canonicalize, cse, dce'
    target = folder / scheme
    irc.compile(irc.parse(text_of(scheme, ranks)), target, backend="cuda", pipeline=passes)
    return target


def run(host: Communicator, arguments: Sequence[str]) -> None:
    """One rank; the first one prints."""
    import torch

    from benchmarks.embedding_gpu import largest, timed

    torch.cuda.set_device(host.local_rank)
    torch.zeros(1, device="cuda")
    for scheme in SCHEMES:
        with opened(Path(arguments[0], scheme), host, True) as program:
            group = program.rank.world
            assert group is not None
            for tokens in TOKENS:
                lookup = Lookup(scheme, host.ranks, tokens)
                ours, theirs = us_of(program, lookup), timed(lookup, group)
                found = largest(host, {"ours": ours, "theirs": theirs})
                ours, theirs = found["ours"], found["theirs"]
                if not host.rank:
                    print(
                        f"| {tokens} | {scheme} | {theirs:.1f} | {ours:.1f} | "
                        f"{ours / theirs - 1:+.0%} |",
                        flush=True,
                    )


def us_of(program: Any, lookup: Lookup) -> float:
    """Microseconds of a lookup of a compiled program."""
    numbers = np.random.default_rng(lookup.tokens)
    ids = numbers.integers(0, lookup.rows, (REPEATED, lookup.padded)).astype(np.int32)
    stream = program.open({})
    ms = median(stream.times({f"ids{i}": each for i, each in enumerate(ids)}, REPLAYS))
    stream.close()
    return ms * 1e3 / REPEATED


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    print("| tokens | scheme | by hand, µs | compiled, µs | |\n|---|---|---|---|---|", flush=True)
    with TemporaryDirectory() as place:
        for scheme in SCHEMES:
            compiled(Path(place), scheme, options.ranks)
        process = start_ranks(options.ranks, "benchmarks.compiled_embeddings", place)
        if process.wait(SECONDS):
            raise SystemExit("the ranks failed")


if __name__ == "__main__":
    main()
