"""The options of `irc compile` for TensorRT engines."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from .arguments import Switch, add_plugin, whole_number, word_of


def add_engine(parser: ArgumentParser) -> None:
    """Add the options that decide how engines are built."""
    add = parser.add_argument_group("engines (--backend tensorrt-rtx or tensorrt)").add_argument
    what = "library[-version][/sm_...], as in tensorrt-rtx-1.7/sm_89"
    add("--target", metavar="NAME", help=what)
    what = (
        "inside: constants of the engine; outside: bound when it runs, straight from the "
        "checkpoint (the default over 2 GB, and of several ranks, which then share an engine)"
    )
    add("--weights", metavar="PLACE", type=word_of("inside", "outside"), help=what)
    what = "TensorRT's own or those of irc's plugin, whatever irc ops --target says"
    add("--collectives", metavar="KIND", type=word_of("native", "plugin"), help=what)
    add("--workspace", metavar="MIB", type=whole_number(1), help="most memory of one kernel")
    what = "the folder of engines for later compilations ($IRC_CACHE or ~/.cache/irc/engines)"
    add("--cache", metavar="DIR", help=what)
    add("--no-cache", action="store_true", help="build anew, and keep nothing")
    add("--no-build", action="store_true", help="write ONNX, and build engines another time")
    add_plugin(add)
    what = "store the reference's answer, which loading compares (default: if weights are small)"
    add("--self-test", metavar="WHEN", type=word_of("always", "never"), help=what)
    flags = {
        "--weight-streaming": "let weights inside exceed the GPU's memory",
        "--refit": "weights can be changed later; needs a GPU",
        "--strip": "leave weights out, to be refitted; needs a GPU",
    }
    for name, what in flags.items():
        add(name, action=Switch, help=what)


def engine_options(args: Namespace) -> dict[str, Any]:
    """The engine options on the command line; see EngineOptions."""
    names = ("target", "weights", "collectives", "weight_streaming", "refit", "strip")
    options: dict[str, Any] = {name: getattr(args, name) for name in names}
    options["workspace"] = args.workspace << 20 if args.workspace else None
    options["cache"] = Path(args.cache) if args.cache else None
    options["plugins"] = tuple(args.plugin) or None
    options["self_test"] = {"always": True, "never": False}.get(args.self_test)
    options["caching"] = False if args.no_cache else None
    options["build"] = False if args.no_build else None
    return {name: value for name, value in options.items() if value is not None}
