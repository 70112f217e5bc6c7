"""Parses one ONNX file and builds one engine; runs in the builder's own process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from irc.atomic import whole_file
from irc.backends.tensorrt.builder import messages
from irc.backends.tensorrt.builder.layers import Listing
from irc.backends.tensorrt.builder.library import Library
from irc.backends.tensorrt.builder.process import MODEL, PART, WEIGHTS
from irc.backends.tensorrt.builder.progress import monitor
from irc.errors import Error

Say: TypeAlias = Callable[..., None]  # an event, with what belongs to it
MOST_ERRORS = 20


class Failure(Exception):
    """The library refused: a list of what it said, each about a node of the file or of none."""

    def __init__(self, doing: str, errors: list[dict[str, str]]) -> None:
        super().__init__(doing)
        self.doing, self.errors = doing, errors


class Builder:
    """Builds what a request (JSON, see `build.py`) asks for, and says what it is at.

    The folder it stands in holds the model, the place for the engine, and the weights.
    """

    def __init__(
        self, library: Library, request: dict[str, Any], say: Say, cancelled: threading.Event
    ) -> None:
        self.library, self.trt = library, library.module
        self.request, self.say, self.cancelled = request, say, cancelled
        self.listing = Listing()
        self.errors: list[str] = []
        self.parsing = True
        self.told = -1.0
        self.kept: list[Any] = []  # what the library's objects point to has to outlive them

    def run(self) -> dict[str, Any]:
        """Write the engine; returns the report as JSON."""
        with messages.listening(self.trt, self._hear) as logger:
            builder = self._made(lambda: self.trt.Builder(logger), "starting the builder")
            network = self._parse(builder, logger)
            config = self._configure(builder, network)
            size = self._build(builder, network, config)
        profiles = [each["name"] for each in self.request["profiles"]]
        report = self.listing.report(
            str(self.library), self.request["target"], profiles or ["default"], size
        )
        return report.to_json()

    def _hear(self, severity: str, text: str) -> None:
        self.listing.hear(text)
        if severity in messages.SEVERE:
            self.errors.append(text)
        elif severity == "warning":
            name = messages.unused_input(text)
            if name is not None:
                self.say("unused", name=name)
        elif self.parsing and (node := messages.node_in_work(text)):
            self.say("node", name=node[0], kind=node[1])
        elif not self.parsing and (layer := messages.layer_in_work(text)):
            self.say("layer", name=layer)

    def _made(self, make: Callable[[], Any], doing: str) -> Any:
        """What `make` gives; the library's own words where it gives none."""
        with suppress(TypeError):  # what a factory raises that returned nothing
            made = make()
            if made is not None:
                return made
        raise self._refusal(doing)

    def _refusal(self, doing: str) -> Failure:
        said = [text for text in self.errors if messages.reason(text)]
        return Failure(doing, [{"node": "", "kind": "", "text": text} for text in said])

    def _parse(self, builder: Any, logger: Any) -> Any:
        network = self._made(lambda: _network(self.trt, builder), "starting a network")
        data = Path(MODEL).read_bytes()
        place = f"{WEIGHTS}/{MODEL}"
        # The parser lives as long as this object: it owns the weights that it mapped.
        self.parser = self.trt.OnnxParser(network, logger)
        if not self.parser.parse(data, place):
            raise Failure("parsing", self._parse_errors(data, place, logger))
        self.parsing = False
        self.say("stage", fraction=0.0)
        self._check_ports(network)
        return network

    def _parse_errors(self, data: bytes, place: str, logger: Any) -> list[dict[str, str]]:
        """What is wrong with every node: after each that fails, the rest is parsed by itself."""
        from irc.backends.tensorrt.builder.remainder import without

        found = [_error_of(self.parser.get_error(i)) for i in range(self.parser.num_errors)]
        given: set[int] = {int(each["index"]) for each in found} - {-1}
        while given and len(found) < MOST_ERRORS:
            rest = without(data, given)
            builder = self.trt.Builder(logger)
            network = _network(self.trt, builder)
            parser = self.trt.OnnxParser(network, logger)
            self.kept += [parser, network, builder]
            if rest is None or parser.parse(rest.data, place):
                break
            errors = [_error_of(parser.get_error(i)) for i in range(parser.num_errors)]
            numbers = {rest.numbers[int(e["index"])] for e in errors if int(e["index"]) >= 0}
            if not numbers or numbers <= given:
                break
            found += errors
            given |= numbers
        return found

    def _check_ports(self, network: Any) -> None:
        inputs = {t.name: t for t in map(network.get_input, range(network.num_inputs))}
        outputs = {t.name: t for t in map(network.get_output, range(network.num_outputs))}
        for kind, ports, wanted in (
            ("input", inputs, self.request["inputs"]),
            ("output", outputs, self.request["outputs"]),
        ):
            for name, dtype in wanted.items():
                got = ports[name].dtype.name if name in ports else "nothing"
                if got != dtype and got != _ALIASES.get(dtype):
                    raise Error(
                        f"the {kind} {name} is {dtype} in {self.request['name']} and became {got} "
                        f"in {self.library}; lower the operation behind it another way"
                    )

    def _configure(self, builder: Any, network: Any) -> Any:
        trt, request = self.trt, self.request
        config = builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        if request["workspace"] is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, request["workspace"])
        if self.library.traits.capabilities:
            config.num_compute_capabilities = len(request["architectures"])
            for i, chip in enumerate(request["architectures"]):
                config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{chip}"), i)
        for flag in request["flags"]:
            config.set_flag(getattr(trt.BuilderFlag, flag))
        for profile in request["profiles"]:
            self._add_profile(builder, config, network, profile)
        self._use_timing_cache(config)
        self.monitor = monitor(trt, self._tell, self.cancelled)
        config.progress_monitor = self.monitor
        return config

    def _add_profile(
        self, builder: Any, config: Any, network: Any, profile: dict[str, Any]
    ) -> None:
        inputs = {t.name: t for t in map(network.get_input, range(network.num_inputs))}
        made = builder.create_optimization_profile()
        for name, shapes in profile["shapes"].items():
            if name not in inputs:
                raise Error(
                    f"profile {profile['name']!r} has shapes of {name!r}, which is no input of "
                    f"{self.request['name']}; it has {', '.join(inputs)}"
                )
            made.set_shape(name, *map(tuple, shapes))
        for name, tensor in inputs.items():
            if -1 in tuple(tensor.shape) and name not in profile["shapes"]:
                raise Error(
                    f"profile {profile['name']!r} says nothing of the input {name}, whose shape "
                    f"{list(tensor.shape)} is dynamic; give its smallest, usual and largest shape"
                )
        if config.add_optimization_profile(made) < 0:
            raise self._refusal(f"adding the profile {profile['name']!r}")

    def _use_timing_cache(self, config: Any) -> None:
        if not self.request["timing_cache"]:
            return
        path = Path(self.request["timing_cache"])
        known = path.read_bytes() if path.exists() else b""
        # What another version or GPU measured is refused by the library, and measured anew.
        if not config.set_timing_cache(config.create_timing_cache(known), False):
            config.set_timing_cache(config.create_timing_cache(b""), False)

    def _keep_timing_cache(self, config: Any) -> None:
        if not self.request["timing_cache"]:
            return
        with whole_file(Path(self.request["timing_cache"])) as file:
            file.write(config.get_timing_cache().serialize())

    def _build(self, builder: Any, network: Any, config: Any) -> int:
        writer = _writer(self.trt, Path(PART))
        with writer.file:
            built = builder.build_serialized_network_to_stream(network, config, writer)
        if writer.problem is not None:
            raise writer.problem
        if self.cancelled.is_set():
            raise KeyboardInterrupt
        if not built or not writer.size:
            raise self._refusal("building")
        self._keep_timing_cache(config)
        return writer.size

    def _tell(self, fraction: float) -> None:
        if fraction - self.told >= 0.005:
            self.told = fraction
            self.say("stage", fraction=round(fraction, 3))


_ALIASES = {"FLOAT": "float32", "HALF": "float16"}


def _network(trt: Any, builder: Any) -> Any:
    flags = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return builder.create_network(0 if flags is None else 1 << int(flags))


def _error_of(error: Any) -> dict[str, str]:
    return {
        "node": error.node_name(),
        "kind": error.node_operator(),
        "text": error.desc(),
        "index": str(error.node()),
    }


def _writer(trt: Any, path: Path) -> Any:
    class Writer(trt.IStreamWriter):
        """Takes the engine in pieces of up to 64 MiB."""

        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.file = path.open("wb", buffering=0)
            self.size = 0
            self.problem: OSError | None = None

        def write(self, data: Any) -> int:
            """The number of bytes that were written; fewer end the build."""
            try:
                left = memoryview(data)
                while left:
                    count = self.file.write(left)
                    left, self.size = left[count:], self.size + count
            except OSError as error:
                self.problem = error
                return 0
            return len(data)

    return Writer()
