"""The lookups of benchmarks/embedding_schemes.py on GPUs: torch for arrays, NCCL under a graph."""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.embedding_schemes import FOUND, Lookup, lookups
from benchmarks.process import exchange, graph_us
from irc.backends.cuda.device import CudaDriver
from irc.backends.cuda.group import Group, nccl_version, open_group
from irc.backends.ranks.communicator import CollectiveCall, Communicator

REPEATED = 10  # lookups in one graph, each of other ids
Times = dict[str, float]


def run(host: Communicator, arguments: Sequence[str]) -> None:
    """One rank; the first one writes the GPUs and the largest values of all ranks to a file.

    The values are microseconds by "scheme tokens", and bytes that NCCL took by collective.
    """
    (folder,) = arguments
    torch.cuda.set_device(host.local_rank)
    torch.zeros(1, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    group = open_group(host, range(host.ranks), CudaDriver(host.local_rank), meeting=100.0)
    taken = {k: float(free - left_after(k, group)) for k in ("all_reduce", "all_to_all")}
    times = {f"{each.scheme} {each.tokens}": timed(each, group) for each in lookups(host.ranks)}
    about = f"{host.ranks} x {torch.cuda.get_device_name(0)}, NCCL {nccl_version()}"
    about += f", torch {torch.__version__}"
    found = [about, largest(host, times), largest(host, taken)]
    if not host.rank:
        Path(folder, FOUND).write_text(json.dumps(found))
    group.close()


def largest(host: Communicator, values: Times) -> Times:
    """The largest values of all ranks."""
    own = np.array(list(values.values()))
    result = np.empty_like(own)
    group = tuple(range(host.ranks))
    host.collective(CollectiveCall("all_reduce", "max", group, place="embedding"), own, result)
    return dict(zip(values, result.tolist(), strict=True))


def left_after(kind: str, group: Group) -> int:
    """The free bytes of the GPU once the group has communicated in a new way."""
    x = torch.zeros(1 << 10, device="cuda")
    exchange(kind, group, x, torch.empty_like(x), torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def shard_of(lookup: Lookup, rank: int, full: torch.Tensor) -> torch.Tensor:
    """One rank's part of the table between two rows of zeros."""
    rows, columns = lookup.shard
    if lookup.by_rows:
        part = full[rank * rows : (rank + 1) * rows]
    else:
        part = full[:, rank * columns : (rank + 1) * columns]
    zeros = torch.zeros(1, columns, dtype=full.dtype, device=full.device)
    return torch.cat([zeros, part, zeros])


def timed(lookup: Lookup, group: Group) -> float:
    """Median microseconds of one lookup, after a check against the full table."""
    full = torch.randn(lookup.rows, lookup.width, generator=seeded(), device="cuda")
    full = full.bfloat16()
    table = shard_of(lookup, group.rank, full)
    top, shift = table.shape[0] - 1, lookup.shift(group.rank)
    size = (REPEATED, lookup.padded)
    ids = torch.randint(0, lookup.rows, size, generator=seeded(), device="cuda").int()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # the table and the ids come from another stream

    def run(tokens: torch.Tensor) -> torch.Tensor:
        row = torch.add(tokens, shift).clamp_(0, top)
        return communicated(lookup, group, table.index_select(0, row), stream.cuda_stream)

    with torch.cuda.stream(stream):
        wanted = full[ids[0].long()]
        if lookup.scheme in ("RS", "CS"):
            wanted = wanted.chunk(lookup.ranks)[group.rank]
        if not torch.equal(run(ids[0]), wanted):
            raise RuntimeError(f"{lookup} is wrong on rank {group.rank}")
        del full, wanted
    return graph_us(lambda: [run(tokens) for tokens in ids], stream) / REPEATED


def seeded() -> torch.Generator:
    """The same numbers on every rank."""
    return torch.Generator("cuda").manual_seed(1)


def communicated(lookup: Lookup, group: Group, found: torch.Tensor, stream: int) -> torch.Tensor:
    """What the scheme does with the rows that a rank found."""
    group_size, (tokens, columns) = lookup.ranks, found.shape
    match lookup.scheme:
        case "RA":
            exchange("all_reduce", group, found, found, stream)
            return found
        case "RS":
            part = found.new_empty(tokens // group_size, columns)
            exchange("reduce_scatter", group, found, part, stream)
            return part
        case "CA":
            blocks = found.new_empty(group_size, tokens, columns)
            exchange("all_gather", group, found, blocks, stream)
        case _:
            blocks = found.new_empty(group_size, tokens // group_size, columns)
            exchange("all_to_all", group, found, blocks, stream)
    wide = blocks.view(torch.complex128)  # 16 bytes at a time, or the copy takes two times as long
    return wide.transpose(0, 1).reshape(-1, wide.shape[2] * group_size).view(found.dtype)
