"""What scripts import from tensorrt_llm._utils beside the conversions of dtypes."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from .api import api, release

_TENSORRT = (10, 7)  # the version whose names scripts find


@api("_utils.pad_vocab_size")
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


@api("_utils.mpi_rank")
def mpi_rank() -> int:
    """The number of this process of the script."""
    return _process.get()[0]


@api("_utils.mpi_world_size")
def mpi_world_size() -> int:
    """The number of processes of the script (irc compile --processes)."""
    return _process.get()[1]


@api("_utils.trt_version")
def trt_version() -> str:
    """The version of TensorRT whose names scripts find."""
    return "{}.{}.0".format(*_TENSORRT)


@api("_utils.trt_gte")
def trt_gte(major: int, minor: int = 0) -> bool:
    """Whether that version is not before `major.minor`."""
    return (major, minor) <= _TENSORRT


@api("_utils.to_json_file")
def to_json_file(obj: Any, json_file_path: str | Path) -> None:
    """Write a dict as JSON; an object is the dict of its attributes."""
    text = json.dumps(obj, default=vars, indent=2, sort_keys=True) + "\n"
    Path(json_file_path).write_text(text, encoding="utf-8")


@api("_utils.supports_inflight_batching")
def supports_inflight_batching(engine_dir: str | Path) -> bool:
    """False: an engine of irc takes a batch until all its sequences are done."""
    return False


@api("llmapi.utils.get_total_gpu_memory")
def get_total_gpu_memory(device: int) -> int:
    """The memory of a CUDA device in bytes; without one, what the machine has."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@api("_utils.to_dict")
def to_dict(obj: Any) -> dict[str, Any]:
    """The attributes of an object."""
    return dict(copy.deepcopy(cast("dict[str, Any]", vars(obj))))


@api("_utils.mpi_broadcast")
def mpi_broadcast(obj: Any, root: int = 0) -> Any:
    """The object itself: one process runs all ranks."""
    return obj


@api("_common.serialize_engine")
@api("_utils.serialize_engine")
@api("builder.serialize_engine")
@api("runtime.engine.serialize_engine")
def serialize_engine(engine: Any, path: str) -> None:
    """Write the bytes of an engine, which name its artifact, into a file."""
    Path(path).write_bytes(bytes(engine))


@api("_common.check_max_num_tokens")
def check_max_num_tokens(
    max_num_tokens: int | None,
    max_batch_size: int,
    max_input_len: int,
    max_beam_width: int = 1,
    opt_num_tokens: int | None = None,
) -> Any:
    """(most, typical) numbers of tokens in a call, those of 0.8 the most alone."""
    most = max_num_tokens or max_batch_size * max_input_len
    return most if release() < 9 else (most, opt_num_tokens or max_batch_size * max_beam_width)


@api("bindings.GptJsonConfig")
class GptJsonConfig:
    """What scripts of 0.11 and 0.12 ask a config.json: see `supports_inflight_batching`."""

    model_config = SimpleNamespace(supports_inflight_batching=False)

    @classmethod
    def parse_file(cls, path: str | Path) -> GptJsonConfig:
        """The config of a file."""
        return cls()
