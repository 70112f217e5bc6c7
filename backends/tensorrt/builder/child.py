"""The process that builds one engine: reads one request as JSON, writes events as lines of JSON.

    python -P -m irc.backends.tensorrt.builder.child

It is a process of its own because the library may crash. It ends when its standard input closes,
which also happens when the parent process dies. The current folder holds the model, the path of the
engine, and the weights (see `build.py`). Events are {fraction} while it builds, and at the end
{report}, or {step, errors}, {text} or {text, errno} that say why there is no engine; an error is
{node, input, text}, where node is an ONNX node and input one of the network, or "".
"""

from __future__ import annotations

import _thread
import gc
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from irc.backends.tensorrt.builder.library import find, make_error_recorder, make_logger, reason
from irc.backends.tensorrt.builder.report import Listing
from irc.errors import Error

Request: TypeAlias = dict[str, Any]
Send: TypeAlias = Callable[..., None]  # sends an event with these facts to the parent process

MODEL, PART, WEIGHTS = "model.onnx", "engine.part", "weights"  # in the folder it works in
CANCELLED, CRASHED = 130, 70  # exit statuses


class Refused(Exception):
    """The library refused the model at a step, for these reasons."""

    def __init__(self, step: str, errors: list[dict[str, str]]) -> None:
        super().__init__(step)
        self.step, self.errors = step, errors


def main() -> None:
    """Build what standard input describes."""
    send = _make_sender()
    request: Request = json.loads(sys.stdin.buffer.readline())
    try:
        library = find(request["flavour"])
        if request["has_plugins"]:
            from irc.backends.tensorrt import plugins

            plugins.load(request["plugins"])
            plugins.register_creators(library.module)
    except Error as error:
        send(text=error.message)
        return
    # The library orders some values by their addresses, so an engine is reproducible only if its
    # memory has the same layout each time: a new thread has an allocation arena in which nothing
    # was freed yet, this thread only waits, and no garbage collection runs in between. Threads in
    # which the library converts constant weights still change it.
    gc.disable()
    _thread.start_new_thread(_work, (library.module, request, send))
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    Path(os.path.realpath(PART)).unlink(missing_ok=True)
    os._exit(CANCELLED)


def _make_sender() -> Send:
    """A function that writes events to standard output; what the library prints goes to stderr."""
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lock = threading.Lock()

    def send(**facts: Any) -> None:
        with lock:
            print(json.dumps(facts), file=events, flush=True)

    return send


def _work(trt: Any, request: Request, send: Send) -> None:
    status = CRASHED
    try:
        builder = Builder(trt, request, send)  # alive to the end: some orders of deletion crash
        send(**builder.last_event())
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Builder:
    """The library's objects for one engine."""

    def __init__(self, trt: Any, request: Request, send: Send) -> None:
        self.trt, self.request, self.send = trt, request, send
        self.listing, self.recorder = Listing(), make_error_recorder(trt)
        self.logger, self.monitor = make_logger(trt, self.listing.add), make_monitor(trt, send)
        self.builder = trt.Builder(self.logger)
        self.builder.error_recorder = self.recorder

    def last_event(self) -> dict[str, Any]:
        """The report of the engine, which is written, or why there is none."""
        event = self._event()
        if self.request["has_plugins"]:
            from irc.backends.tensorrt import plugins

            # The library prints what a plugin raises and continues, or fails without a reason.
            if (failure := plugins.take_failure()) is not None:
                text = str(failure) or type(failure).__name__
                return {"step": "running plugins", "errors": [_error(text)]}
        return event

    def _event(self) -> dict[str, Any]:
        try:
            self._build(self._parse(), self._configure())
            return {"report": self.listing.report(self.request).to_json()}
        except Refused as refused:
            return {"step": refused.step, "errors": refused.errors}
        except OSError as error:
            return {"text": error.strerror or str(error), "errno": error.errno}

    def _parse(self) -> Any:
        strict = getattr(self.trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        network = self.builder.create_network(0 if strict is None else 1 << int(strict))
        self.parser = self.trt.OnnxParser(network, self.logger)  # owns the weights that it mapped
        if not self.parser.parse(Path(MODEL).read_bytes(), f"{WEIGHTS}/{MODEL}"):
            errors = map(self.parser.get_error, range(self.parser.num_errors))
            raise Refused("parsing", [_error(reason(x.desc()), x.node_name()) for x in errors])
        if unused := _unused_inputs(network):
            raise Refused("parsing", unused)
        return network

    def _configure(self) -> Any:
        trt, request = self.trt, self.request
        config = self.config = self.builder.create_builder_config()
        config.progress_monitor = self.monitor
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        if request["workspace"] is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, request["workspace"])
        if request["architectures"]:
            config.num_compute_capabilities = len(request["architectures"])
            for i, chip in enumerate(request["architectures"]):
                config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{chip}"), i)
        for flag in request["flags"]:
            config.set_flag(getattr(trt.BuilderFlag, flag))
        for profile in request["profiles"]:
            shapes = self.builder.create_optimization_profile()
            for name, bounds in profile["shapes"].items():
                shapes.set_shape(name, *map(tuple, bounds))
            if config.add_optimization_profile(shapes) < 0:
                raise self._refused(f"adding the profile {profile['name']!r}")
        return config

    def _build(self, network: Any, config: Any) -> None:
        writer = _make_writer(self.trt, Path(PART))
        with writer.file:
            done = self.builder.build_serialized_network_to_stream(network, config, writer)
        if writer.problem is not None:
            raise writer.problem
        if not done or not Path(PART).stat().st_size:
            raise self._refused("building")
        self.send(fraction=1.0)

    def _refused(self, step: str) -> Refused:
        return Refused(step, [_error(text) for text in self.recorder.texts])


def _error(text: str, node: str = "", input: str = "") -> dict[str, str]:
    return {"node": node, "input": input, "text": text}


def _unused_inputs(network: Any) -> list[dict[str, str]]:
    """Errors about inputs from which no output is computed: the parser ignores some of nodes."""
    inputs_of: dict[str, list[str]] = {}
    for layer in map(network.get_layer, range(network.num_layers)):
        inputs = map(layer.get_input, range(layer.num_inputs))
        names = [tensor.name for tensor in inputs if tensor is not None]
        inputs_of |= {layer.get_output(i).name: names for i in range(layer.num_outputs)}
    pending = [network.get_output(i).name for i in range(network.num_outputs)]
    used: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in used:
            used.add(name)
            pending += inputs_of.get(name, ())
    unused = {network.get_input(i).name for i in range(network.num_inputs)} - used
    text = "the library ignores the input {}, so the engine would compute something else"
    return [_error(text.format(name), input=name) for name in sorted(unused)]


def _make_writer(trt: Any, path: Path) -> Any:
    class Writer(trt.IStreamWriter):
        """Writes the engine in pieces of up to 64 MiB."""

        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.file = path.open("wb")
            self.problem: OSError | None = None

        def write(self, data: Any) -> int:
            """The number of bytes written; fewer than given end the build."""
            try:
                return self.file.write(data)
            except OSError as error:
                self.problem = error
                return 0

    return Writer()


def make_monitor(trt: Any, send: Send) -> Any:
    """An `IProgressMonitor` that sends the fraction done in steps of half a percent. Phases nest:
    all of one is a part of the next step of the phase around it. The library calls it from several
    threads."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.phases: dict[str, list[int]] = {}  # [steps done, all steps] of the open ones
            self.sent, self.lock = 0.0, threading.Lock()

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            with self.lock:
                self.phases[name] = [0, max(1, steps)]

        def step_complete(self, name: str, step: int) -> bool:
            with self.lock:
                if name in self.phases:
                    self.phases[name][0] = step + 1
                fraction, part = 0.0, 1.0
                for done, steps in self.phases.values():
                    part /= steps
                    fraction += done * part
                if self.sent + 0.005 <= fraction <= 1:
                    self.sent = fraction
                    send(fraction=round(fraction, 3))
            return True

        def phase_finish(self, name: str) -> None:
            with self.lock:
                self.phases.pop(name, None)

    return Monitor()


if __name__ == "__main__":
    main()
