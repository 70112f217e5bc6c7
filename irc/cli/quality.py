"""`irc quality`: the perplexity of a language model, and its difference from another one."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..analysis.units import amount
from ..errors import Error
from ..report import Report, table
from .arguments import add_json, add_runtime, runtime_options, whole_number
from .console import Progress, answer
from .texts import read_text

if TYPE_CHECKING:
    from ..generation.model import Model
    from ..generation.quality import Quality

EXAMPLES = """
  irc compile Llama -o build/plain
  irc compile Llama -o build/w4a16 --quantize w4a16
  irc quality build/w4a16 --against build/plain
  irc quality build/w4a16 --against build/plain --text heldout.txt --json
"""


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc quality`."""
    add = parser.add_argument
    add("source", metavar="DIR", help="an artifact folder of a language model")
    add("--against", metavar="DIR", help="the artifact to compare with, such as the unquantized")
    what = "the text to predict (default: the help topics that come with Python)"
    add("--text", metavar="FILE", help=what)
    what = "tokens of a window; windows share no context (default: 256, or what the model takes)"
    add("--length", metavar="N", type=whole_number(2), help=what)
    what = "predict at most so many tokens (default: 16384)"
    add("--tokens", metavar="N", type=whole_number(2), default=16384, help=what)
    add_runtime(parser)
    add_json(parser)


def run(args: Namespace) -> int:
    """Load one or two artifacts, predict the text, print a table."""
    from ..generation.quality import LENGTH, longest_call, measure_quality

    text = _text(args.text)
    with Progress() as progress:
        model = _load(args, args.source, progress)
        other = None if args.against is None else _load(args, args.against, progress)
        ids = model.tokenizer.encode(text)[: args.tokens]
        if other is not None and other.tokenizer.encode(text)[: args.tokens] != ids:
            raise Error(f"{args.source} and {args.against} have different tokenizers")
        models = [given for given in (model, other) if given is not None]
        length = min(longest_call(given, args.length or LENGTH) for given in models)
        if args.length and length < args.length:
            raise Error(f"a call takes {length} tokens at most; give --length {length} or less")
        quality = measure_quality(
            model, other, ids, length, lambda done: progress("predicting the text", done)
        )
    sizes = [_weight_bytes(given) for given in (args.source, args.against) if given is not None]
    facts = {"artifact": args.source, "weight_bytes": sizes, **quality.as_json()}
    text = table(_rows(quality, sizes), ["", args.source, args.against or ""])
    return answer(args, Report(facts, [text]))


def _load(args: Namespace, folder: str, progress: Progress) -> Model:
    from ..driver import open_model

    progress(f"loading {folder}")
    return open_model(folder, args.backend, **runtime_options(args))


def _weight_bytes(folder: str) -> int:
    """The bytes of the weights of one rank."""
    from ..artifact.folder import ArtifactFolder
    from ..artifact.report import weight_bytes
    from ..driver.sources import read_text

    path = Path(folder)
    return weight_bytes(read_text(path if path.is_file() else ArtifactFolder.open(path).module))


def _rows(quality: Quality, sizes: Sequence[int]) -> list[list[str]]:
    """A row per figure: its name, that of DIR, that of the other model."""
    before = quality.reference_perplexity
    rows = [
        ["weights of a rank", *map(amount, sizes)],
        ["perplexity", f"{quality.perplexity:.4f}", "" if before is None else f"{before:.4f}"],
    ]
    if quality.increase is not None:
        rows += [
            ["increase of the perplexity", f"{quality.increase:.2%}", ""],
            ["KL divergence, nats per token", f"{quality.kl:.5f}", ""],
            ["same likeliest token", f"{quality.top1:.2%}", ""],
        ]
    return [[*row, *[""] * (3 - len(row))] for row in [*rows, ["tokens", f"{quality.tokens:,}"]]]


def _text(path: str | None) -> str:
    """The text of a file, by default the help topics of Python."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(text for _, text in sorted(topics.items()))
    return read_text(path)
