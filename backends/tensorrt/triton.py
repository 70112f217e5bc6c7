"""An artifact as a model repository of Triton Inference Server: plans and config.pbtxt.

One rank is a model on one GPU, whose caches Triton keeps per sequence. Several ranks are one
instance on as many GPUs, with a plan per rank: the multi-device form that the tensorrt backend of
Triton describes in its docs/multi_device.md (2026). Nothing of this has been served from here.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from irc.backends.base import Ports, ports_of
from irc.backends.onnx.stages import stage_count
from irc.backends.tensorrt.lowering.collectives import verdict
from irc.backends.tensorrt.nodes import COLLECTIVE_PLUGIN
from irc.backends.tensorrt.target import Target
from irc.core import Module
from irc.errors import Error

_TYPES = {
    "f32": "FP32",
    "f16": "FP16",
    "bf16": "BF16",
    "i64": "INT64",
    "i32": "INT32",
    "i8": "INT8",
    "u8": "UINT8",
    "bool": "BOOL",
}
_VERSION = "1"


def check(module: Module, plugins: Iterable[str]) -> None:
    """An Error where no Triton could serve the engines of a prepared module; `plugins` are those
    that their graphs have."""
    ports = ports_of(module.main)
    for port in (*ports.inputs, *ports.states, *ports.outputs):
        if port.dtype not in _TYPES:
            raise Error(f"Triton has no dtype for {port.name}, which is {port.dtype}")
    if module.mesh.ranks > 1:
        _check_ranks(module, ports)
    for plugin in plugins:
        raise Error(
            f"the engines would have the plugin {plugin}, which is Python and Triton does not "
            f"load; {_ADVICE if plugin == COLLECTIVE_PLUGIN else 'compile without it'}"
        )


_ADVICE = (
    "let all collectives be TensorRT's own: a mesh with one axis has them, without "
    "--collectives plugin"
)


def _check_ranks(module: Module, ports: Ports) -> None:
    """What holds where every rank gets the inputs of the first, whose outputs are the answer."""
    if stage_count(module.mesh) > 1:
        raise Error("Triton has no pipeline of stages; compile with a mesh without pp")
    if ports.states:
        raise Error(
            "Triton gives every rank the inputs of rank 0, caches too, and every rank has other "
            "heads: let Triton serve a model with caches from one rank, or serve it with irc"
        )
    for name in module.main.layouts:
        raise Error(
            "Triton gives every rank the inputs of rank 0 and answers with its outputs, and "
            f"{name} is split over the ranks; compile for one rank, or with a mesh of tp alone"
        )


def check_place(output: Path, artifact: Path) -> None:
    """An Error where a model repository cannot be at `output`, beside an artifact."""
    if output.exists() and not output.is_dir():
        raise Error(f"{output} is a file; choose another folder with --triton")
    if output.resolve().is_relative_to(artifact.resolve()):
        raise Error(
            f"the model repository {output} would lie in the artifact's folder {artifact}, which "
            "is replaced whole; choose a folder outside it with --triton"
        )


def write(folder: Path, manifest: Mapping[str, Any], output: Path) -> list[str]:
    """Write `output/NAME/config.pbtxt` and the plans beside it, NAME being the artifact folder's.

    Of an artifact that `check` has nothing against. Returns sentences about what Triton must have
    for this; they also stand in config.pbtxt.
    """
    facts: Mapping[str, Any] = manifest["program"]
    name = re.sub(r"\W+", "_", folder.resolve().name).strip("_") or "model"
    needs = _needs(facts)
    lines = [f"# Written by irc {manifest['irc']} from an artifact."]
    lines += [f"# {each}" for each in needs]
    lines += _config(name, facts)
    try:
        (output / name / _VERSION).mkdir(parents=True, exist_ok=True)
        (output / name / "config.pbtxt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        _place(folder, facts["ranks"], output / name / _VERSION)
    except OSError as error:
        raise Error(f"cannot write {error.filename or output}: {error.strerror}") from error
    return needs


def _needs(facts: Mapping[str, Any]) -> list[str]:
    needs: list[str] = []
    target = Target.parse(facts["target"])
    if target.flavour != "tensorrt":
        needs.append(
            f"warning: the plans are of {target.flavour}: Triton's tensorrt backend must be built "
            "with it, or compile with --backend tensorrt"
        )
    if len(facts["ranks"]) > 1:
        needs.append(
            "warning: Triton's tensorrt backend must be built with "
            "TRITON_ENABLE_TENSORRT_MULTI_DEVICE=ON"
        )
    known = verdict("all_reduce", target)
    if any(stage["natives"] for stage in facts["stages"]) and not known.good:
        needs.append(
            "warning: collectives are TensorRT's own, and Triton runs no self-test of them; "
            f"{known.reason}"
        )
    return needs


def _config(name: str, facts: Mapping[str, Any]) -> list[str]:
    stage, ranks = facts["stages"][0], len(facts["ranks"])
    ports = stage["ports"]
    states = {each["state"]: each["output"] for each in stage["results"] if each.get("state")}
    outputs = {each["result"]: each["output"] for each in stage["results"]}
    lines = [f'name: "{name}"', 'backend: "tensorrt"', "max_batch_size: 0"]
    lines += _listed("input", [_tensor(port["name"], port) for port in ports["inputs"]])
    lines += _listed("output", [_tensor(outputs[port["name"]], port) for port in ports["outputs"]])
    if states:
        kept = [_state(port, states[port["name"]], stage["profiles"]) for port in ports["states"]]
        lines += ["sequence_batching {", "  direct { }", *_indented(_listed("state", kept)), "}"]
    if ranks == 1:
        return lines + _one_gpu(stage["profiles"])
    return lines + _several_gpus(ranks, stage["profiles"])


def _one_gpu(profiles: Sequence[Mapping[str, Any]]) -> list[str]:
    """An instance on the first GPU under all profiles; the first, of decoding, as a graph."""
    names = ", ".join(f'"{number}"' for number in range(max(1, len(profiles))))
    group = f"count: 1  kind: KIND_GPU  gpus: [ 0 ]  profile: [ {names} ]"
    lines = _listed("instance_group", [[group]])
    if not profiles:
        return [*lines, "optimization { cuda { graphs: true } }"]
    shapes = profiles[0]["shapes"]
    spec = ["batch_size: 0"]
    for name, (_, typical, _) in shapes.items():
        dims = ", ".join(map(str, typical))
        spec.append(f'input {{ key: "{name}" value {{ dim: [ {dims} ] }} }}')
    inner = ["graphs: true", *_listed("graph_spec", [spec])]
    return [*lines, "optimization {", "  cuda {", *_indented(inner, 4), "  }", "}"]


def _several_gpus(ranks: int, profiles: Sequence[Mapping[str, Any]]) -> list[str]:
    """One instance on GPU 0 to N-1. It has one profile: the last, which takes all sizes."""
    group = "count: 1  kind: KIND_MODEL"
    if profiles:
        group += f'  profile: [ "{len(profiles) - 1}" ]'
    gpus = ",".join(map(str, range(ranks)))
    values = {
        "enable_multi_device": "true",
        "multi_device_gpus": gpus,
        "multi_device_per_rank_engines": "true",
    }
    entries = [
        [f'key: "{key}"  value: {{ string_value: "{value}" }}'] for key, value in values.items()
    ]
    return _listed("instance_group", [[group]]) + _listed("parameters", entries)


def _tensor(name: str, port: Mapping[str, Any]) -> list[str]:
    dims = ", ".join(str(dim) if isinstance(dim, int) else "-1" for dim in port["shape"])
    kind = f"data_type: TYPE_{_TYPES[port['dtype']]}"
    return [f'name: "{name}"', kind, f"dims: [ {dims} ]"]


def _state(
    port: Mapping[str, Any], output: str, profiles: Sequence[Mapping[str, Any]]
) -> list[str]:
    """A cache that is one piece of memory for input and output, of zeros when a sequence begins."""
    shape = port["shape"]
    if profiles and port["name"] in profiles[0]["shapes"]:
        shape = profiles[0]["shapes"][port["name"]][0]
    dims = f"dims: [ {', '.join(map(str, shape))} ]"
    kind = f"data_type: TYPE_{_TYPES[port['dtype']]}"
    begin = f'initial_state {{ {kind}  {dims}  zero_data: true  name: "zeros" }}'
    return [
        f'input_name: "{port["name"]}"',
        f'output_name: "{output}"',
        kind,
        dims,
        "use_same_buffer_for_input_output: true",
        begin,
    ]


def _listed(key: str, entries: Sequence[Sequence[str]]) -> list[str]:
    """`key [ {...}, {...} ]`, an entry per block."""
    lines = [f"{key} ["]
    for number, entry in enumerate(entries):
        end = "  }," if number < len(entries) - 1 else "  }"
        lines += ["  {", *_indented(entry, 4), end]
    return [*lines, "]"]


def _indented(lines: Sequence[str], by: int = 2) -> Iterator[str]:
    return (" " * by + line for line in lines)


def _place(folder: Path, ranks: Sequence[Mapping[str, Any]], version: Path) -> None:
    """The engines, as other names of the same files where the file system can do that."""
    several = len(ranks) > 1
    for rank, entry in enumerate(ranks):
        _link(folder / entry["engine"], version / (f"model.plan.rank{rank}" if several else _PLAN))
    if several:
        plan = version / _PLAN  # Triton looks for it, and loads those of the ranks
        plan.unlink(missing_ok=True)
        plan.symlink_to("model.plan.rank0")


_PLAN = "model.plan"


def _link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)
