"""`irc run`: runs an artifact on given or random arrays, and compares the results."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..npz import read_npz
from ..report import Report, paint, table
from .arguments import Usage, add_json, add_runtime, real_number, runtime_options
from .arrays import add_inputs, differences, given_inputs, plain, write_arrays
from .console import Progress, answer
from .ranks import add_launcher, of_rank, over_ranks, shared

if TYPE_CHECKING:
    from ..backends.ranks.communicator import Communicator
    from ..npz import Arrays
    from .arrays import Difference

EXAMPLES = """
  irc run build/two_tower --inputs in.npz --outputs out.npz
  irc run build/llama --inputs prompt.npz --outputs logits.npz     (input_ids alone will do)
  irc run build/llama_tp2 --inputs prompt.npz --outputs logits.npz --launcher mpi
  irc run model.irc --backend reference --inputs in.npz --outputs out.npz
  irc run build/bf16 --random 0 --compare build/f32 --rtol 2e-2
  irc run build/llama --inputs in.npz --compare expected.npz
"""


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc run`."""
    add = parser.add_argument
    what = "an artifact folder, or module.irc, which --backend reference interprets on all ranks"
    add("source", metavar="DIR", help=what)
    add_inputs(parser, required=True)
    what = "write an array per output (bf16 and the like as f32); else their shapes are printed"
    add("--outputs", metavar="OUT.npz", help=what)
    what = (
        "compare with another artifact, a module.irc (in numpy) or an .npz; status 1 if it differs"
    )
    add("--compare", metavar="B", help=what)
    what = "allowed difference relative to the number of B (default: 1e-3)"
    add("--rtol", metavar="X", type=real_number, help=what)
    add("--atol", metavar="X", type=real_number, help="allowed difference besides (default: 1e-4)")
    add_runtime(parser)
    add_launcher(parser)
    add_json(parser)


def run(args: Namespace) -> int:
    """Read, run, write: here, or in a process per rank, of which rank 0 reads and writes."""
    hint = "irc run --help lists the options"
    if args.compare is None and (args.rtol, args.atol) != (None, None):
        raise Usage("--rtol and --atol are for --compare B", hint)
    return over_ranks(args, _run)


def _run(args: Namespace, communicator: Communicator | None) -> int:
    from ..driver import open_model

    inputs = shared(communicator, lambda: given_inputs(args))
    with Progress() as progress:
        progress(f"loading {args.source}")
        options = runtime_options(args) | of_rank(communicator)
        model = open_model(args.artifact or args.source, args.backend, **options)
        progress(f"running {args.source}")
        began = time.perf_counter()
        outputs = model.run(inputs)
        seconds = time.perf_counter() - began
        if communicator is not None and communicator.rank != 0:
            return 0
        compared = _compared(args, inputs, outputs, progress) if args.compare else []
    if args.outputs is not None:
        write_arrays(Path(args.outputs), outputs)
    shapes = {name: f"{array.dtype}{list(array.shape)}" for name, array in outputs.items()}
    facts = {"outputs": shapes, "seconds": seconds, "file": args.outputs}
    facts |= {"differences": [asdict(row) for row in compared]} if args.compare else {}
    text = table(map(_cells, compared), _COLUMNS) if args.compare else table(shapes.items())
    return answer(args, Report(facts, [text], int(not all(row.ok for row in compared))))


def _compared(
    args: Namespace, inputs: Arrays, outputs: Arrays, progress: Progress
) -> list[Difference]:
    """The differences of the outputs to those of B."""
    from ..driver import open_model

    place = Path(args.compare)
    if place.suffix == ".npz":
        wanted = read_npz(place)
    else:
        progress(f"running {place}")
        wanted = open_model(place, "reference" if place.is_file() else None).run(inputs)
    rtol = 1e-3 if args.rtol is None else args.rtol
    atol = 1e-4 if args.atol is None else args.atol
    return differences(plain(outputs), plain(wanted), rtol, atol)


_COLUMNS = ("output", "elements that differ", "largest difference", "relative to B", "")


def _cells(row: Difference) -> list[str]:
    status = paint("ok", "green") if row.ok else paint("differs", "red")
    if row.problem:
        return [row.name, row.problem, "", "", status]
    counts = f"{row.wrong} of {row.size}"
    return [row.name, counts, f"{row.largest:.3g}", f"{row.relative:.3g}", status]
