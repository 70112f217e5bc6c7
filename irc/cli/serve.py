"""`irc serve`: answers requests over HTTP by a compiled model, as OpenAI's API."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import Error, installs
from ..pipeline.options import options_of, settings_of
from ..server.options import KEY, ServeOptions
from .arguments import add_runtime, add_settings, given_settings, runtime_options
from .console import Progress, warn
from .crash import crash_report
from .ranks import add_launcher, of_rank, over_ranks

if TYPE_CHECKING:
    from socket import socket

    from ..backends.ranks.communicator import Communicator
    from ..generation.model import Model

_LOCAL = ("127.0.0.1", "::1", "localhost")
EXAMPLES = """
  irc serve build/tiny_llama
  irc serve build/llama --host 0.0.0.0 --slots 32 --max-new-tokens 1000
  curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" \\
    -d '{"prompt": "Beautiful is", "max_tokens": 20}'
"""


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc serve`."""
    parser.add_argument("source", metavar="DIR", help="an artifact folder")
    add_settings(parser, settings_of(ServeOptions).values())
    add_runtime(parser)
    add_launcher(parser)


def run(args: Namespace) -> int:
    """Serve until a signal ends it."""
    args.options = _options(args)
    return over_ranks(args, _run, grace_seconds=args.options.grace)


def _options(args: Namespace) -> ServeOptions:
    usual = {"api_key": os.environ.get(KEY), "name": Path(args.source).resolve().name}
    given = given_settings(args, settings_of(ServeOptions))
    return options_of(ServeOptions, usual | given, "irc serve")


def _run(args: Namespace, communicator: Communicator | None) -> int:
    try:
        from ..server.listen import listen
    except ModuleNotFoundError as error:
        raise Error(f"irc serve needs the package {error.name}: {installs('serve')}") from None
    from ..server.ranks import LeadingProgram, follow

    if communicator is not None and communicator.rank != 0:
        follow(_loaded(args, communicator).program, communicator)
        return 0
    listening = listen(args.options.host, args.options.port)
    model, leading = _loaded(args, communicator), None
    if communicator is not None:
        model.program = leading = LeadingProgram(model.program, communicator)
    _serve(args, model, listening)
    if leading is not None:
        leading.end()
    return 0


def _loaded(args: Namespace, communicator: Communicator | None) -> Model:
    from ..driver import open_model

    with Progress() as progress:
        progress(f"loading {args.source}")
        options = runtime_options(args) | of_rank(communicator)
        return open_model(args.artifact or args.source, args.backend, **options)


def _serve(args: Namespace, model: Model, listening: socket) -> None:
    from ..generation.embeddings import gives_embeddings
    from ..server.app import Server
    from ..server.engine import Engine
    from ..server.listen import run

    options: ServeOptions = args.options
    assert model.tokenizer  # an Error where there is none
    engine = None
    if not gives_embeddings(model):
        engine = Engine(
            model,
            options.slots,
            options.piece,
            options.queue,
            options.capacity,
            options.cache_tokens,
        )
        engine.start()
    report = partial(crash_report, words=args.process.argv)
    server = Server(model, engine, options, warn, report)
    if not options.api_key and options.host not in _LOCAL:
        warn(f"note: whoever reaches this port can use the model; --api-key or {KEY} limits that")
    host, port = listening.getsockname()[:2]
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    print(f"irc serves {options.name} at {where}", flush=True)
    run(server, listening, options.grace)
