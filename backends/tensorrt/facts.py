"""What the manifest says about engines, and the files that locate weights.

Besides the keys of backends/onnx/facts.py, whose dtypes are here the module's own:

    target, weights, plugins    the Target, "inside" or "outside", {plugin: version}
    collectives    "plugin" if any is the plugin's, else "native"
    probe    null, or {model, engine} of a sum over the ranks of a stage, see probe.py
    engine    the options of engines that recompiling keeps
    ranks    also engine (null if it is not built) and bindings, the name of a file of {input:
             {dtype, shape, file, under, offset, bytes}}, `under` "base" or "folder"; null for
             weights inside
    stages   also profiles [{name, shapes: {input: [min, opt, max]}}]; scalars {input: axes}, whose
             value is the rank's position along them; groups {key: axes}, the communicators;
             natives, whether there are collectives of TensorRT's own; copied, the states that the
             network returns in other memory than it took them in; report, a file or null
    self_test   null, {ids, top, logits, tolerance}, or for a model that returns tokens in place of
             logits {prompts: [{ids, token}]}; see golden.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnx.onnx_ml_pb2 import TensorProto

from irc.backends.onnx.facts import facts_of
from irc.backends.onnx.stages import Stage
from irc.backends.onnx.storage import Locations
from irc.backends.tensorrt.builder.request import Profile
from irc.backends.tensorrt.lowering.emitter import TensorRTEmitter
from irc.errors import Error
from irc.ir.core import Module

BINDINGS = "rank{}.bindings.json"


def base_facts(
    module: Module,
    stages: Sequence[Stage],
    emitters: Sequence[TensorRTEmitter],
    found: Locations,
    profiles: Sequence[Sequence[Profile]],
) -> dict[str, Any]:
    """The facts known before models and engines are written."""
    facts = facts_of(module, module.main, stages, emitters, found)
    for entry, emitter, each in zip(facts["stages"], emitters, profiles, strict=True):
        entry["grows"] = None
        entry["profiles"] = [profile.to_json() for profile in each]
        entry["scalars"] = {name: list(axes) for name, axes in emitter.scalars.items()}
        entry["groups"] = {key: list(axes) for key, axes in emitter.communicators.items()}
        entry["natives"] = emitter.natives > 0
        states = [each["state"] for each in entry["results"] if "state" in each]
        entry["copied"] = [name for name in states if name not in emitter.in_place]
        entry["report"] = None
    for entry in facts["ranks"]:
        entry |= {"engine": None, "bindings": None}
    return facts


def write_bindings(
    folder: Path, rank: int, weights: Mapping[str, TensorProto], dtypes: Mapping[str, str],
    files: Sequence[str],
) -> str:  # fmt: skip
    """Write where the bytes of one rank's weights are; returns the file's name. `files` are those
    below the base."""
    found = {name: _binding(proto, dtypes[name], files) for name, proto in weights.items()}
    name = BINDINGS.format(rank)
    try:
        (folder / name).write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    except OSError as error:
        raise Error(f"cannot write {folder / name}: {error.strerror or error}") from error
    return name


def _binding(proto: TensorProto, dtype: str, files: Sequence[str]) -> dict[str, Any]:
    where = {entry.key: entry.value for entry in proto.external_data}
    file = where.get("location", "")
    return {
        "dtype": dtype,
        "shape": list(proto.dims),
        "file": file,
        "under": "base" if file in files else "folder",
        "offset": int(where.get("offset", 0)),
        "bytes": int(where.get("length", 0)),
    }
