"""`tensorrt_llm.profiler`: seconds between `start` and `stop`, and the memory of the process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from ...errors import Error, did_you_mean
from ...source import here
from .api import api
from .context import current_session
from .logger import logger

_POWERS = {"G": 30, "M": 20, "K": 10}  # of 2, by the first letter of a unit


def _times() -> dict[str, list[float]]:
    """By tag: when the running interval began, and the seconds of those that ended."""
    return current_session().times


@api("profiler.start")
def start(tag: str) -> None:
    """Begin an interval."""
    _times().setdefault(tag, [])[:1] = [time.perf_counter()]


@api("profiler.stop")
def stop(tag: str) -> float:
    """End an interval; returns its seconds."""
    if tag not in _times():
        near = did_you_mean(tag, _times())
        raise Error(f"profiler.stop({tag!r}) without profiler.start({tag!r}){near}", loc=here())
    begin, *seconds = _times()[tag]
    _times()[tag] = [begin, *seconds, time.perf_counter() - begin]
    return _times()[tag][-1]


@api("profiler.elapsed_time_in_sec")
def elapsed_time_in_sec(tag: str) -> float | None:
    """The seconds of all ended intervals with a tag; None where there is none."""
    seconds = _times().get(tag, [])[1:]
    return sum(seconds) if seconds else None


@api("profiler.reset")
def reset() -> None:
    """Forget all intervals."""
    _times().clear()


@api("profiler.summary")
def summary() -> None:
    """Log the seconds of every tag."""
    for tag, (_, *seconds) in _times().items():
        logger.info(f"{tag}: {sum(seconds):.6f} s")


@api("profiler.host_memory_info")
def host_memory_info(pid: int | None = None) -> tuple[int, int, int]:
    """The bytes that the process uses, that are free, and that there are; zeros where unknown."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        used = int(Path(f"/proc/{pid or 'self'}/statm").read_text(encoding="ascii").split()[1])
        return used * page, os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    except (OSError, ValueError):
        return 0, 0, 0


@api("profiler.device_memory_info")
def device_memory_info(device: Any = None) -> tuple[int, int, int]:
    """Zeros: scripts run on the host."""
    return 0, 0, 0


@api("profiler.bytes_to_target_unit")
def bytes_to_target_unit(mem_bytes: int, unit: str) -> float:
    """Bytes in GiB, MiB or KiB."""
    return mem_bytes / (1 << _POWERS[unit[0]])


@api("profiler.print_memory_usage")
def print_memory_usage(tag: str | None = None, unit: str = "GiB", device: Any = None) -> None:
    """Log the memory of the process."""
    used = bytes_to_target_unit(host_memory_info()[0], unit)
    logger.info(f"{f'{tag}: ' if tag else ''}{used:.4f} {unit} of host memory")
