"""Faults in the sources of kernels, each of which a test of that kernel has to see.

By default those of the review and some that are drawn; all where IRC_ALL_FAULTS is set.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest

from irc.backends.cuda.plan.regime import Target
from tests.cuda import (
    emulate,
    test_attention,
    test_decode_attention,
    test_experts,
    test_peer_memory,
    test_select,
    test_streaming,
)
from tests.cuda.streaming_cases import Case
from tests.fresh import fresh

RUNS = 16  # of which one has to fail: threads run in another order every time


class Fault(NamedTuple):
    """The kernel whose test has to see it, what is wrong, and the change of the source."""

    kernel: str
    what: str
    old: str
    new: str


def _streamed(case: Case, target: Target = test_streaming.SMALL) -> Callable[[], None]:
    return lambda: test_streaming.test_results_are_those_of_numpy(target, case)


TESTS: dict[str, Callable[[], None]] = {
    "one row": _streamed(Case("float", "bf16", "norm", 1, 37, 1024)),
    "long ring": _streamed(Case("float", "bf16", "norm", 1, 600, 1088)),
    "tiles": _streamed(Case("fp8", "bf16", "norm residual", 16, 70, 1536), test_streaming.NARROW),
    "units": _streamed(Case("float", "f16", "norm gated", 16, 101, 1024)),
    "rows of tiles": _streamed(Case("int8", "bf16", "", 3, 37, 384), test_streaming.OLD),
    "chunks": _streamed(Case("fp8", "bf16", "norm residual", 1, 70, 1552)),
    "chunks of units": _streamed(Case("int8", "f16", "gated bias", 5, 101, 512)),
    "chunks with groups": _streamed(Case("int4", "bf16", "", 3, 37, 1024)),
    "clusters": _streamed(Case("fp8", "bf16", "gated bias", 16, 70, 4096)),
    **{
        f"decode, {name}": partial(test_decode_attention.test_equal_to_the_reference, name)
        for name in test_decode_attention.CASES
    },
    "prefill": lambda: test_attention.test_the_reference_is_met(
        test_attention.EXAMPLES[1], "bf16", fresh()
    ),
    "heads": lambda: test_attention.test_attention_behind_rope_and_caches("grouped"),
    "experts": lambda: test_experts.test_tiles_of_experts(
        *(False, 13, 0, "gate=@gate {}", fresh())
    ),
    "groups": lambda: test_experts.test_tiles_of_experts(*(True, 13, 0, "gate=@gate {}", fresh())),
    "select": lambda: test_select.test_equal_to_the_reference("topk", True),
    "sums": lambda: test_peer_memory.test_sums(2, "bf16", test_peer_memory.ALONE),
    "ranks": lambda: test_peer_memory.test_products_of_one_row_have_the_bits_of_one_rank(4),
    "call ahead": test_peer_memory.test_a_rank_may_be_a_call_ahead,
}


def _faults(text: str) -> list[Fault]:
    """A fault has a line "kernel: what is wrong", and one "old => new" with \\n between lines."""
    lines = [line.strip().replace("\\n", "\n") for line in text.strip().splitlines()]
    heads = [head.partition(": ") for head in lines[::2]]
    changes = [change.partition(" =>") for change in lines[1::2]]
    return [
        Fault(kernel, what, old, new.strip())
        for (kernel, _, what), (old, _, new) in zip(heads, changes, strict=True)
    ]


REVIEW = _faults(r"""
one row: copies are not waited for
    barrier_wait(barriers + m * STAGES + next, parity); => ;
one row: x is not waited for
    wait_for_previous(); =>
long ring: the ring is not filled again
    if (threadIdx.x % 32 == 0 && left) copy(done); =>
tiles: rows beyond the matrix
    min(begin + in, end - 1) => (begin + in)
tiles: no barrier between squares and their sum
    if (NORM) __syncthreads();\n        else __syncwarp(); => __syncwarp();
units: no barrier between units
    if (BUFFERS == 1) __syncthreads(); =>
units: no barrier behind the sums
    parts, shared.factor);\n        __syncthreads(); => parts, shared.factor);
chunks: rows beyond the matrix
    (whole || unit + row + lane / 8 < end) => true
chunks: no barrier between squares and their sum
    = warp_sum(squares);\n        __syncthreads(); => = warp_sum(squares);
chunks of units: copies are not waited for
    wait_for_copies<STAGES - 1>(); =>
chunks of units: the sums of other warps are not waited for
    await_arrivals(&shared.shared[number]); =>
clusters: the sums of other blocks are not waited for
    if (!ALONE) await(&shared.received[number]); =>
clusters: no cluster_wait
    if (!ALONE) cluster_wait(); =>
decode, grouped: attention waits for nothing
    wait_for_previous(); => ;
decode, cluster of eight: no cluster_wait
    if (cluster) cluster_wait(); =>
decode, heads of length one: no barrier behind staging
    __syncthreads();\n    const int turned => const int turned
""")
MORE = _faults(r"""
long ring: another stage
    u32 place = at + 16 => u32 place = (at + COPY) % RING + 16
long ring: one parity
    next = 0, parity ^= 1; => next = 0;
one row: no fence behind barriers
    barriers_visible(); =>
long ring: a copy beyond the rows
    const int nbytes = min(COPY, left); => const int nbytes = COPY;
long ring: the last vectors of a chunk are not there
    first + LANES <= COUNT || lane => true || lane
ranks: chunks in another order
    value, (4 << i) + i) => value, (4 << (2 - i)) + (2 - i))
ranks: sums of ranks in another order
    int r = 0; r + step < RANKS; r += 2 * step => int r = 0; r == 0; r += 2 * step
tiles: x is measured early
    load_gain();\n    wait_for_previous(); => load_gain(), input.measure(), wait_for_previous();
rows of tiles: columns beyond the matrix
    EVEN || piece_of(round, d) < PIECES => true
rows of tiles: rows beyond x
    min(token, rows - 1) => token
chunks: x is read early
    wait_for_previous();\n    input.stage(); => input.stage();\n    wait_for_previous();
chunks: columns beyond the matrix
    lane % 8 * 16 < ROW_BYTES; => true;
chunks with groups: rows beyond x
    if (from + t < rows) each => each
chunks with groups: the other scale of a word
    now, piece) % (4 / sizeof(S)); => now, piece) * 0;
clusters: the slot of another unit
    number % SLOTS][rank] => 0][rank]
decode, cluster of eight: another block of the cluster
    &s.arrived, i / SHARE, value => &s.arrived, item.split, value
decode, cluster of eight: not all bytes are expected
    sizeof s.inbox + sizeof s.inbox_ends => sizeof s.inbox
decode, sinks of long: zeros are not left zero
    if (threadIdx.x == 0) a.arrived[head] = 0; =>
decode, four tokens of a long cache: no turns of warps
    if (round) __syncthreads(); =>
decode, five tokens in parts: every query sees what the last one sees
    CAUSAL && at + 1 < item.limit ? at + 1 => false ? 0
decode, sinks of long: no fence before the arrival
    __threadfence();\n    __syncthreads();\n    if (thr => __syncthreads();\n    if (thr
prefill: copies are not waited for
    wait_for_copies<0>(); =>
prefill: no barrier behind copies
    finish_copies();\n        __syncthreads(); => finish_copies();
prefill: the stage that is read is filled
    next_tiles(j + KEYS, stage ^ 1); => next_tiles(j + KEYS, stage);
experts: one group of copies too few
    wait_for_copies<STAGES - 2>(); => wait_for_copies<STAGES - 1>();
experts: rows beyond the weights
    (u64)min(first + row % COLUMNS, N - 1) => (u64)(first + row % COLUMNS)
groups: a stage is multiplied before it is there
    barrier_wait(s.full + step % STAGES, step / STAGES % 2); =>
groups: rows beyond the tile
    if (row < rows && => if (
experts: no barrier behind parts
    = all[i];\n    __syncthreads(); => = all[i];
call ahead: calls are not counted
    peers->calls[blockIdx.x] = number + 1; => ;
sums: words keep what came
    Words{NOT_THERE, NOT_THERE, NOT_THERE, NOT_THERE}); => found[r]);
select: no barrier behind cleared bins
    bins[b] = 0;\n        __syncthreads(); => bins[b] = 0;
heads: angles are not waited for
    FACTOR);\n        }\n        __syncthreads(); => FACTOR);\n        }
""")
ALL = "IRC_ALL_FAULTS" in os.environ
DRAWN = MORE if ALL else [MORE[i] for i in fresh().choice(len(MORE), 4, replace=False)]


SEEN, MISSED, ABSENT, BROKEN = range(4)


def _outcome(fault: Fault) -> int:
    """Whether the test fails with the fault."""
    try:
        for _ in range(RUNS):
            signal.alarm(120)  # a kernel with a fault may never end
            TESTS[fault.kernel]()
    except AssertionError:
        return SEEN if emulate.CHANGED else ABSENT
    return MISSED if emulate.CHANGED else ABSENT


@pytest.mark.parametrize("fault", [*REVIEW, *DRAWN], ids=lambda fault: fault.what)
def test_a_fault_is_seen(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, whose memory the fault may overwrite."""
    TESTS[fault.kernel]()
    monkeypatch.setitem(emulate.CHANGES, fault.old, fault.new)
    monkeypatch.setattr(test_peer_memory, "SOON", 2)
    process = os.fork()
    if not process:
        status = BROKEN
        try:
            status = _outcome(fault)
        finally:
            os._exit(status)
    _, status = os.waitpid(process, 0)
    assert status != ABSENT << 8, f"{fault.what}: {fault.old!r} is not in the sources any more"
    assert status != BROKEN << 8, f"{fault.what}: another error than of the test"
    assert status != MISSED << 8, f"{fault.what}: the test of the kernel does not see it"
