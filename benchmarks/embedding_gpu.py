"""The lookups of benchmarks/embedding_schemes.py on GPUs: torch for arrays, NCCL under a graph."""

# pyright: reportMissingImports=false

from __future__ import annotations

import multiprocessing
from typing import Any

import torch

from benchmarks.embedding_schemes import Lookup, lookups
from benchmarks.gpu_timing import graph_us
from irc.backends.cuda.group import Group, nccl_version, unique_id

REPEATED = 10  # lookups in one graph, each of other ids
PATIENCE = 200.0


Times = dict[str, float]


def measure(ranks: int) -> tuple[str, Times, Times]:
    """(the GPUs, microseconds by "scheme tokens", bytes that NCCL took by collective).

    The microseconds are medians, those of the slowest rank.
    """
    context = multiprocessing.get_context("spawn")
    name = unique_id()
    pipes = [context.Pipe() for _ in range(ranks)]
    workers = [
        context.Process(target=work, args=(rank, ranks, name, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()
    try:
        found = [receive(ours) for ours, _ in pipes]
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
    about = f"{ranks} x {torch.cuda.get_device_name(0)}, NCCL {nccl_version()}"
    times, memory = (
        {key: max(each[part][key] for each in found) for key in found[0][part]} for part in (0, 1)
    )
    return f"{about}, torch {torch.__version__}", times, memory


def receive(end: Any) -> tuple[Times, Times]:
    """What one rank found."""
    if not end.poll(PATIENCE):
        raise RuntimeError(f"a rank did not answer within {PATIENCE:.0f} seconds")
    answer = end.recv()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return answer


def work(rank: int, ranks: int, name: bytes, parent: Any) -> None:
    """One rank's process."""
    import traceback

    try:
        torch.cuda.set_device(rank)
        torch.zeros(1, device="cuda")
        free, _ = torch.cuda.mem_get_info()
        group = Group(name, rank, ranks, meeting=PATIENCE / 2)
        taken = {k: float(free - left_after(k, group)) for k in ("all_reduce", "all_to_all")}
        times = {f"{each.scheme} {each.tokens}": timed(each, group) for each in lookups(ranks)}
        parent.send((times, taken))
        group.close()
    except Exception:
        parent.send(traceback.format_exc())


def left_after(kind: str, group: Group) -> int:
    """The free bytes of the GPU once the group has communicated in a new way."""
    x = torch.zeros(1 << 10, device="cuda")
    group.enqueue(kind, x, torch.empty_like(x), torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def shard_of(lookup: Lookup, rank: int, whole: torch.Tensor) -> torch.Tensor:
    """One rank's part of the table between two rows of zeros."""
    rows, columns = lookup.shard
    if lookup.by_rows:
        part = whole[rank * rows : (rank + 1) * rows]
    else:
        part = whole[:, rank * columns : (rank + 1) * columns]
    zeros = torch.zeros(1, columns, dtype=whole.dtype, device=whole.device)
    return torch.cat([zeros, part, zeros])


def timed(lookup: Lookup, group: Group) -> float:
    """Median microseconds of one lookup, after a check against the whole table."""
    whole = torch.randn(lookup.rows, lookup.width, generator=seeded(), device="cuda")
    whole = whole.bfloat16()
    table = shard_of(lookup, group.rank, whole)
    top, shift = table.shape[0] - 1, lookup.shift(group.rank)
    size = (REPEATED, lookup.padded)
    ids = torch.randint(0, lookup.rows, size, generator=seeded(), device="cuda").int()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # the table and the ids come from another stream

    def run(tokens: torch.Tensor) -> torch.Tensor:
        row = torch.add(tokens, shift).clamp_(0, top)
        return exchanged(lookup, group, table.index_select(0, row), stream.cuda_stream)

    with torch.cuda.stream(stream):
        wanted = whole[ids[0].long()]
        if lookup.scheme in ("RS", "CS"):
            wanted = wanted.chunk(lookup.ranks)[group.rank]
        if not torch.equal(run(ids[0]), wanted):
            raise RuntimeError(f"{lookup} is wrong on rank {group.rank}")
        del whole, wanted
    return graph_us(lambda: [run(tokens) for tokens in ids], stream) / REPEATED


def seeded() -> torch.Generator:
    """The same numbers on every rank."""
    return torch.Generator("cuda").manual_seed(1)


def exchanged(lookup: Lookup, group: Group, found: torch.Tensor, stream: int) -> torch.Tensor:
    """What the scheme does with the rows that a rank found."""
    ways, (tokens, columns) = lookup.ranks, found.shape
    match lookup.scheme:
        case "RA":
            group.enqueue("all_reduce", found, found, stream)
            return found
        case "RS":
            part = found.new_empty(tokens // ways, columns)
            group.enqueue("reduce_scatter", found, part, stream)
            return part
        case "CA":
            blocks = found.new_empty(ways, tokens, columns)
            group.enqueue("all_gather", found, blocks, stream)
        case _:
            blocks = found.new_empty(ways, tokens // ways, columns)
            group.enqueue("all_to_all", found, blocks, stream)
    wide = blocks.view(torch.complex128)  # 16 bytes at a time, or the copy takes two times as long
    return wide.transpose(0, 1).reshape(-1, wide.shape[2] * ways).view(found.dtype)
