"""The algorithms of cuBLASLt that were the fastest, kept with other choices."""

from __future__ import annotations

from contextlib import suppress

from irc.backends.cuda.tuning import Choices

_SIZE = 64  # bytes of an algorithm


class Algorithms(Choices):
    """Product -> algorithm, for one GPU model and one version of cuBLAS."""

    def __getitem__(self, product: str) -> bytes | None:
        with suppress(ValueError):
            found = bytes.fromhex(self.known.get(product, ""))
            return found if len(found) == _SIZE else None
        return None

    def __setitem__(self, product: str, algorithm: bytes) -> None:
        self.known[product] = algorithm.hex()
