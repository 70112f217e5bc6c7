"""`run_script`: runs a build script of TensorRT-LLM, and returns a module for each engine of it."""

from __future__ import annotations

import ast
import multiprocessing
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...errors import Error, did_you_mean
from ...ir.core import Module
from ...json_files import read_object
from ..script import executed
from . import builder
from .aliases import aliases
from .api import RELEASES, ROOT, suggestion
from .api import fields as fields_of
from .context import NEWEST, Session, new_session
from .engines import merged
from .lint import find_release, imported, parse_script
from .main_memory import in_main_memory, nothing, replaced
from .sources import package_folder, sources_blamed, version_of
from .utilities import process


@dataclass
class Run:
    """What a script built: a module per engine. The session keeps the arrays of the script."""

    session: Session
    engines: dict[str, Module]


def run_script(
    path: str | Path,
    arguments: Sequence[str] = (),
    version: str | None = None,
    processes: int = 1,
    **options: Any,
) -> Run:
    """Run a script as `mpirun -n processes python path arguments` would; its engines' modules.

    All processes, ranks and workers run one after the other in this process. `version` is that
    of TensorRT-LLM (0.7); by default it is found in the text. `options` are fields of the session.
    """
    path = Path(path)
    tree = parse_script(path)
    if options.get("sources") is not None:
        options["sources"] = package_folder(options["sources"])
        version = version or version_of(options["sources"])
    version = version or RELEASES[find_release(tree, path)]
    with new_session(version, **options) as session, aliases():
        argv, sys.argv = sys.argv, [str(path), *arguments]
        try:
            for rank in range(processes):
                with (
                    process(rank, processes),
                    in_this_process(tree),
                    sources_blamed(),
                    executed(path, "__main__"),
                ):
                    pass
        except Error as error:
            _explain(error)
            raise
        finally:
            sys.argv = argv
        asks_help = not session.networks and {"-h", "--help"} & {*arguments}
        return Run(session, {} if asks_help else _modules(session, path))


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
        return Run(session, {name: merged(name) for name in session.networks})


def _modules(session: Session, path: Path) -> dict[str, Module]:
    if not session.networks:
        raise Error(
            f"{path} built no engine: expected Builder.build_engine(network, config) or "
            "build(model, config); arguments of the script follow --, as in `irc compile "
            f"{path.name} -o DIR -- --tp_size 2`. A script that runs engines is run by "
            f"`python -m irc.frontends.tensorrt_llm {path.name}`"
        )
    return {name: merged(name) for name in session.networks}


def _explain(error: Error) -> None:
    """Say how a script ended, and the nearest name of the API where one cannot be imported."""
    cause = error.__cause__
    if isinstance(cause, SystemExit):
        is_text = isinstance(cause.code, str)
        ended = f"the script ended with status {cause.code}; its own message is above"
        error.message = str(cause.code) if is_text else ended
    if not isinstance(cause, ImportError) or not (cause.name or "").startswith(ROOT):
        return
    found = re.match(r"cannot import name '(\w+)'", str(cause))
    if found is not None:
        module = str(cause.name).partition(".")[2]
        near = suggestion(module, found[1]).lstrip("; ")
        error.add_note(near or "irc knows no such name; `irc lint` lists the names of a script")


@contextmanager
def in_this_process(tree: ast.Module) -> Generator[None]:
    """Let worker processes run in turn here, and threads in the session, for the block."""
    values: list[tuple[Any, str, Any]] = [
        (ProcessPoolExecutor, "submit", _submit_in_turn),
        (ThreadPoolExecutor, "submit", _in_context(ThreadPoolExecutor.submit)),
        (multiprocessing, "set_start_method", nothing),
        (multiprocessing, "Process", _Process),
    ]
    packages = imported(tree)
    with in_main_memory(packages):
        if "torch" in packages and "torch" in sys.modules:
            workers = import_module(f"{sys.modules['torch'].__name__}.multiprocessing")
            values += [(workers, "spawn", _spawn), (workers, "Process", _Process)]
            values.append((workers, "set_start_method", nothing))
        with replaced(values):
            yield


def _spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> Any:
    """As torch.multiprocessing.spawn, one worker after the other in this process."""
    for rank in range(nprocs):
        fn(rank, *args)
    return None if join else SimpleNamespace(join=_joined)


def _joined(timeout: float | None = None) -> bool:
    """True: the workers are done."""
    return True


class _Process:
    """As multiprocessing.Process, but it runs in this process when it is started."""

    exitcode = 0

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.call = partial(target or nothing, *args, **(kwargs or {}))

    def start(self) -> None:
        """Run the function to its end."""
        self.call()

    join = close = terminate = nothing


def _submit_in_turn(
    executor: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Future[Any]:
    """The finished future of a call in this process."""
    future: Future[Any] = Future()
    try:
        future.set_result(fn(*args, **kwargs))
    except Exception as error:
        future.set_exception(error)
    return future


def _in_context(submit: Callable[..., Any]) -> Callable[..., Any]:
    """`submit` whose threads see the session."""

    def call(executor: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return submit(executor, partial(copy_context().run, fn), *args, **kwargs)

    return call
