"""Types for code that uses one GPU: `Driver`, `Stream` and `Event` are the classes of device.py.

Tests have classes in numpy derived from these. Addresses and stream handles are integers. Work is
enqueued on a stream and runs in order; only methods that say so wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from .device import CudaDriver as Driver
    from .device import CudaEvent as Event
    from .device import CudaStream as Stream
else:
    Driver = Event = Stream = Any

Array: TypeAlias = np.ndarray[Any, Any]
Launch: TypeAlias = Callable[[int, int, int], None]  # source address, target address, stream
LaunchNorm: TypeAlias = Callable[[int, int, int, int, int, int], None]


@dataclass(frozen=True)
class Gpu:
    """A GPU: compute capability (89 for sm_89), UUID, and memory in bytes."""

    name: str
    capability: int
    uuid: str
    memory: int

    def __str__(self) -> str:
        return f"{self.name}, sm_{self.capability}"
