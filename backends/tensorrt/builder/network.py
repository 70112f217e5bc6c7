"""Parses one ONNX file and builds one engine; runs in the builder's own process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from irc.artifact.atomic import whole_file
from irc.backends.tensorrt.builder.callbacks import (
    make_error_recorder,
    make_logger,
    make_monitor,
    reason,
)
from irc.backends.tensorrt.builder.layers import Listing, layers_of
from irc.backends.tensorrt.builder.library import Library
from irc.backends.tensorrt.builder.process import MODEL, PART, WEIGHTS
from irc.backends.tensorrt.builder.report import Report

Send: TypeAlias = Callable[..., None]  # sends an event with its facts to the parent process


class Refused(Exception):
    """The library failed: errors {node, text}, where node is an ONNX node or ""."""

    def __init__(self, step: str, errors: list[dict[str, str]]) -> None:
        super().__init__(step)
        self.step, self.errors = step, errors


class UnusedInputs(Exception):
    """The network does not use some inputs of the model, so it would compute something else."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


class Builder:
    """Builds what a request (JSON, see `build.py`) describes, and reports progress.

    The current folder holds the model, the path of the engine, and the weights (see `process.py`).
    """

    def __init__(
        self, library: Library, request: dict[str, Any], send: Send, cancelled: threading.Event
    ) -> None:
        self.library, self.trt, self.request = library, library.module, request
        self.send, self.cancelled = send, cancelled
        self.listing, self.sent = Listing(), -1.0
        self.recorder = make_error_recorder(self.trt)
        self.logger = make_logger(self.trt, self.listing.add)

    def run(self) -> Report:
        """Write the engine and return its report."""
        self.builder = self._create(lambda: self.trt.Builder(self.logger), "starting the builder")
        self.builder.error_recorder = self.recorder
        network = self._parse()
        self._check_inputs(network)
        self._build(network, self._configure())
        profiles = tuple(each["name"] for each in self.request["profiles"]) or ("default",)
        layers, sizes = tuple(layers_of(self.listing.text)), tuple(self.listing.activations)
        return Report(str(self.library), self.request["target"], profiles, layers, sizes)

    def _create(self, make: Callable[[], Any], step: str) -> Any:
        """The object that `make` returns; a Refused if it returns none."""
        with suppress(TypeError):  # raised by a factory that returned nothing
            made = make()
            if made is not None:
                return made
        raise self._refused(step)

    def _refused(self, step: str) -> Refused:
        return Refused(step, [{"node": "", "text": text} for text in self.recorder.texts])

    def _parse(self) -> Any:
        strict = getattr(self.trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        flags = 0 if strict is None else 1 << int(strict)
        network = self._create(lambda: self.builder.create_network(flags), "creating a network")
        # The parser lives as long as this object: it owns the weights that it mapped.
        self.parser = self.trt.OnnxParser(network, self.logger)
        if not self.parser.parse(Path(MODEL).read_bytes(), f"{WEIGHTS}/{MODEL}"):
            errors = [self.parser.get_error(i) for i in range(self.parser.num_errors)]
            found = [{"node": each.node_name(), "text": reason(each.desc())} for each in errors]
            raise Refused("parsing", found)
        self._report(0.0)
        return network

    def _check_inputs(self, network: Any) -> None:
        """Check that every input reaches an output: the parser ignores some inputs of nodes."""
        inputs_of: dict[str, list[str]] = {}
        for layer in map(network.get_layer, range(network.num_layers)):
            inputs = [layer.get_input(i) for i in range(layer.num_inputs)]
            names = [each.name for each in inputs if each is not None]
            inputs_of |= {layer.get_output(i).name: names for i in range(layer.num_outputs)}
        pending = [network.get_output(i).name for i in range(network.num_outputs)]
        used: set[str] = set()
        while pending:
            name = pending.pop()
            if name not in used:
                used.add(name)
                pending += inputs_of.get(name, ())
        inputs = [network.get_input(i).name for i in range(network.num_inputs)]
        unused = [name for name in inputs if name not in used]
        if unused:
            raise UnusedInputs(unused)

    def _configure(self) -> Any:
        trt, request = self.trt, self.request
        config = self.builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        if request["workspace"] is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, request["workspace"])
        if self.library.traits.cross_compiles:
            config.num_compute_capabilities = len(request["architectures"])
            for i, chip in enumerate(request["architectures"]):
                config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{chip}"), i)
        for flag in request["flags"]:
            config.set_flag(getattr(trt.BuilderFlag, flag))
        for profile in request["profiles"]:
            self._add_profile(config, profile)
        if request["timing_cache"]:
            path = Path(request["timing_cache"])
            known = path.read_bytes() if path.exists() else b""
            # The library refuses the measurements of another version or GPU.
            if not config.set_timing_cache(config.create_timing_cache(known), False):
                config.set_timing_cache(config.create_timing_cache(b""), False)
        self.monitor = make_monitor(trt, self._report, self.cancelled)
        config.progress_monitor = self.monitor
        return config

    def _add_profile(self, config: Any, profile: dict[str, Any]) -> None:
        made = self.builder.create_optimization_profile()
        for name, shapes in profile["shapes"].items():
            made.set_shape(name, *map(tuple, shapes))
        if config.add_optimization_profile(made) < 0:
            raise self._refused(f"adding the profile {profile['name']!r}")

    def _build(self, network: Any, config: Any) -> None:
        writer = _make_writer(self.trt, Path(PART))
        with writer.file:
            built = self.builder.build_serialized_network_to_stream(network, config, writer)
        if writer.problem is not None:
            raise writer.problem
        if self.cancelled.is_set():
            raise KeyboardInterrupt
        if not built or not Path(PART).stat().st_size:
            raise self._refused("building")
        if self.request["timing_cache"]:
            with whole_file(Path(self.request["timing_cache"])) as file:
                file.write(config.get_timing_cache().serialize())

    def _report(self, fraction: float) -> None:
        if fraction - self.sent >= 0.005:
            self.sent = fraction
            self.send("progress", fraction=round(fraction, 3))


def _make_writer(trt: Any, path: Path) -> Any:
    class Writer(trt.IStreamWriter):
        """Writes the engine in pieces of up to 64 MiB."""

        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.file = path.open("wb", buffering=0)
            self.problem: OSError | None = None

        def write(self, data: Any) -> int:
            """The number of bytes written; fewer than given end the build."""
            try:
                left = memoryview(data)
                while left:
                    left = left[self.file.write(left) :]
            except OSError as error:
                self.problem = error
                return 0
            return len(data)

    return Writer()
