"""What scripts import from tensorrt_llm._utils beside the conversions of dtypes."""

from __future__ import annotations

import copy
import json
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast


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
    return "10.7.0"


def trt_gte(major: int, minor: int = 0) -> bool:
    """Whether that version is not before `major.minor`."""
    return (major, minor) <= (10, 7)


def to_dict(made: Any) -> dict[str, Any]:
    """A copy of the attributes of an object."""
    return dict(copy.deepcopy(cast("dict[str, Any]", made.__dict__)))


def to_json_string(made: Any) -> str:
    """A dict, or the attributes of an object, as JSON."""
    table: object = cast("object", made) if isinstance(made, dict) else to_dict(made)
    return json.dumps(table, indent=2, sort_keys=True) + "\n"


def to_json_file(made: Any, json_file_path: str | Path) -> None:
    """Write `to_json_string` to a file."""
    Path(json_file_path).write_text(to_json_string(made), encoding="utf-8")


def release_gc() -> None:
    """Without effect: arrays of a script are freed with it."""
