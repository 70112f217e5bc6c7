"""`in_main_memory`: lets a script that puts torch tensors on a GPU run on a machine without one."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def nothing(*args: Any, **kwargs: Any) -> None:
    """What has no effect in main memory."""


class _Stream:
    """A stream or event on which everything has happened."""

    cuda_stream = 0
    synchronize = wait_stream = wait_event = wait = record = nothing

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def query(self) -> bool:
        """True: the work is done."""
        return True

    def record_event(self, *_: Any) -> _Stream:
        """An event that has happened."""
        return _Stream()

    def elapsed_time(self, end: _Stream) -> float:
        """0 ms: nothing was measured."""
        return 0.0


def _is_cuda(value: Any) -> bool:
    """Whether a value names a CUDA device."""
    if isinstance(value, str):
        return value.partition(":")[0] == "cuda"
    return type(value).__name__ == "device" and getattr(value, "type", "") == "cuda"


def _on_cpu(torch: Any) -> Any:
    """A mode of torch in which a CUDA device means the CPU."""

    class OnCpu(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            named = dict(kwargs or {})
            if func is torch.device:
                return func(*args, **named)
            args = tuple("cpu" if _is_cuda(argument) else argument for argument in args)
            for name, value in named.items():
                if _is_cuda(value) or (name == "device" and type(value) is int):
                    named[name] = "cpu"
            named.pop("pin_memory", None)
            return func(*args, **named)

    return OnCpu()


def _replacements(torch: Any) -> list[tuple[Any, str, Any]]:
    """(owner, attribute, value) of what stands for a GPU."""

    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        # contiguous, as a copy of an expanded tensor is
        return self.contiguous() if isinstance(self, torch.Tensor) else self

    does_nothing = ("set_device", "synchronize", "empty_cache", "set_stream", "manual_seed_all")
    streams = ("Stream", "ExternalStream", "Event", "current_stream", "default_stream")
    return [
        (torch.Tensor, "cuda", moved),
        (torch.Tensor, "pin_memory", moved),
        (torch.nn.Module, "cuda", moved),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "stream", nullcontext),
        (torch.cuda, "device", nullcontext),
        # one object each, because torch tells its functions apart by identity
        *((torch.cuda, name, partial(nothing)) for name in does_nothing),
        *((torch.cuda, name, _Stream) for name in streams),
    ]


@contextmanager
def replaced(values: list[tuple[Any, str, Any]]) -> Generator[None]:
    """Set attributes for the block: (owner, attribute, value)."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in values]
    try:
        for owner, name, value in values:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)


@contextmanager
def in_main_memory(packages: set[str]) -> Generator[Any]:
    """Tensors of torch lie in main memory for the block where the machine has no CUDA device.

    `packages` are those that a script imports; without torch among them nothing is done. Yields
    torch, or None.
    """
    is_used = "torch" in packages and find_spec("torch") is not None
    torch: Any = import_module("torch") if is_used else None
    if torch is None or torch.cuda.is_available():
        yield torch
        return
    with replaced(_replacements(torch)), _on_cpu(torch):
        yield torch
