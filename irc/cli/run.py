"""`irc run`: runs an artifact on the arrays of an .npz file."""

from __future__ import annotations

import time
import zipfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..artifact.atomic import whole_file
from ..errors import Error
from .arguments import add_json, add_runtime, runtime_options
from .console import Progress, print_json, table
from .ranks import add_launcher, of_rank, over_ranks, shared

if TYPE_CHECKING:
    from ..backends.ranks.communicator import Communicator

EXAMPLES = """
  irc run build/two_tower --inputs in.npz --outputs out.npz
  irc run build/llama --inputs prompt.npz --outputs logits.npz     (input_ids alone will do)
  irc run build/llama_tp2 --inputs prompt.npz --outputs logits.npz --launcher mpi
  irc run model.irc --backend reference --inputs in.npz --outputs out.npz
"""

Arrays = dict[str, np.ndarray[Any, Any]]


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc run`."""
    add = parser.add_argument
    what = "an artifact folder, or module.irc, which --backend reference interprets on all ranks"
    add("source", metavar="DIR", help=what)
    add("--inputs", metavar="IN.npz", required=True, help="one array per input")
    what = "one array per output; bf16 and other floats that numpy lacks become f32"
    add("--outputs", metavar="OUT.npz", required=True, help=what)
    add_runtime(parser)
    add_launcher(parser)
    add_json(parser)


def run(args: Namespace) -> int:
    """Read, run, write: here, or in a process per rank, of which rank 0 reads and writes."""
    return over_ranks(args, _run)


def _run(args: Namespace, communicator: Communicator | None) -> int:
    from ..driver import open_model

    inputs = shared(communicator, lambda: read_arrays(Path(args.inputs)))
    with Progress() as progress:
        progress(f"loading {args.source}")
        options = runtime_options(args) | of_rank(communicator)
        model = open_model(args.artifact or args.source, args.backend, **options)
        progress(f"running {args.source}")
        began = time.perf_counter()
        outputs = model.run(inputs)
        seconds = time.perf_counter() - began
    if communicator is None or communicator.rank == 0:
        write_arrays(Path(args.outputs), outputs)
    shapes = {name: f"{array.dtype}{list(array.shape)}" for name, array in outputs.items()}
    if args.json:
        print_json({"outputs": shapes, "seconds": seconds, "file": args.outputs})
    else:
        print(table(shapes.items()))
    return 0


def read_arrays(path: Path) -> Arrays:
    """The arrays of an .npz file; an Error where it is none."""
    how = "write it with numpy.savez"
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise Error(f"{path} holds one array without a name, not an .npz archive; {how}")
            return {name: archive[name] for name in archive.files}
    except OSError as error:
        raise Error(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise Error(f"{path} is no .npz archive of plain arrays ({error}); {how}") from None


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Write an .npz file, completely or not at all."""
    plain = {
        name: array if array.dtype.isbuiltin == 1 else array.astype(np.float32)
        for name, array in arrays.items()
    }
    try:
        with whole_file(path) as file:
            np.savez(file, allow_pickle=False, **plain)
    except OSError as error:
        raise Error(f"cannot write {path}: {error.strerror or error}") from error
