"""`irc generate`: continues a prompt with a compiled language model, token by token."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

import numpy as np

from ..argument_checks import whole_number_in
from ..errors import Error
from ..report import paint
from .arguments import add_json, add_runtime, runtime_options, whole_number
from .console import Progress, print_json, warn
from .ranks import add_launcher, of_rank, over_ranks, shared

if TYPE_CHECKING:
    from ..backends.ranks.communicator import Communicator

EXAMPLES = """
  irc generate build/tiny_llama --prompt "Beautiful is better"
  irc generate build/llama_tp2 --prompt "Beautiful is better" --launcher mpi
  cat question.txt | irc generate build/llama --prompt - --max-new-tokens 200
  irc generate build/llama --prompt "1 15043 29892" --raw-ids
"""

_WHY = {"end": "end of text", "count": "--max-new-tokens", "capacity": "the cache is full"}


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc generate`."""
    add = parser.add_argument
    add("source", metavar="DIR", help="an artifact folder of a language model")
    add("--prompt", metavar="TEXT", required=True, help="- reads standard input")
    what = "stop after so many tokens (default: 100)"
    add("--max-new-tokens", metavar="N", type=whole_number(1), default=100, help=what)
    add("--raw-ids", action="store_true", help="the prompt is token ids, and so is the output")
    add_runtime(parser)
    add_launcher(parser)
    add_json(parser)


def run(args: Namespace) -> int:
    """Stream the text to standard output, and the rates to standard error."""
    return over_ranks(args, _run, reads=args.prompt == "-")


def _run(args: Namespace, communicator: Communicator | None) -> int:
    from ..driver import open_model

    prompt = _shared_prompt(args.prompt, communicator)
    with Progress() as progress:
        progress(f"loading {args.source}")
        options = runtime_options(args) | of_rank(communicator)
        model = open_model(args.artifact or args.source, args.backend, **options)
        ids = parse_ids(prompt) if args.raw_ids else model.tokenizer.encode(prompt)
    pieces: list[str] = []

    def say(text: str) -> None:
        if not args.json:
            print(text, end="", flush=True)

    def emit(text: str) -> None:
        pieces.append(text)
        say(text)

    if not args.raw_ids:
        say(paint(prompt, "dim"))

    try:
        if args.raw_ids:
            summary = model.generate_ids(ids, args.max_new_tokens, lambda token: emit(f"{token} "))
        else:
            summary = model.generate_text(ids, args.max_new_tokens, emit)
    finally:
        say("\n")
    if args.json:
        print_json({"prompt": prompt, "text": "".join(pieces), **summary.as_json()})
        return 0
    warn(
        f"{summary.prompt_tokens} tokens of prompt at {summary.prefill_rate:.1f} tokens/s, "
        f"{len(summary.tokens)} new at {summary.decode_rate:.1f} tokens/s ({_WHY[summary.stop]})"
    )
    return 0


def _shared_prompt(option: str, communicator: Communicator | None) -> str:
    """The prompt that rank 0 reads, on every rank."""
    inputs = shared(
        communicator, lambda: {"prompt": np.frombuffer(read_prompt(option).encode(), np.uint8)}
    )
    return inputs["prompt"].tobytes().decode()


def read_prompt(option: str) -> str:
    """The prompt; where it is `-`, standard input without the newline that ends it."""
    if option == "-":
        text = sys.stdin.buffer.read().removesuffix(b"\n")
    else:
        text = option.encode("utf-8", "surrogateescape")
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Error(f"the prompt is not text in UTF-8 (byte {error.start} is wrong)") from None


def parse_ids(text: str) -> list[int]:
    """Token ids from a text such as `1 15043, 29892`."""
    ids: list[int] = []
    for word in text.replace(",", " ").split():
        if (token := whole_number_in(word)) is None:
            raise Error(f"with --raw-ids the prompt is numbers such as 1 15043, not {word!r}")
        ids.append(token)
    return ids
