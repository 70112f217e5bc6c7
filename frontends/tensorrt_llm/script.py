"""`run_script`: runs a build script of TensorRT-LLM, and returns a module for each engine of it."""

from __future__ import annotations

import multiprocessing
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ...errors import Error, did_you_mean
from ...ir.core import Module
from ...json_files import read_object
from ..main_memory import in_main_memory, nothing, replaced
from ..script import executed
from . import builder
from .aliases import aliases
from .api import RELEASES, ROOT, suggestion
from .api import fields as fields_of
from .context import NEWEST, Session, new_session
from .engines import merged
from .lint import find_release, imported, parse_script
from .sources import package_folder, sources_blamed, version_of
from .utilities import process


@dataclass
class Run:
    """What a script built: a module per engine. The session keeps the arrays of the script."""

    session: Session
    engines: dict[str, Module]


@contextmanager
def prepared(
    path: Path,
    arguments: Sequence[str],
    version: str | None = None,
    sources: Path | None = None,
    **options: Any,
) -> Generator[Session]:
    """All that a script finds in place of TensorRT-LLM for the block: a session, modules,
    `sys.argv`, workers in this process, and main memory as a GPU.

    `version` is that of TensorRT-LLM (0.7); by default that of the sources, or as the script reads.
    `options` are fields of the session.
    """
    tree = parse_script(path)
    sources = package_folder(sources) if sources else None
    version = version or (version_of(sources) if sources else None)
    version = version or RELEASES[find_release(tree, path)]
    argv, sys.argv = sys.argv, [str(path), *arguments]
    try:
        with (
            new_session(version, sources=sources, **options) as session,
            aliases(),
            _in_this_process(imported(tree)),
            sources_blamed(),
        ):
            yield session
    finally:
        sys.argv = argv


def run_script(
    path: str | Path,
    arguments: Sequence[str] = (),
    version: str | None = None,
    processes: int = 1,
    **options: Any,
) -> Run:
    """Run a script as `mpirun -n processes python path arguments` would; its engines' modules.

    All processes, ranks and workers run one after the other in this process. `version` and
    `options` are those of `prepared`.
    """
    path = Path(path)
    with prepared(path, arguments, version, **options) as session:
        try:
            for rank in range(processes):
                with process(rank, processes), executed(path, "__main__"):
                    pass
        except Error as error:
            _explain(error)
            raise
        if not session.engines and {"-h", "--help"} & {*arguments}:
            return Run(session, {})
        if not session.engines:
            raise Error(
                f"{path} built no engine: expected Builder.build_engine(network, config) or "
                "build(model, config); arguments of the script follow --, as in `irc compile "
                f"{path.name} -o DIR -- --tp_size 2`. A script that runs engines is run by "
                f"`python -m irc.frontends.tensorrt_llm {path.name}`"
            )
        return Run(session, {name: merged(name) for name in session.engines})


# What trtllm-build of releases whose BuildConfig has no defaults builds for.
_LIMITS = {
    "max_batch_size": 1,
    "max_input_len": 256,
    "max_output_len": 1024,
    "max_beam_width": 1,
    "max_num_tokens": None,
    "max_prompt_embedding_table_size": 0,
    "gather_all_token_logits": False,
}


def build_folder(
    folder: str | Path,
    engine_dir: str | Path | None,
    sources: Path,
    fields: Mapping[str, Any],
    version: str | None = None,
    **options: Any,
) -> Run:
    """Build a checkpoint folder, whose model class is in the sources, and save its engine.

    `fields` are those of BuildConfig; `options` are fields of the session.
    """
    root = package_folder(sources)
    config = read_object(Path(folder) / "config.json")
    version = version or version_of(root) or RELEASES[NEWEST]
    with new_session(version, sources=root, **options) as session, aliases(), sources_blamed():
        build: Any = builder.build  # of every release, whatever arguments the session's has
        name, classes = str(config.get("architecture")), import_module(f"{ROOT}.models").MODEL_MAP
        if name not in classes:
            near = did_you_mean(name, classes)
            raise Error(f"{root} has no model for the architecture {name!r} of {folder}{near}")
        limits = {n: value for n, value in _LIMITS.items() if n in fields_of("builder.BuildConfig")}
        mapping: dict[str, Any] = config.get("mapping") or {}
        for rank in range(int(mapping.get("world_size", 1))):
            model = classes[name].from_checkpoint(str(folder), rank=rank)
            engine = build.__unbound__(model, builder.BuildConfig(**limits | {**fields}))
            if engine is not None and engine_dir is not None:
                engine.save(engine_dir)
        return Run(session, {name: merged(name) for name in session.engines})


def _explain(error: Error) -> None:
    """Say how a script ended, and the nearest name of the API where one cannot be imported."""
    cause = error.__cause__
    if isinstance(cause, SystemExit):
        is_text = isinstance(cause.code, str)
        ended = f"the script ended with status {cause.code}; its own message is above"
        error.message = str(cause.code) if is_text else ended
    if not isinstance(cause, ImportError) or not (cause.name or "").startswith(ROOT):
        return
    match = re.match(r"cannot import name '(\w+)'", str(cause))
    if match is not None:
        module = str(cause.name).partition(".")[2]
        near = suggestion(module, match[1]).lstrip("; ")
        error.add_note(near or "irc knows no such name; `irc lint` lists the names of a script")


@contextmanager
def _in_this_process(packages: set[str]) -> Generator[None]:
    """Let workers of torch run in turn here, and threads in the session, for the block.

    `packages` are those that the script imports.
    """
    in_session = _in_context(ThreadPoolExecutor.submit)
    values: list[tuple[Any, str, Any]] = [
        (ThreadPoolExecutor, "submit", in_session),
        (multiprocessing, "set_start_method", nothing),
    ]
    with in_main_memory(packages) as torch:
        if torch is not None:
            workers = import_module(f"{torch.__name__}.multiprocessing")
            values += [(workers, "spawn", _spawn), (workers, "set_start_method", nothing)]
        with replaced(values):
            yield


def _spawn(fn: Callable[..., Any], args: Sequence[Any] = (), nprocs: int = 1, **_: Any) -> None:
    """As torch.multiprocessing.spawn, one worker after the other in this process."""
    for rank in range(nprocs):
        fn(rank, *args)


def _in_context(submit: Callable[..., Any]) -> Callable[..., Any]:
    """`submit` whose threads see the session."""

    def call(executor: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return submit(executor, partial(copy_context().run, fn), *args, **kwargs)

    return call
