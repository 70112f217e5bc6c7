"""The kernel of `sample`: a cluster of blocks draws the token of a row."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import reduce

from irc.ir.core import Value
from irc.ir.dims import DimLike
from irc.ops import Sample
from irc.ops.sample import LARGEST, LOG2_E, NEVER, POWERS, STEPS

from ..plan.regime import Regime
from ..plan.template import Template, kernels_of
from .body import Body
from .files import constants, helpers
from .kernels import launch, number, pack_size
from .select import SELECT, reader

CODE = helpers("warp.cuh", "sample.cuh")
CLUSTER = 8  # blocks of a row, from compute capability 9.0 on
THREADS = 1024  # of a block, at most
FEW = 1 << 14  # tokens of a row, up to which it has one block


@kernels_of(Sample)
def sample(op: Sample, regime: Regime) -> list[Template]:
    """The token of every row."""
    rows, size = op.logits.type.shape
    assert isinstance(size, int)
    several = size > FEW and regime.target.capability >= 90
    return [_drawn(op, regime.stored, rows, size, CLUSTER if several else 1)]


def _drawn(
    op: Sample, stored: Collection[Value], rows: DimLike, size: int, cluster: int
) -> Template:
    body, pack = Body(stored), pack_size([op.logits])
    if reader(body, op.logits, ("row",), 1, pack, "float"):
        body, pack = Body(stored), 1
        reader(body, op.logits, ("row",), 1, pack, "float")
    body.lines.insert(0, "const ix row = blockIdx.y;")
    packs = size // pack
    threads = min(THREADS, -(-packs // 32) * 32)
    values = [body.element(value, ("row",)) for value in op.operands[1:]]
    settings = ", ".join([*values[:4], *(f"(u64)(long long){value}" for value in values[4:])])
    body.line(f"const Settings settings = {{{settings}}};")
    thread_packs = -(-packs // (cluster * threads))
    body.line(f"const int token = sampled<{pack}, {thread_packs}>(settings, {packs}, read);")
    body.line("if (token >= 0) store(out0, row, token);")
    template = launch(
        *("sample", body, op.results, lambda sizes: (cluster, max(1, number(rows, sizes)), 1)),
        operations=[op],
        block=threads,
        helpers=f"{SELECT}{_constants(cluster, threads)}{CODE}",
    )
    return replace(template, cluster=cluster)


def _constants(cluster: int, threads: int) -> str:
    """What the code is compiled for, and the numbers of the definition."""
    numbers = {"CLUSTER": cluster, "THREADS": threads, "STEPS": STEPS, "LOG2_E": LOG2_E}
    power = reduce(lambda sum, x: f"add(mul({sum}, y), {x!r}f)", POWERS[-2::-1], f"{POWERS[-1]!r}f")
    return f"""{constants(numbers)}constexpr u32 NEVER = {NEVER}u, LARGEST = {LARGEST}u;
INLINE float power_of_half(float y) {{ return add(mul({power}, y), 1.0f); }}
"""
