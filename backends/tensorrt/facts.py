"""What the manifest says about engines, and the files that locate weights.

Dtypes of ports are the module's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from onnx.onnx_ml_pb2 import TensorProto

from irc.analysis.stages import Stage
from irc.backends.onnx.facts import ProgramFacts, RankFact, StageFact, facts_of
from irc.backends.onnx.storage import Locations
from irc.backends.tensorrt.builder.request import Profile
from irc.backends.tensorrt.lowering.emitter import TensorRTEmitter
from irc.errors import Error
from irc.ir.core import Module

BINDINGS = "rank{}.bindings.json"


class ProfileFact(TypedDict):
    """The shapes that a profile allows, per dynamic input: [min, opt, max]."""

    name: str
    shapes: dict[str, list[list[int]]]


class EngineStage(StageFact):
    """A stage, with the profiles of its engines.

    `scalars`: inputs whose value is the rank's position along mesh axes; `groups`: the axes of each
    communicator; `copied`: the states that the network returns in other memory than it took
    them in; `report`: a file.
    """

    profiles: list[ProfileFact]
    scalars: dict[str, list[str]]
    groups: dict[str, list[str]]
    copied: list[str]
    report: str | None


class EngineRank(RankFact):
    """A rank with its engine, if it is built, and the file of its bindings for weights outside."""

    engine: str | None
    bindings: str | None


class Prompt(TypedDict):
    """A prompt with its next token."""

    ids: list[int]
    token: int


class SelfTest(TypedDict, total=False):
    """Prompts with their next tokens, or a prompt with its largest logits; see golden.py."""

    prompts: list[Prompt]
    ids: list[int]
    top: list[int]
    logits: list[float]
    tolerance: float


class Engines(TypedDict, total=False):
    """What the facts of an older irc say of engines too."""

    target: str
    engine: dict[str, Any]


class EngineFacts(ProgramFacts):
    """What the TensorRT backends' `emit` returns; `engine`: the options that recompiling keeps."""

    ranks: list[EngineRank]
    stages: list[EngineStage]
    target: str
    weights: Literal["inside", "outside"]
    plugins: dict[str, str]
    engine: dict[str, Any]
    self_test: SelfTest | None


class BindingFact(TypedDict):
    """Where a weight is: `bytes` bytes from `offset` of a file under the base or the folder."""

    dtype: str
    shape: list[int]
    file: str
    under: Literal["base", "folder"]
    offset: int
    bytes: int


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
