"""The DLRM of dlrm_gpu.py in torch: one table of all rows, one all_reduce, in one CUDA graph."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from benchmarks.dlrm_gpu import BOTTOM, DENSE, ROWS, TOP, WIDTH
from benchmarks.embedding_gpu import exchange
from benchmarks.gpu_timing import graph_us
from irc.backends.cuda.group import Group

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Peer:
    """The model on one of `ranks` GPUs."""

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


def _layers(x: torch.Tensor, layers: Layers) -> torch.Tensor:
    for weight, bias in layers[:-1]:
        x = torch.nn.functional.linear(x, weight, bias).relu_()
    return torch.nn.functional.linear(x, *layers[-1])
