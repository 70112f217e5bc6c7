"""`irc compare`: the activations of two models, layer by layer, and where they first differ."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ..npz import read_npz
from .arguments import add_json, real_number, word_of
from .arrays import add_inputs
from .console import Progress, answer

EXAMPLES = """
  irc compare build/llama Meta-Llama-3-8B
  irc compare Meta-Llama-3-8B-edited Meta-Llama-3-8B
  irc compare build/tp2-w4a16 build/f32 --scope model.layers.3
  irc compare dumps/004-cse.irc dumps/007-localize.irc --random 1
  irc compare build/llama
  irc compare build/llama --backend reference model.onnx --json
"""


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc compare`."""
    add = parser.add_argument
    what = "an artifact, a checkpoint folder, a module, script.py[:factory] or model.onnx"
    add("source", metavar="A", help=what)
    what = "another one; a checkpoint folder runs in transformers (default: A's module in numpy)"
    add("other", metavar="B", nargs="?", help=what)
    add_inputs(parser, required=False)
    what = "what runs A: onnx, cuda, reference (default: that of an artifact, else reference)"
    add("--backend", metavar="NAME", help=what)
    add("--against", metavar="NAME", help="what runs B (default: reference, which is numpy)")
    what = "what runs a checkpoint folder B: transformers, or irc's front end in numpy"
    add("--reference", metavar="NAME", type=word_of("transformers", "irc"), help=what)
    add("--scope", metavar="S", default="", help="only this module path, such as model.layers.3")
    what = "the largest relative L2 error of every value (default: by its dtypes)"
    add("--tolerance", metavar="X", type=real_number, help=what)
    what = "let errors add up; by default B goes on with A's values"
    add("--accumulate", action="store_true", help=what)
    add("--all", action="store_true", help="a row for every value, not only those that differ")
    add_json(parser)


def run(args: Namespace) -> int:
    """0 if all values agree, 1 if one differs beyond what its dtypes explain."""
    from ..compare import compare
    from ..driver.sources import artifact_of

    names = ("backend", "against", "reference", "scope", "tolerance", "accumulate")
    inputs = None if args.inputs is None else read_npz(Path(args.inputs))
    with Progress() as progress:
        progress(f"running {args.source} and {args.other or 'its module in numpy'}")
        comparison = compare(
            args.source,
            args.other,
            inputs,
            seed=args.random or 0,
            **{name: getattr(args, name) for name in names},
        )
    can_show = Path(args.source).is_file() or artifact_of(args.source) is not None
    return answer(args, comparison.report(every=args.all, show=args.source if can_show else ""))
