"""The largest elements of few long rows, such as logits: many blocks share a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from irc.ir.core import Op, Value
from irc.ir.dims import product
from irc.ir.types import TensorType
from irc.ops import Argmax, Topk

from ..plan.template import Fused, Sizes, Template, fusion
from .body import ELEMENTS, REGISTERS, Body
from .kernels import BLOCK, launch, number

LONG = 1 << 14  # elements of a row, from which on it is shared
SLICE = 1 << 11  # elements of a block, at least
MOST = 64  # results per row
BLOCKS = 264  # of all rows, about
SCRATCH = {"float": "f32", "double": "f64", "int": "i32", "long long": "i64"}


@fusion(Argmax, Topk)
def split_select(op: Op, sizes: Sizes) -> Fused | str | None:
    """One launch for argmax or topk along the last dimension."""
    assert isinstance(op, Argmax | Topk)
    shape = op.x.type.shape
    count = op.k if isinstance(op, Topk) else 1
    if op.dim % len(shape) != len(shape) - 1 or number(shape[-1], sizes) < LONG:
        return None
    rows = number(product(shape[:-1]), sizes)
    parts = min(number(shape[-1], sizes) // SLICE, BLOCKS // max(rows, 1))
    if parts < 2 or rows < 1:
        return None
    if not isinstance(count, int) or count > MOST:
        return f"{op.opname} by many blocks per row: there are more than {MOST} results"
    return Fused((_template(op, count, rows, parts),), (op,))


def _template(op: Argmax | Topk, count: int, rows: int, parts: int) -> Template:
    """Every block finds the largest of its slice; the last one of a row, the largest of these."""
    body, kind, last = Body(_stored(op.x)), REGISTERS[op.x.type.dtype][0], len(op.results) - 1
    length = body.size(op.x.type.shape[-1])
    body.line("const ix row = blockIdx.y, parts = gridDim.x, part = row * parts + blockIdx.x;")
    body.line(f"const ix slice = ({length} + parts - 1) / parts, first = blockIdx.x * slice;")
    body.line(f"const ix until = first + slice < {length} ? first + slice : {length};")
    index = body.unflattened("row", op.x.type.shape[:-1])
    at = f"part * {count} + chosen"
    _rounds(
        body,
        (kind, count, "first", "until"),
        lambda: (body.element(op.x, (*index, "i")), "i"),
        [f"store(scratch0, {at}, best.value);", f"store(scratch1, {at}, (int)best.place);"],
    )
    body.lines += LAST.splitlines()
    at = f"row * {count} + chosen"
    _rounds(
        body,
        (kind, count, f"row * parts * {count}", f"(row + 1) * parts * {count}"),
        lambda: ("load(scratch0, i)", "load(scratch1, i)"),
        [
            f"store(out{n}, {at}, {'(int)best.place' if n == last else 'best.value'});"
            for n in range(last + 1)
        ],
    )
    candidates = (rows * parts * count,)
    return launch(
        "split_select",
        body,
        op.results,
        lambda _: (parts, rows, 1),
        operations=[op],
        block=BLOCK,
        scratch=[TensorType(SCRATCH[kind], candidates), TensorType("i32", candidates)],
        zeros=[TensorType("i32", (rows,))],
    )


# Only the block of a row that comes here last goes on.
LAST = """\
  __shared__ int is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd((int*)zeros0 + row, 1) == (int)parts - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  if (threadIdx.x == 0) store(zeros0, row, 0);
"""


def _rounds(
    body: Body,
    what: tuple[str, int, str, str],
    candidate: Callable[[], tuple[str, str]],
    keep: Sequence[str],
) -> None:
    """Statements for `best` of every round: the largest candidate behind that of the last one.

    `what`: the type of values, the number of rounds, the first candidate and the one behind the
    last; `candidate` is the value and place of candidate i. A thread looks at its candidates again
    only when one of them was the best. `keep` are the statements of one thread for a round.
    """
    kind, count, first, until = what
    behind = "here.place != last.place && Larger()(last, here).place != here.place"
    with body.block(""):
        body.line(f"Place<{kind}> mine = {{0, -1}}, last = {{0, -1}};")
        body.line("bool stale = true;")
        with body.block(f"for (int chosen = 0; chosen < {count}; ++chosen)"):
            with body.block("if (stale)"):
                body.line("mine.place = -1;")
                loop = f"ix i = {first} + threadIdx.x; i < {until}; i += blockDim.x"
                with body.block(f"for ({loop})"):
                    value, place = candidate()
                    body.line(f"const Place<{kind}> here = {{{value}, {place}}};")
                    body.line(f"if (here.place >= 0 && (last.place < 0 || ({behind})))")
                    body.line("  mine = Larger()(mine, here);")
            body.line(f"const Place<{kind}> best = block_reduce(mine, Larger());")
            body.line("stale = best.place < 0 || mine.place == best.place;")
            body.line("if (best.place >= 0) last = best;")
            with body.block("if (threadIdx.x == 0)"):
                body.lines += [f"      {line}" for line in keep]


def _stored(value: Value) -> list[Value]:
    """The values behind `value` that kernels write; the kernel computes what is in between."""
    found: dict[Value, None] = {}
    between: set[Op] = set()
    work = [value]
    while work:
        value = work.pop()
        op = value.producer
        if op is None or type(op) not in ELEMENTS:
            found[value] = None
        elif op not in between:
            between.add(op)
            work += op.operands
    return list(found)
