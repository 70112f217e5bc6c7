"""`irc bench kernels`: times the kernels that plans choose among, and keeps the fastest."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import Usage
from .console import Progress, print_json, table
from .sources import read_module

if TYPE_CHECKING:
    from ..backends.cuda.execute.kernel_times import Timed


def time_kernels(args: Namespace) -> int:
    """Print a row per launch with the fastest kernel, and write the choices."""
    from ..backends.cuda import tuning
    from ..backends.cuda.execute.kernel_times import time_kernels as times

    if not args.folders:
        raise Usage("expected the folders of artifacts", "irc bench kernels build/llama")
    dims = {name: typical for name, (_, typical, _) in args.dims.items()}
    with Progress() as progress:
        gpu, found = times(map(read_module, args.folders), dims, progress)
    chosen = {each.key: each.choice for each in found}
    if args.output:
        path = Path(args.output)
        tuning.write_shipped(path, chosen)
    else:
        kept = tuning.Choices(tuning.file_of_user(), gpu)
        kept.known |= chosen
        kept.save()
        path = kept.path
    if args.json:
        rows = [vars(each) | {"choice": each.choice} for each in found]
        print_json({"gpu": gpu, "launches": rows, "file": str(path)})
        return 0
    print(f"{gpu}: microseconds")
    print(table(map(_row, found), ["launch", "kernel", "us", "floor", "by the rules", "us"]))
    nowhere = "there is no folder of your own, so nothing is kept; give -o FILE"
    print(f"wrote {path}" if path else nowhere)
    return 0


def _row(timed: Timed) -> list[str]:
    rule, us = next(iter(timed.us.items()))
    times = f"{timed.us[timed.choice]:.2f}", f"{timed.floor_us:.2f}"
    return [timed.key, timed.choice, *times, rule, f"{us:.2f}"]
