"""Four ways to look up a sharded embedding: the cost model beside NCCL on GPUs.

    python -m benchmarks.embedding_schemes                 the model beside the kept measurements
    python -m benchmarks.embedding_schemes --ranks 2,4     measured anew on that many GPUs

The schemes, on a table of V rows and H columns over N ranks: RA, every rank has V/N rows, and an
all_reduce adds up what each found; RS, the same with a reduce_scatter over the tokens; CA, every
rank has H/N columns, and an all_gather joins them; CS, the same with an all_to_all, after which
each rank has its tokens. A zero row at either end of a shard catches the ids of other ranks.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.process import run_ranks
from irc.analysis.communication import messages
from irc.analysis.cost import cost_of, operations
from irc.analysis.sizes import LocalSizes
from irc.analysis.topology import Topology
from irc.analysis.topology_file import default_topology, read_topology
from irc.ir.core import Module
from irc.text import parse_module

SCHEMES = ("RA", "CA", "RS", "CS")
SCATTERED = ("RS", "CS")  # the result is sharded over tokens
KEPT = Path(__file__).with_name("embedding_schemes.json")
FOUND = "found.json"  # what the ranks of embedding_gpu.py write
ROWS, WIDTH, TOKENS = 128256, 4096, (1, 64, 8192)


@dataclass(frozen=True)
class Lookup:
    """One lookup of `tokens` ids by a scheme over two `ranks` or more; sizes divide by them."""

    scheme: str
    ranks: int
    tokens: int
    rows: int = ROWS
    width: int = WIDTH
    dtype: str = "bf16"

    @property
    def by_rows(self) -> bool:
        """Whether the table is sharded by rows rather than columns."""
        return self.scheme.startswith("R")

    @property
    def shard(self) -> tuple[int, int]:
        """One rank's table without the zero rows."""
        if self.by_rows:
            return self.rows // self.ranks, self.width
        return self.rows, self.width // self.ranks

    @property
    def padded(self) -> int:
        """The tokens, padded to equal shards."""
        unit = self.ranks if self.scheme in SCATTERED else 1
        return -(-self.tokens // unit) * unit

    def shift(self, rank: int) -> int:
        """The offset added to an id to index the shard of a rank."""
        return 1 - (rank * self.shard[0] if self.by_rows else 0)


def module_of(lookup: Lookup) -> Module:
    """One rank's program: (ids i32 [tokens], shift i32 []) to the rows found."""
    (rows, columns), tokens = lookup.shard, lookup.padded
    size, kind, own = lookup.ranks, lookup.dtype, "{varies tp}"
    share = tokens // size
    match lookup.scheme:
        case "RA":
            result = f"{kind}[{tokens}, {columns}]"
            lines = [f'%y = all_reduce %found {{axis="tp", group_size={size}}} : {result}']
        case "RS":
            result = f"{kind}[{share}, {columns}] of {kind}[{tokens}@tp, {columns}]"
            call = f'reduce_scatter %found {{axis="tp", dim=0, group_size={size}}}'
            lines = [f"%y = {call} : {result}"]
        case "CA":
            result = f"{kind}[{tokens}, {size * columns}]"
            call = f'all_gather %found {{axis="tp", dim=0, group_size={size}}}'
            lines = [f"%all = {call} : {kind}[{size * tokens}, {columns}]"]
            lines += merged(kind, size, tokens, columns, "")
        case _:
            result = f"{kind}[{share}, {size * columns}]{own}"
            call = f'all_to_all %found {{axis="tp", split=0, concat=0, group_size={size}}}'
            lines = [f"%all = {call} : {kind}[{tokens}, {columns}]{own}"]
            lines += merged(kind, size, share, columns, own)
    body = "\n    ".join(lines)
    return parse_module(f"""module @lookup_{lookup.scheme} local mesh(tp={size}) {{
  weight @table : {kind}[{rows + 2}, {columns}]{own} = unbound("table")
  func @forward(%ids: i32[{tokens}], %shift: i32[]{own}) -> (rows: {result}) {{
    %offset = add %ids, %shift : i32[{tokens}]{own}
    %row = clip %offset {{low=0, high={rows + 1}}} : i32[{tokens}]{own}
    %found = gather @table, %row : {kind}[{tokens}, {columns}]{own}
    {body}
    return %y
  }}
}}""")


def merged(kind: str, size: int, tokens: int, columns: int, own: str) -> list[str]:
    """Blocks of columns %all [size * tokens, columns] concatenated: %y [tokens, size * columns]."""
    blocks, turned = f"[{size}, {tokens}, {columns}]", f"[{tokens}, {size}, {columns}]"
    joined = f"[{tokens}, {size * columns}]"
    return [
        f"%blocks = reshape %all {{shape={blocks}}} : {kind}{blocks}{own}",
        f"%turned = transpose %blocks {{order=[1, 0, 2]}} : {kind}{turned}{own}",
        f"%y = reshape %turned {{shape={joined}}} : {kind}{joined}{own}",
    ]


@dataclass(frozen=True)
class Forecast:
    """The cost of a lookup by the model: bytes sent per rank, microseconds."""

    sent: float
    collective_us: float
    kernels_us: float

    @property
    def us(self) -> float:
        return self.collective_us + self.kernels_us


def forecast(lookup: Lookup, topology: Topology) -> Forecast:
    """The cost model applied to the program of a lookup."""
    module = module_of(lookup)
    sizes = LocalSizes(module.mesh, {})
    found = messages(module.main, sizes, topology)
    costs = [cost_of(op, sizes) for op in operations(module.main)]
    return Forecast(
        sum(message.sent for message in found),
        sum(message.us for message in found),
        sum(cost.time(topology.device) for cost in costs),
    )


def lookups(ranks: int) -> list[Lookup]:
    """Every scheme at every number of tokens."""
    return [Lookup(scheme, ranks, tokens) for tokens in TOKENS for scheme in SCHEMES]


def table(ranks: int, topology: Topology, measured: dict[str, float]) -> list[str]:
    """Lines of Markdown: a row per number of tokens and scheme, the order by either."""
    lines = [
        f"| {ranks} GPUs, tokens | scheme | bytes sent per rank | model µs | measured µs | off |",
        "|---|---|---|---|---|---|",
    ]
    for tokens in TOKENS:
        group = [lookup for lookup in lookups(ranks) if lookup.tokens == tokens]
        for lookup in group:
            said = forecast(lookup, topology)
            us = measured.get(f"{lookup.scheme} {tokens}")
            lines.append(
                f"| {tokens} | {lookup.scheme} | {said.sent:,.0f} | {said.us:.1f} | "
                + (f"{us:.1f} | {said.us / us - 1:+.0%} |" if us else "- | - |")
            )
        lines.append(f"| | order | | {order(group, topology)} | {ranking(group, measured)} | |")
    return lines


def order(group: Sequence[Lookup], topology: Topology) -> str:
    """The schemes from the fastest to the slowest by the model."""
    ranked = sorted(group, key=lambda lookup: forecast(lookup, topology).us)
    return " < ".join(lookup.scheme for lookup in ranked)


def ranking(group: Sequence[Lookup], measured: dict[str, float]) -> str:
    """The schemes from the fastest to the slowest as measured."""
    if not measured:
        return "-"
    ranked = sorted(group, key=lambda each: measured[f"{each.scheme} {each.tokens}"])
    return " < ".join(lookup.scheme for lookup in ranked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", help="measure on so many GPUs, as in 2,4 (needs torch)")
    parser.add_argument("--topology", help="a topology file (the one that irc brings)")
    parser.add_argument("-o", "--output", type=Path, help="where new measurements go, as JSON")
    options = parser.parse_args()
    topology = read_topology(options.topology) if options.topology else default_topology()
    results = measured_on(options.ranks) if options.ranks else kept()
    print(f"{results['device']}, {results['date']}\n")
    for ranks, measured in results["us"].items():
        print("\n".join(table(int(ranks), topology, measured)), end="\n\n")
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def measured_on(ranks: str) -> dict[str, Any]:
    """Measurements on the GPUs of this machine, by the medians of the slowest rank."""
    device, memory, times = "", {}, dict[str, Any]()
    for count in ranks.split(","):
        with TemporaryDirectory() as folder:
            run_ranks(int(count), "benchmarks.embedding_gpu", folder)
            device, times[count], memory = json.loads(Path(folder, FOUND).read_text())
    return {
        "date": f"{datetime.date.today()}",
        "device": device,
        "communicator_bytes": memory,
        "us": times,
    }


def kept() -> dict[str, Any]:
    """The measurements in this folder."""
    return json.loads(KEPT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
