"""The options of `irc compile` that are about TensorRT engines."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from pathlib import Path
from typing import Any

from .arguments import add_plugin, whole_number, word_of


def add_engine(parser: ArgumentParser) -> None:
    """What decides how engines are built."""
    add = parser.add_argument_group("engines (--backend tensorrt-rtx or tensorrt)").add_argument
    add(
        "--target",
        metavar="NAME",
        help="the library and the GPUs, as in tensorrt-rtx-1.7/sm_89; versions and GPUs may be "
        "left out",
    )
    add(
        "--weights",
        metavar="PLACE",
        type=word_of("inside", "outside"),
        help="inside: constants of the engine; outside: bound when it runs, straight from the "
        "checkpoint (the default over 2 GB, and of several ranks, which then share an engine)",
    )
    add(
        "--collectives",
        metavar="KIND",
        type=word_of("native", "plugin"),
        help="TensorRT's own or those of irc's plugin, whatever irc ops --target says",
    )
    add("--workspace", metavar="MIB", type=whole_number(1), help="most memory of one kernel")
    add("--cache", metavar="DIR", help="keep engines that were built here, and look for them here")
    add("--no-cache", action="store_true", help="build anew, and keep nothing")
    add("--no-build", action="store_true", help="write ONNX, and build engines another time")
    add_plugin(add)
    add(
        "--self-test",
        metavar="WHEN",
        type=word_of("always", "never"),
        help="store the reference's answer to a prompt, which loading compares (by default where "
        "weights are small)",
    )
    add(
        "--weight-streaming",
        action=BooleanOptionalAction,
        help="let weights inside exceed the GPU's memory",
    )
    add(
        "--refit",
        action=BooleanOptionalAction,
        help="weights can be changed later; needs a GPU",
    )
    add(
        "--strip",
        action=BooleanOptionalAction,
        help="leave weights out, to be refitted; needs a GPU",
    )
    add(
        "--triton",
        metavar="DIR",
        help="write a model repository for Triton Inference Server too, with weights inside",
    )


def engine_options(args: Namespace) -> dict[str, Any]:
    """The options of engines that were given; see EngineOptions."""
    options: dict[str, Any] = {
        "target": args.target,
        "weights": args.weights,
        "collectives": args.collectives,
        "workspace": args.workspace << 20 if args.workspace else None,
        "cache": Path(args.cache) if args.cache else None,
        "plugins": tuple(args.plugin),
        "weight_streaming": args.weight_streaming,
        "refit": args.refit,
        "strip": args.strip,
        "triton": Path(args.triton) if args.triton else None,
    }
    found = {name: value for name, value in options.items() if value not in (None, ())}
    found |= {"self_test": args.self_test == "always"} if args.self_test else {}
    found |= {"caching": False} if args.no_cache else {}
    return found | ({"build": False} if args.no_build else {})
