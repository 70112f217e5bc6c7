"""The algorithms of cuBLASLt that were the fastest, kept in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from irc.artifact.atomic import whole_file
from irc.artifact.locks import locked
from irc.backends.ranks.communicator import Communicator
from irc.errors import Error
from irc.schema import parsed, read_json

_Table = dict[str, dict[str, str]]


class Algorithms:
    """Product -> algorithm, 64 bytes that are valid for one GPU model and one version of cuBLAS.

    `path` is JSON shared by all of these; None keeps nothing. A damaged file is replaced.
    """

    def __init__(self, path: Path | None = None, machine: str = "") -> None:
        self.path, self.machine = path, machine
        self._known = self._read().get(machine, {})

    def __getitem__(self, product: str) -> bytes | None:
        return bytes.fromhex(self._known.get(product, "")) or None

    def __setitem__(self, product: str, algorithm: bytes) -> None:
        self._known[product] = algorithm.hex()

    def save(self) -> None:
        """Add the algorithms to the file; a folder that cannot be written stays as it is."""
        if self.path is None:
            return
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path.with_name(f"{self.path.name}.lock")):
                table = self._read()
                table[self.machine] = table.get(self.machine, {}) | self._known
                self._write(table)

    def agree(self, host: Communicator) -> None:
        """Use the algorithms of the lowest rank that has one, so that ranks that compute the same
        product get the same numbers; every rank calls this."""
        own, everyone = _text(self._known), range(host.ranks)
        merged: dict[str, str] = {}
        for rank in everyone:
            found = parsed(host.broadcast(own if rank == host.rank else b"", rank, everyone))
            merged = found | merged
        self._known = merged

    def _read(self) -> _Table:
        if self.path is None or not self.path.exists():
            return {}
        with suppress(Error):
            table = read_json(self.path, _Table)
            if all(map(_is_hex, (text for row in table.values() for text in row.values()))):
                return table
        return {}

    def _write(self, table: _Table) -> None:
        assert self.path is not None
        with whole_file(self.path) as file:
            file.write(_text(table))


def _text(table: Mapping[str, object]) -> bytes:
    return json.dumps(table, indent=1, sort_keys=True).encode()


def _is_hex(text: str) -> bool:
    with suppress(ValueError):
        return len(bytes.fromhex(text)) == 64
    return False
