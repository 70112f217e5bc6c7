"""What scripts import from tensorrt_llm._utils beside the conversions of dtypes."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

_TENSORRT = (10, 7)  # the version whose names scripts find


def pad_vocab_size(vocab_size: int, tp_size: int) -> int:
    """The smallest multiple of `tp_size` that is not below `vocab_size`."""
    return -(-vocab_size // tp_size) * tp_size


_process: ContextVar[tuple[int, int]] = ContextVar("irc_trt_llm_process", default=(0, 1))


@contextmanager
def process(rank: int, count: int) -> Generator[None]:
    """The block runs as one of several processes of a script."""
    token = _process.set((rank, count))
    try:
        yield
    finally:
        _process.reset(token)


def mpi_rank() -> int:
    """The number of this process of the script."""
    return _process.get()[0]


def mpi_world_size() -> int:
    """The number of processes of the script (irc compile --processes)."""
    return _process.get()[1]


def trt_version() -> str:
    """The version of TensorRT whose names scripts find."""
    return "{}.{}.0".format(*_TENSORRT)


def trt_gte(major: int, minor: int = 0) -> bool:
    """Whether that version is not before `major.minor`."""
    return (major, minor) <= _TENSORRT


def to_json_file(obj: Any, json_file_path: str | Path) -> None:
    """Write a dict as JSON; an object is the dict of its attributes."""
    text = json.dumps(obj, default=vars, indent=2, sort_keys=True) + "\n"
    Path(json_file_path).write_text(text, encoding="utf-8")


def supports_inflight_batching(engine_dir: str | Path) -> bool:
    """False: an engine of irc takes a batch until all its sequences are done."""
    return False
