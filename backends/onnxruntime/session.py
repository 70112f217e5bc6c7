"""Creates ONNX Runtime sessions of emitted models, with weights from any folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnxruntime
from onnx.onnx_ml_pb2 import ModelProto

from irc.backends.onnxruntime.grouped import with_grouped_attention
from irc.backends.onnxruntime.profile import PROVIDERS, Profiles
from irc.backends.onnxruntime.segments import Collective, Segment, divide, model_of, types_of
from irc.backends.recorder import Recorder
from irc.errors import Error

_FOLDER = "session.model_external_initializers_file_folder_path"
_SILENT = 4  # severity: errors reach the user as Error, not as lines on stderr
MOST_THREADS = 1024  # of the sessions of all segments of all ranks together


@dataclass(frozen=True)
class Part:
    """A session of a model, or of a segment of one."""

    session: onnxruntime.InferenceSession
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Parts:
    """A rank's model in steps; `unused`: per step, the operands that nothing needs after it.

    `names` are those of the model's inputs and outputs. `recorder` gets the collectives.
    """

    steps: tuple[Part | Collective, ...]
    unused: tuple[tuple[str, ...], ...]
    names: frozenset[str]
    recorder: Recorder | None = None


def open_parts(
    folder: Path,
    facts: Mapping[str, Any],
    rank: int,
    threads: int | None,
    low_memory: bool,
    recorder: Recorder | None = None,
) -> Parts:
    """The sessions of one rank. `facts` is what the ONNX backend's `emit` returned."""
    entry = facts["ranks"][rank]
    path = folder / entry["model"]
    base, files, own = facts["base"], entry["files"], entry["weights"]
    _check_files([path, *(folder / name for name in own), *(Path(base, f) for f in files)])
    data = path.read_bytes()
    # MatMulNBits is about 50 times slower without its own layout of the weights
    options = session_options(threads, low_memory and b"MatMulNBits" not in data)
    profiles = Profiles(recorder, rank) if recorder is not None else None
    root, beside = os.path.realpath(base if files else folder), os.path.realpath(folder)
    try:
        if files and own:
            root = os.path.commonpath([root, beside])
            data = _relocated(data, root, os.path.realpath(base), beside, own)
        options.add_session_config_entry(_FOLDER, root)
        data = with_grouped_attention(data)
        if len(facts["ranks"]) > 1:
            parts = _divided(data, options, len(facts["ranks"]), profiles)
            return replace(parts, recorder=recorder)
        session = _session(data, options, profiles)
    except Exception as error:  # each failure has a class of its own, with no common base
        raise Error(f"ONNX Runtime cannot load {path}: {first_line(error)}") from error
    inputs, outputs = session.get_inputs(), session.get_outputs()
    part = Part(session, tuple(i.name for i in inputs), tuple(o.name for o in outputs))
    return Parts((part,), ((),), frozenset([*part.inputs, *part.outputs]))


def session_options(threads: int | None, low_memory: bool) -> onnxruntime.SessionOptions:
    """Options of a session; `threads`: of one operation, by default one for each physical core."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or usable_cores()
    options.inter_op_num_threads = 1
    options.log_severity_level = _SILENT
    # By default ONNX Runtime also quantizes the other operand of quantized weights.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if low_memory:
        # Weights stay pages of their files, shared by processes; runs are about a fifth slower.
        options.add_session_config_entry("session.disable_prepacking", "1")
    return options


def _divided(
    data: bytes, options: onnxruntime.SessionOptions, ranks: int, profiles: Profiles | None
) -> Parts:
    """A session per segment; they share the weights' files but neither threads nor memory.

    So their threads sleep between runs, and the memory of a run is freed after it rather than kept
    by every session. (With 64 segments with two threads each, a pass over one token took 364 ms
    with spinning threads, 13 ms with sleeping ones, 11 ms with one pool for the whole process; but
    with that, ONNX Runtime refuses every session of other code that asks for threads of its own.)
    """
    model = ModelProto.FromString(data)
    segments, types = divide(model), types_of(model)
    most = 1 + MOST_THREADS // (ranks * max(1, len(segments)))  # none in a stage without results
    options.intra_op_num_threads = min(options.intra_op_num_threads, most)
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.enable_cpu_mem_arena = False
    steps = tuple(
        segment
        if isinstance(segment, Collective)
        else Part(
            _session(model_of(segment, model, types).SerializeToString(), options, profiles),
            tuple(segment.inputs),
            tuple(segment.outputs),
        )
        for segment in segments
    )
    outputs = {value.name for value in model.graph.output}
    names = outputs.union(value.name for value in model.graph.input)
    return Parts(steps, _unused(segments, {*outputs}), frozenset(names))


def _unused(steps: Sequence[Segment | Collective], needed: set[str]) -> tuple[tuple[str, ...], ...]:
    """Per step, the operands that nothing needs after it; `needed`: what is needed in the end."""
    last_uses: list[tuple[str, ...]] = []
    for step in reversed(steps):
        used = [step.operand] if isinstance(step, Collective) else step.inputs
        last_uses.append(tuple(name for name in used if name not in needed))
        needed.update(used)
    return tuple(last_uses[::-1])


def _session(
    data: bytes, options: onnxruntime.SessionOptions, profiles: Profiles | None
) -> onnxruntime.InferenceSession:
    if profiles is not None:
        return profiles.open(data, options)
    return onnxruntime.InferenceSession(data, options, PROVIDERS)


def _check_files(paths: list[Path]) -> None:
    for path in paths:
        if not path.is_file():
            raise Error(
                f"{path} is missing; put it back, or compile again (--bundle copies weights)"
            )


def _relocated(data: bytes, root: str, base: str, folder: str, own: list[str]) -> bytes:
    """The model with all locations relative to one folder above the checkpoint and ours."""
    model = ModelProto.FromString(data)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                start = folder if entry.value in own else base
                entry.value = os.path.relpath(os.path.join(start, entry.value), root)
    return model.SerializeToString(deterministic=True)


def first_line(error: Exception) -> str:
    """The message of ONNX Runtime, without the lines that repeat it."""
    return str(error).strip().split("\n")[0]


def usable_cores() -> int:
    """Physical cores that this process may use; on a virtual machine, its CPUs.

    The core numbers of a virtual machine are not real: two CPUs often look like one core.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if allowed is None or _is_virtual():
        return len(allowed) if allowed is not None else os.cpu_count() or 1
    cores = {_core(cpu) for cpu in allowed}
    return max(1, len(cores))


def _core(cpu: int) -> tuple[str, str]:
    folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return (folder / "physical_package_id").read_text(), (folder / "core_id").read_text()
    except OSError:
        return "", str(cpu)


def _is_virtual() -> bool:
    try:
        return " hypervisor" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
