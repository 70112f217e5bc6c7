"""What NVIDIA's unit tests need beside TensorRT-LLM, on a machine without its GPUs.

`simulate()` lets torch say that it has a device, whose tensors lie in main memory, and provides the
parts of cuda-python and polygraphy that the tests use. Nothing here stands in for tensorrt_llm or
tensorrt.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

CAPABILITY = (9, 0)  # of the simulated device: no test is skipped because the device is too old
MEMORY = 80 << 30  # bytes


_FOREVER = ExitStack()


def simulate() -> None:
    """Replace what needs a GPU, for the rest of this process."""
    from irc.frontends.main_memory import in_main_memory

    _FOREVER.enter_context(in_main_memory({"torch"}))
    _FOREVER.enter_context(_IndicesOnCpu())
    torch.Generator = _Generator
    torch.set_default_device = lambda device: None
    for name, value in _TORCH_CUDA.items():
        setattr(torch.cuda, name, _function(value))
    _add_modules()


class _Generator(torch.Generator):
    """Random numbers of the CPU, for any device."""

    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls)


class _IndicesOnCpu(TorchFunctionMode):
    """Lets conversions take the CPU where they are given the index of a device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if func is torch.device and len(args) == 1 and type(args[0]) is int:
            args = (f"cuda:{args[0]}",)
        elif name in ("to", "_parse_to"):
            args = tuple("cpu" if type(argument) is int else argument for argument in args)
        return func(*args, **(kwargs or {}))


def _function(value: Any) -> Callable[..., Any]:
    """A function of its own that returns a value: torch tells its functions apart by identity."""
    return lambda *args, **kwargs: value


_TORCH_CUDA: dict[str, Any] = {
    "is_available": True,
    "device_count": 1,
    "ipc_collect": None,
    "manual_seed": None,
    "memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
    "mem_get_info": (MEMORY, MEMORY),
    "get_device_capability": CAPABILITY,
    "get_device_name": "simulated",
    "get_device_properties": SimpleNamespace(
        name="simulated", total_memory=MEMORY, multi_processor_count=1,
        major=CAPABILITY[0], minor=CAPABILITY[1],
    ),
}  # fmt: skip


def _same(dtype: Any, *_: Any) -> Any:
    return dtype


def _add_modules() -> None:
    """cuda-python with one device, and polygraphy, as far as they are used."""
    results = IntEnum("Result", {"CUDA_SUCCESS": 0, "NVRTC_SUCCESS": 0, "cudaSuccess": 0})
    ok = results(0)
    attributes = {"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 0,
                  "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 1}  # fmt: skip
    cuda = _module(
        "cuda.cuda",
        CUresult=results,
        CUdevice_attribute=SimpleNamespace(**attributes),
        cuInit=lambda flags: (ok,),
        cuDeviceGet=lambda index: (ok, index),
        cuDeviceGetAttribute=lambda attribute, device: (ok, CAPABILITY[attribute]),
    )
    cudart = _module(
        "cuda.cudart",
        cudaError_t=results,
        cudaSetDevice=lambda index: (ok,),
        cudaGetDeviceCount=lambda: (ok, 1),
    )
    _module("cuda", cuda=cuda, cudart=cudart, nvrtc=_module("cuda.nvrtc", nvrtcResult=results))
    trt = _module(
        "polygraphy.backend.trt",
        Profile=Profile,
        CreateConfig=CreateConfig,
        EngineFromNetwork=EngineFromNetwork,
        engine_from_network=lambda network, config=None: EngineFromNetwork(network, config)(),
        TrtRunner=TrtRunner,
    )
    backend = _module("polygraphy.backend", trt=trt)
    logger = _module("polygraphy.logger", G_LOGGER=SimpleNamespace(module_severity=0))
    datatype = _module(
        "polygraphy.datatype", DataType=SimpleNamespace(from_dtype=_same, to_dtype=_same)
    )
    _module("polygraphy", backend=backend, logger=logger, datatype=datatype)


def _module(name: str, **values: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(values)
    sys.modules[name] = module
    return module


class Profile(dict[str, tuple[Sequence[int], Sequence[int], Sequence[int]]]):
    """The ranges of inputs by name: (min, opt, max)."""

    def add(self, name: str, min: Any, opt: Any, max: Any) -> Profile:
        """Set the ranges of one input; returns this."""
        self[name] = (tuple(min), tuple(opt), tuple(max))
        return self


class CreateConfig:
    """Only the profiles matter: irc computes in the dtypes of the tensors."""

    def __init__(self, *args: Any, profiles: Any = None, **kwargs: Any) -> None:
        self.profiles: list[Profile] = profiles if isinstance(profiles, list) else [profiles]


class EngineFromNetwork:
    """Builds the engine of a network when it is called."""

    def __init__(self, network: Any, config: CreateConfig | None = None, **kwargs: Any) -> None:
        self.network, self.config = network, config

    def __call__(self) -> Any:
        import tensorrt_llm  # pyright: ignore[reportMissingImports]

        _, network = self.network
        builder = tensorrt_llm.Builder()
        config = builder.create_builder_config(precision="float32")
        every = [network.get_input(index) for index in range(network.num_inputs)]
        inputs = {tensor.name: tensor for tensor in every}
        for given in filter(None, self.config.profiles if self.config else []):
            profile = builder.trt_builder.create_optimization_profile()
            for name, ranges in given.items():
                is_shape = inputs[name].is_shape_tensor
                (profile.set_shape_input if is_shape else profile.set_shape)(name, *ranges)
            config.trt_builder_config.add_optimization_profile(profile)
        return builder.build_engine(network, config)


class TrtRunner:
    """Runs an engine on arrays by name."""

    def __init__(self, engine: Any, **kwargs: Any) -> None:
        self.engine = engine

    def __enter__(self) -> TrtRunner:
        from tensorrt_llm.runtime import Session  # pyright: ignore[reportMissingImports]

        engine = self.engine() if callable(self.engine) else self.engine
        self.session = Session.from_serialized_engine(engine)
        return self

    def __exit__(self, *_: object) -> None: ...

    activate = __enter__
    deactivate = __exit__

    def infer(self, feed_dict: Any, *args: Any, **kwargs: Any) -> OrderedDict[str, Any]:
        """The outputs by name: arrays of torch where one of the inputs is."""
        is_torch = any(isinstance(value, torch.Tensor) for value in feed_dict.values())
        inputs = {name: torch.as_tensor(value) for name, value in feed_dict.items()}
        outputs = self.session.run(inputs)
        return OrderedDict(
            (name, torch.as_tensor(value) if is_torch else np.asarray(value))
            for name, value in outputs.items()
        )
