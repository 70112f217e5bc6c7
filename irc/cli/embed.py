"""`irc embed`: computes vectors of texts with a compiled encoder."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..artifact.atomic import whole_file
from ..errors import Error
from ..report import Report
from .arguments import Usage, add_json, add_runtime, runtime_options
from .console import Progress, answer
from .ranks import add_launcher, of_rank, over_ranks
from .texts import given_text, read_lines, shared_json

if TYPE_CHECKING:
    from ..backends.ranks.communicator import Communicator

EXAMPLES = """
  irc compile all-MiniLM-L6-v2 -o build/minilm
  irc embed build/minilm --text "A cat" --text "A dog" --json
  irc embed build/minilm --texts sentences.txt -o vectors.npy
"""


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc embed`."""
    add = parser.add_argument
    add("source", metavar="DIR", help="an artifact folder of an encoder of texts")
    what = "may be repeated; - reads standard input"
    add("--text", metavar="TEXT", action="append", default=[], help=what)
    what = 'one text a line, or .jsonl with "text"; - is standard input'
    add("--texts", metavar="FILE", help=what)
    what = "write f32 [texts, D] as .npy; else a vector is a line of the output"
    add("-o", "--output", metavar="OUT.npy", help=what)
    add_runtime(parser)
    add_launcher(parser)
    add_json(parser)


def run(args: Namespace) -> int:
    """Read the texts, run the encoder, print or write the vectors."""
    if bool(args.text) == (args.texts is not None):
        raise Usage("expected --text TEXT or --texts FILE", "irc embed --help lists the options")
    return over_ranks(args, _run, reads="-" in (*args.text, args.texts))


def _run(args: Namespace, communicator: Communicator | None) -> int:
    from ..driver import open_model
    from ..generation.embeddings import embed

    texts: list[str] = shared_json(communicator, lambda: _texts(args))
    with Progress() as progress:
        progress(f"loading {args.source}")
        options = runtime_options(args) | of_rank(communicator)
        model = open_model(args.artifact or args.source, args.backend, **options)
        progress(f"embedding {len(texts)} texts")
        vectors = embed(model, texts)
    if communicator is not None and communicator.rank != 0:
        return 0
    if args.output is not None:
        try:
            with whole_file(Path(args.output)) as file:
                np.save(file, vectors)
        except OSError as error:
            raise Error(f"cannot write {args.output}: {error.strerror or error}") from error
    facts = {"shape": list(vectors.shape), "file": args.output}
    lines = [" ".join(f"{number:.7g}" for number in vector) for vector in vectors]
    if args.output is None:
        facts["embeddings"] = vectors.tolist()
    return answer(args, Report(facts, [] if args.output else lines))


def _texts(args: Namespace) -> list[str]:
    if args.texts is not None:
        return read_lines(args.texts, text=str)
    return [given_text(text, "the text") for text in args.text]
