"""Runs what a script of TensorRT-LLM builds: traces every rank, merges, and evaluates."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import irc
from irc.frontends.tensorrt_llm import api, mapping
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.merge import merge
from irc.frontends.tensorrt_llm.network import Network, net_guard
from irc.frontends.tensorrt_llm.tensor import Tensor

Build = Callable[[mapping.Mapping], object]


class Bound:
    """The names of a module, bound as scripts of the session's release find them."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return api.find(f"{self._module}.{name}")


def source(name: str = "x", size: int = 6, dtype: str = "float32") -> Tensor:
    """An input [b, size]."""
    return Tensor(name, dtype, [-1, size], OrderedDict([("b", [[1, 2, 5]]), (f"{name}s", [size])]))


def trace(build: Build, tp: int = 1, pp: int = 1, cp: int = 1, **sizes: int) -> irc.Module:
    """The module of what `build` builds, which gets the Mapping of each rank."""
    sizes |= {"world_size": tp * pp * cp, "tp_size": tp, "pp_size": pp, "cp_size": cp}
    networks: dict[int, Network] = {}
    for rank in range(sizes["world_size"]):
        networks[rank] = Network()
        with net_guard(networks[rank]):
            build(mapping.Mapping(rank=rank, **sizes))
    module = merge(networks, mapping.Mapping(**sizes))
    text = str(module)
    assert str(irc.parse(text)) == text
    return module


def run(
    build: Build,
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
