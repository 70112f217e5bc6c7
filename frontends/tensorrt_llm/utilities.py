"""What scripts use beside networks: the logger, the profiler, and functions of `_utils`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...errors import did_you_mean
from .api import api, register
from .context import current_session
from .errors import ScriptError

# -- the logger

_LEVELS = ("internal_error", "error", "warning", "info", "verbose", "debug")


def _at(severity: str) -> Any:
    """The method that prints a message of a severity."""

    def method(self: Any, msg: object = "") -> None:
        self.log(severity, msg)

    return method


@api("logger.Logger")
class Logger:
    """Prints messages of its level and of more severe ones, on standard error.

    The first level is that of the environment variable TLLM_LOG_LEVEL, else "warning".
    """

    def __init__(self) -> None:
        level = os.environ.get("TLLM_LOG_LEVEL", "warning").lower()
        self.level = level if level in _LEVELS else "warning"
        self._said: set[str] = set()

    def set_level(self, min_severity: str) -> None:
        """Print messages from this severity on."""
        if min_severity not in _LEVELS:
            near = did_you_mean(min_severity, _LEVELS)
            raise ScriptError(f"no log level is called {min_severity!r}{near}")
        self.level = min_severity

    def log(self, severity: str, msg: object = "") -> None:
        """Print a message of a severity."""
        if _LEVELS.index(severity) <= _LEVELS.index(self.level):
            print(f"[{severity}]", msg, file=sys.stderr)

    def _log_once(self, severity: str, *parts: object, key: object = None) -> None:
        """Print a message with this key, or text, at most once."""
        text = str(parts if key is None else key)
        if text not in self._said:
            self._said.add(text)
            self.log(severity, " ".join(map(str, parts)))

    error, warning, info, debug = _at("error"), _at("warning"), _at("info"), _at("debug")
    warning_once = partialmethod(_log_once, "warning")


logger = Logger()
register("logger.logger", logger)
# `tensorrt_llm.logger` is both the module and the logger
for _name in ("set_level", "log", "error", "warning", "info", "debug", "warning_once"):
    register(f"logger.{_name}", getattr(logger, _name))


# -- the profiler
# `times` of the session has, by tag, when the interval began, and the seconds of those that ended.


@api("profiler.start")
def start(tag: str) -> None:
    """Begin an interval."""
    current_session().times.setdefault(tag, [0.0])[0] = time.perf_counter()


@api("profiler.stop")
def stop(tag: str) -> float:
    """End an interval; returns its seconds."""
    times = current_session().times
    if tag not in times:
        near = did_you_mean(tag, times)
        raise ScriptError(f"profiler.stop({tag!r}) without profiler.start({tag!r}){near}")
    times[tag].append(time.perf_counter() - times[tag][0])
    return times[tag][-1]


@api("profiler.elapsed_time_in_sec")
def elapsed_time_in_sec(tag: str) -> float | None:
    """The seconds of all ended intervals with a tag; None where there is none."""
    seconds = current_session().times.get(tag, [])[1:]
    return sum(seconds) if seconds else None


@api("profiler.host_memory_info")
def host_memory_info(pid: int | None = None) -> tuple[int, int, int]:
    """The bytes that the process uses, that are free, and that there are; zeros where unknown."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        used = int(Path(f"/proc/{pid or 'self'}/statm").read_text(encoding="ascii").split()[1])
        return used * page, os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    except (OSError, ValueError):
        return 0, 0, 0


@api("profiler.print_memory_usage")
def print_memory_usage(tag: str | None = None, unit: str = "GiB", device: Any = None) -> None:
    """Log the memory of the process in GiB, MiB or KiB."""
    used = host_memory_info()[0] / (1 << {"G": 30, "M": 20, "K": 10}[unit[0]])
    logger.info(f"{f'{tag}: ' if tag else ''}{used:.4f} {unit} of host memory")


# -- processes: one runs all ranks

_process: ContextVar[tuple[int, int]] = ContextVar("irc_trt_llm_process", default=(0, 1))


@contextmanager
def process(rank: int, count: int) -> Generator[None]:
    """The block runs as one of several processes of a script."""
    token = _process.set((rank, count))
    try:
        yield
    finally:
        _process.reset(token)


@api("_utils.mpi_rank")
def mpi_rank() -> int:
    """The number of this process of the script."""
    return _process.get()[0]


@api("_utils.mpi_world_size")
def mpi_world_size() -> int:
    """The number of processes of the script (irc compile --processes)."""
    return _process.get()[1]


# -- others


@api("_utils.pad_vocab_size")
def pad_vocab_size(vocab_size: int, tp_size: int) -> int:
    """The smallest multiple of `tp_size` that is not below `vocab_size`."""
    return -(-vocab_size // tp_size) * tp_size


@api("_utils.to_json_file")
def to_json_file(obj: Any, json_file_path: str | Path) -> None:
    """Write a dict as JSON; an object is the dict of its attributes."""
    text = json.dumps(obj, default=vars, indent=2, sort_keys=True) + "\n"
    Path(json_file_path).write_text(text, encoding="utf-8")


@api("_utils.supports_inflight_batching")
def supports_inflight_batching(engine_dir: str | Path) -> bool:
    """False: an engine of irc takes a batch until all its sequences are done."""
    return False


@api("bindings.GptJsonConfig")
class GptJsonConfig:
    """What scripts of 0.11 and 0.12 ask a config.json: see `supports_inflight_batching`."""

    model_config = SimpleNamespace(supports_inflight_batching=False)

    @classmethod
    def parse_file(cls, path: str | Path) -> GptJsonConfig:
        """The config of a file."""
        return cls()


@api("llmapi.utils.get_total_gpu_memory")
def get_total_gpu_memory(device: int) -> int:
    """The memory of a CUDA device in bytes; without one, what the machine has."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory_info()[2]


@api("_common.serialize_engine")
@api("_utils.serialize_engine")
@api("builder.serialize_engine")
@api("runtime.engine.serialize_engine")
def serialize_engine(engine: Any, path: str) -> None:
    """Write the bytes of an engine, which name its artifact, into a file."""
    Path(path).write_bytes(bytes(engine))
