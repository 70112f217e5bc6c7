"""What was the fastest on a GPU, as text per key, in a file of the user and in files of irc.

Kernels are timed by `irc bench kernels`, algorithms of cuBLASLt at the first plan of a shape.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from irc.artifact.atomic import whole_file
from irc.artifact.locks import locked
from irc.backends.cuda.driver import Gpu
from irc.backends.ranks.communicator import Communicator
from irc.errors import Error, printable
from irc.files import sharing_problem
from irc.schema import parsed, read_json

SHIPPED = Path(__file__).parent / "tuned"  # sm_90.json: choices of kernels for a capability
_BETTER = 0.98  # of the time of the first; what is not better gives way to it

_Table = dict[str, dict[str, str]]


class Choices:
    """Key -> choice, valid for one machine: a GPU model, and what else its name says.

    `path` is JSON shared by all machines; None keeps nothing. A damaged file is replaced.
    """

    def __init__(self, path: Path | None = None, machine: str = "") -> None:
        self.path, self.machine = path, machine
        self.known = self._read().get(machine, {})

    def save(self) -> None:
        """Add the choices to the file; a folder that cannot be written stays as it is."""
        if self.path is None:
            return
        with suppress(OSError):
            self.path.parent.mkdir(0o700, parents=True, exist_ok=True)
            with locked(self.path.with_name(f"{self.path.name}.lock")):
                table = self._read()
                table[self.machine] = table.get(self.machine, {}) | self.known
                with whole_file(self.path) as file:
                    file.write(_text(table))

    def agree(self, host: Communicator) -> None:
        """Take the choices of the lowest rank that has one; every rank calls this."""
        self.known = agreed(self.known, host)

    def _read(self) -> _Table:
        if self.path is None or not self.path.exists():
            return {}
        try:
            if problem := sharing_problem(self.path):
                raise Error(problem)
            return read_json(self.path, _Table)
        except Error as error:
            text = printable(error.message.partition(";")[0])
            print(f"warning: {text}; choices are made again", file=sys.stderr, flush=True)
            return {}


def agreed(known: Mapping[str, str], host: Communicator) -> dict[str, str]:
    """The choices of all ranks, of the lowest where they differ: so ranks that compute the same
    get the same numbers. Every rank calls this."""
    own, everyone = _text(known), range(host.ranks)
    merged: dict[str, str] = {}
    for rank in everyone:
        merged = parsed(host.broadcast(own if rank == host.rank else b"", rank, everyone)) | merged
    return merged


_used: list[Mapping[str, str]] = []


def used() -> Mapping[str, str]:
    """The choices of kernels for the GPU of this process; for an H200 until `use` is called."""
    if not _used:
        use(shipped(90))
    return _used[0]


def use(known: Mapping[str, str]) -> None:
    """Take these choices from now on."""
    _used[:] = [known]


def use_for(gpu: Gpu) -> None:
    """Take the choices that irc and this user have for a GPU; those of the user go before."""
    use(shipped(gpu.capability) | Choices(file_of_user(), str(gpu)).known)


def file_of_user() -> Path | None:
    """The file of choices in the user's cache; None without a folder that only the user writes."""
    from irc.backends.cuda.execute.compile import CHOICES, default_folder, unshared

    folder = unshared(default_folder())
    return None if folder is None else folder / CHOICES


def shipped(capability: int) -> dict[str, str]:
    """The choices that irc has for a compute capability."""
    path = SHIPPED / f"sm_{capability}.json"
    return read_json(path, dict[str, str]) if path.exists() else {}


def write_shipped(path: Path, known: Mapping[str, str]) -> None:
    """Write choices as a file of the folder `tuned`."""
    with whole_file(path) as file:
        file.write(_text(known))


def fastest(times: Mapping[str, float]) -> str:
    """The name with the least time; the first one where no other is clearly better."""
    first, best = next(iter(times)), min(times, key=times.__getitem__)
    return best if times[best] < _BETTER * times[first] else first


def _text(table: Mapping[str, object]) -> bytes:
    return json.dumps(table, indent=1, sort_keys=True).encode() + b"\n"
