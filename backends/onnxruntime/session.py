"""Makes an ONNX Runtime session of an emitted model, with its weights wherever they lie."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime

from irc.errors import Error

_FOLDER = "session.model_external_initializers_file_folder_path"
_SILENT = 4  # severity: errors reach the user as Error, not as lines on stderr


def open_session(
    folder: Path, facts: Mapping[str, Any], threads: int | None, low_memory: bool
) -> onnxruntime.InferenceSession:
    """The session of rank 0. `facts` is what the ONNX backend's `emit` returned."""
    path = folder / facts["models"][0]
    base, files, own = facts["external"]["base"], facts["external"]["files"], facts["weights"]
    _check_files([path, *(folder / name for name in own), *(Path(base, f) for f in files)])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or usable_cores()
    options.inter_op_num_threads = 1
    options.log_severity_level = _SILENT
    if low_memory:
        # Weights stay pages of their files, shared by processes; runs are about a fifth slower.
        options.add_session_config_entry("session.disable_prepacking", "1")
    model: str | bytes = os.fspath(path)
    if files:
        model = path.read_bytes()
        root = os.path.realpath(base)
        if own:
            root = os.path.commonpath([root, os.path.realpath(folder)])
            model = _relocated(
                path.read_bytes(), root, os.path.realpath(base), os.path.realpath(folder), own
            )
        options.add_session_config_entry(_FOLDER, root)
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # each failure has a class of its own, with no common base
        raise Error(f"ONNX Runtime cannot load {path}: {first_line(error)}") from error


def _check_files(paths: list[Path]) -> None:
    for path in paths:
        if not path.is_file():
            raise Error(
                f"{path} is missing; put it back, or compile again (--bundle copies weights)"
            )


def _relocated(data: bytes, root: str, base: str, folder: str, own: list[str]) -> bytes:
    """The model with all locations relative to one folder above the checkpoint and ours."""
    from onnx.onnx_ml_pb2 import ModelProto

    model = ModelProto.FromString(data)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                start = folder if entry.value in own else base
                entry.value = os.path.relpath(os.path.join(start, entry.value), root)
    return model.SerializeToString(deterministic=True)


def first_line(error: Exception) -> str:
    """What ONNX Runtime says, without the lines that repeat it."""
    return str(error).strip().split("\n")[0]


def usable_cores() -> int:
    """Physical cores that this process may use; on a virtual machine, its CPUs.

    The core numbers that a hypervisor shows are made up: two CPUs often look like one core.
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
