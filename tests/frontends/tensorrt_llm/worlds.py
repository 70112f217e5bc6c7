"""Runs what scripts of TensorRT-LLM build on every rank of a world: traces, merges, evaluates."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import irc
from irc.backends.reference.evaluate import evaluate_ranks
from irc.frontends.tensorrt_llm import api
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.mapping import Mapping as Ranks
from irc.frontends.tensorrt_llm.merge import merge
from irc.frontends.tensorrt_llm.network import Network, net_guard
from irc.frontends.tensorrt_llm.tensor import Tensor
from irc.ir.dtypes import dtype_of

Array = np.ndarray[Any, Any]
Script = Callable[[Ranks], object]
Build = Callable[..., Any]  # (mapping, one tensor per input) -> a tensor, or several


class Bound:
    """The names of a module, bound as scripts of the session's release find them."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return api.find(f"{self._module}.{name}")


def source(name: str = "x", size: int = 6, dtype: str = "float32") -> Tensor:
    """An input [b, size]."""
    return Tensor(name, dtype, [-1, size], OrderedDict([("b", [[1, 2, 5]]), (f"{name}s", [size])]))


def trace(build: Script, tp: int = 1, pp: int = 1, cp: int = 1, **sizes: int) -> irc.Module:
    """The module of what `build` builds, which gets the Mapping of each rank."""
    sizes |= {"world_size": tp * pp * cp, "tp_size": tp, "pp_size": pp, "cp_size": cp}
    networks: dict[int, Network] = {}
    for rank in range(sizes["world_size"]):
        networks[rank] = Network()
        with net_guard(networks[rank]):
            build(Ranks(rank=rank, **sizes))
    module = merge(networks, Ranks(**sizes))
    text = str(module)
    assert str(irc.parse(text)) == text
    return module


def run(
    build: Script,
    inputs: Mapping[str, Any],
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    *,
    version: str = "0.16",
    **sizes: int,
) -> dict[str, Any]:
    """The outputs of what `build` builds, on all its ranks, for global inputs."""
    with new_session(version):
        module = trace(build, tp, pp, cp, **sizes)
        return irc.evaluate(module, used(module, inputs))


def used(module: irc.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs that the module has: those that no output needs are left out of it."""
    return {str(arg.name): inputs[str(arg.name)] for arg in module.main.args}


def module_of(
    build: Build,
    inputs: Mapping[str, Array],
    tp: int = 1,
    pp: int = 1,
    dynamic: int = 0,
    **sizes: int,
) -> irc.Module:
    """The module of what `build` returns, whose outputs are out0, out1, ...

    The first `dynamic` dimensions of inputs are symbols.
    """

    def one_rank(mapping: Ranks) -> None:
        given = {name: _input(name, array, dynamic) for name, array in inputs.items()}
        outputs = build(mapping, **given)
        for i, tensor in enumerate(outputs if isinstance(outputs, tuple) else (outputs,)):
            if tensor is not None:
                tensor.mark_output(f"out{i}")

    return trace(one_rank, tp, pp, **sizes)


def _input(name: str, array: Array, dynamic: int) -> Tensor:
    """An input of the network in progress."""
    kind, shape = dtype_of(array), array.shape
    if not dynamic:
        return Tensor(name=name, dtype=kind, shape=shape)
    ranges: dict[str, Any] = {f"dim{i}": [[0, n, 64]] for i, n in enumerate(shape[:dynamic])}
    ranges |= {f"dim{i}": [n] for i, n in enumerate(shape) if i >= dynamic}
    sizes = [-1 if i < dynamic else n for i, n in enumerate(shape)]
    return Tensor(name=name, dtype=kind, shape=sizes, dim_range=ranges)


def parallel(mapping: Ranks, **more: Any) -> dict[str, Any]:
    """The arguments that all sharded layers take."""
    return {"dtype": "float32", "tp_group": mapping.tp_group, "tp_size": mapping.tp_size, **more}


def every_rank(
    build: Build, inputs: Mapping[str, Array], tp: int = 1, version: str = "0.16", **sizes: Any
) -> list[list[Array]]:
    """The outputs of every rank, which get the same inputs."""
    with new_session(version):
        module = module_of(build, inputs, tp, **sizes)
        given = used(module, inputs)
        ranks = evaluate_ranks(module, given) if module.local else [irc.evaluate(module, given)]
        return [list(outputs.values()) for outputs in ranks]


def shard(array: Array, dim: int, mapping: Ranks) -> Array:
    """The shard of a rank, of ceil(n / tp) elements, padded with zeros."""
    return part(array, dim, mapping.tp_size, mapping.tp_rank)


def part(array: Array, dim: int, count: int, index: int) -> Array:
    """One of `count` equal parts of an array, which is padded with zeros."""
    missing = -array.shape[dim] % count
    widths = [(0, missing if i == dim % array.ndim else 0) for i in range(array.ndim)]
    return np.split(np.pad(array, widths), count, axis=dim)[index]
