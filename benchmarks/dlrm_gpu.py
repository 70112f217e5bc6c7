"""A DLRM on GPUs, by `irc compile --backend cuda` and by torch with NCCL.

    python -m benchmarks.dlrm_gpu                one GPU
    python -m benchmarks.dlrm_gpu --tp 2         tables sharded over two GPUs

26 tables of 10^8 rows together, with the sizes of Criteo's categories, of which the largest have 20
million rows; each of 8192 requests looks up one row of every table. Weights are repeated random
numbers in bf16. torch has the rows of all tables in one, looks them up in one call, adds up what
the ranks found in one all_reduce, and computes the layers on every rank, all in one CUDA graph.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import irc
from benchmarks.decode_gpu_models import opened
from benchmarks.process import exchange, graph_us, run_ranks
from irc.backends.cuda.group import Group
from irc.backends.ranks.communicator import Communicator
from irc.frontends import Module, ModuleList, Tensor, random_weights
from irc.frontends import functional as F
from irc.frontends.layers import Embedding, Linear
from irc.ir.dtypes import numpy_dtype

MOST = 20_000_000
CATEGORIES = (
    *(39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10),
    *(2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36),
)
ROWS = tuple(min(rows, MOST) for rows in CATEGORIES)
DENSE, WIDTH = 13, 64
BOTTOM = (DENSE, 512, 256, WIDTH)
PAIRS = len(ROWS) * (len(ROWS) + 1) // 2
TOP = (WIDTH + PAIRS, 1024, 1024, 512, 256, 1)
REPLAYS = 50


class Layers(Module):
    """Linear layers with a relu between them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.layers = ModuleList(Linear(a, b, True, "bf16") for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, the first size] to [B, the last]."""
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class Dlrm(Module):
    """The probability of a click."""

    def __init__(self) -> None:
        self.tables = ModuleList(Embedding(rows, WIDTH, dtype="bf16") for rows in ROWS)
        self.bottom, self.top = Layers(BOTTOM), Layers(TOP)

    def forward(self, dense: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """dense [B, 13], ids [B, 26]."""
        x = self.bottom(dense)
        found = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        vectors = F.stack([x, *found], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        pairs = [products[:, i, :i] for i in range(1, len(ROWS) + 1)]
        return {"click": F.sigmoid(self.top(F.concat([x, *pairs], dim=-1)).squeeze(-1))}


def compiled(folder: Path, tp: int, embedding: str) -> None:
    """Write the artifact."""
    inputs = {"dense": irc.Spec("bf16", ("B", DENSE)), "ids": irc.Spec("i32", ("B", len(ROWS)))}
    module = irc.trace(Dlrm(), inputs, {"B": (1, 8192, 65536)})
    mesh: dict[str, Any] = {"mesh": f"tp={tp}", "embedding": embedding} if tp > 1 else {}
    irc.compile(random_weights(module, 0), folder, backend="cuda", **mesh)


def run(host: Communicator | None, words: Sequence[str]) -> None:
    """One rank, which measures both; the first one prints."""
    number, ranks = (0, 1) if host is None else (host.local_rank, host.ranks)
    torch.cuda.set_device(number)
    with opened(Path(words[0]), host, True) as program:
        ours = {int(batch): step(program, int(batch)) for batch in words[1:]}
        steps = len(program.rank.execution({"B": int(words[1])}).plan.steps)
        peer = Peer(ranks, program.rank.world)
        for batch, ms in ours.items():
            theirs = peer.ms(batch)
            if not number:
                print(
                    f"{ranks} GPUs, batch {batch}: irc {ms:.3f} ms in {steps} steps, "
                    f"torch {theirs:.3f} ms",
                    flush=True,
                )


def step(program: Any, batch: int) -> float:
    """Milliseconds of a step."""
    numbers = np.random.default_rng(batch)
    inputs = {
        "dense": numbers.standard_normal((batch, DENSE), np.float32).astype(numpy_dtype("bf16")),
        "ids": numbers.integers(0, ROWS, (batch, len(ROWS))).astype(np.int32),
    }
    stream = program.open({})
    ms = median(stream.times(inputs, REPLAYS))
    stream.close()
    return ms


class Peer:
    """The model in torch, on one of `ranks` GPUs."""

    def __init__(self, ranks: int, group: Group | None) -> None:
        self._group = group if ranks > 1 else None
        self._stream = torch.cuda.Stream()
        self._bottom, self._top = (
            [(_random(b, a), _random(b)) for a, b in pairwise(sizes)] for sizes in (BOTTOM, TOP)
        )
        starts = [0, *accumulate(ROWS)]
        self._starts = torch.tensor(starts[:-1], device="cuda")
        self._count = -(-starts[-1] // ranks)
        self._first = self._count * (group.rank if group is not None else 0)
        self._table = torch.empty(self._count, WIDTH, dtype=torch.bfloat16, device="cuda")
        self._table.normal_()
        places = torch.tril_indices(len(ROWS) + 1, len(ROWS) + 1, -1, device="cuda")
        self._places = places[0] * (len(ROWS) + 1) + places[1]

    def ms(self, batch: int) -> float:
        """Milliseconds of a step."""
        dense = _random(batch, DENSE)
        ids = torch.cat([torch.randint(n, (batch, 1), device="cuda") for n in ROWS], 1)
        torch.cuda.synchronize()
        return graph_us(lambda: self._step(dense, ids), self._stream) / 1e3

    def _step(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = _layers(dense, self._bottom)
        vectors = torch.cat([x.unsqueeze(1), self._rows(ids + self._starts)], 1)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1)
        joined = torch.cat([x, products.index_select(1, self._places)], 1)
        return torch.sigmoid(_layers(joined, self._top).squeeze(-1))

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self._group is None:
            return torch.nn.functional.embedding(ids, self._table)
        own = ids - self._first
        held = (own >= 0) & (own < self._count)
        found = torch.nn.functional.embedding(torch.where(held, own, 0), self._table)
        found = found.masked_fill_(~held[..., None], 0)
        stream = torch.cuda.current_stream().cuda_stream
        exchange("all_reduce", self._group, found, found, stream)
        return found


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02


def _layers(x: torch.Tensor, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    for weight, bias in layers[:-1]:
        x = torch.nn.functional.linear(x, weight, bias).relu_()
    return torch.nn.functional.linear(x, *layers[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--batch", type=int, nargs="+", default=[8192])
    parser.add_argument("--embedding", default="auto", help="a scheme of rewrite-embeddings")
    options = parser.parse_args()
    with TemporaryDirectory() as place:
        folder = Path(place, "dlrm")
        compiled(folder, options.tp, options.embedding)
        words = [str(folder), *map(str, options.batch)]
        if options.tp == 1:
            run(None, words)
        else:
            run_ranks(options.tp, "benchmarks.dlrm_gpu", *words)


if __name__ == "__main__":
    main()
