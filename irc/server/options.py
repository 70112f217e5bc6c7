"""`ServeOptions`: what a person chooses of a server; the flags of `irc serve` derive from it."""

from __future__ import annotations

from dataclasses import dataclass

from ..pipeline.options import option

KEY = "IRC_API_KEY"


@dataclass(frozen=True)
class ServeOptions:
    """What a server accepts, and where."""

    host: str = option("127.0.0.1", "the address to listen on; 0.0.0.0: all", metavar="ADDRESS")
    port: int = option(8000, "0: any free one", metavar="N", least=0, most=65535)
    name: str = option("", "the model's name in requests (default: the folder's)", metavar="NAME")
    api_key: str = option("", f"a key that requests need (default: {KEY})", metavar="KEY")
    slots: int | None = option(None, "requests that run at once", metavar="N", least=1)
    piece: int = option(256, "tokens of a prompt that are read at once", metavar="N", least=1)
    queue: int = option(256, "requests that may wait for a slot", metavar="N", least=1)
    capacity: int = option(
        0, "most tokens of a prompt and its answer (default: as compiled)", metavar="N", least=0
    )
    cache_tokens: int = option(
        0,
        "tokens of all requests, of a model with --page-caches (default: slots * capacity)",
        metavar="N",
        least=0,
    )
    max_new_tokens: int = option(4096, "most tokens of an answer", metavar="N", least=1)
    max_body: int = option(4 << 20, "most bytes of a request", metavar="BYTES", least=1)
    timeout: int = option(
        600, "most seconds of a request, with its wait for a slot", metavar="SECONDS", least=1
    )
    grace: int = option(
        30, "at a signal, seconds for running requests to end", metavar="SECONDS", least=0
    )
