"""`Family`: all that irc knows of one family of models, and the registry that finds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from ...errors import Error
from ...extensions.entry_points import load_installed
from ...extensions.user_files import defining_modules, watch
from ...ir import core
from ...json_files import read_object
from ...weights import Ref
from ..module import Module
from ..trace import Spec, trace
from .config_reader import HARMLESS, ConfigReader
from .stored import Layout, laid_out, stored_references

GROUP = "irc.models"  # the entry-point group of modules that register families
Config = TypeVar("Config")
_SHARED = ("tie_word_embeddings",)  # keys beside the object `inside` that count, not its own
Dims = Mapping[str, tuple[int, int, int]]  # (min, typical, max) of each symbol


@dataclass(frozen=True)
class Signature:
    """The arguments of @forward, the ranges of their symbols, and result -> aliased argument."""

    inputs: Mapping[str, Spec]
    dims: Dims
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])


def _no_alternatives(config: Any) -> Mapping[str, Ref]:
    return {}


@dataclass(frozen=True)
class Family(Generic[Config]):
    """A family of models: how its config.json is read, and what module it describes.

    `architectures` are the class names of transformers that `build` computes; the first is the
    default. `read` makes the sizes from config.json, whose `architecture` is one of them, `build`
    the module from sizes and dtype; `signature` gives the arguments of `forward`, for causal
    language models `language_model.signature`. `stored` has an entry for every parameter that is
    not named, or not laid out, as in the checkpoint. `alternatives` maps a weight to where a
    checkpoint may have it instead: a tied weight under its other name, a tensor stored joined. All
    tensors of a checkpoint may begin with another one of `prefixes` than the first. Tensors whose
    names match `unused` belong to parts of a checkpoint that irc does not compute, such as a vision
    tower; then config.json has the keys of the rest in its object `inside`, such as text_config.
    `parts` are the programs of a checkpoint that has several, by name: an encoder and a decoder.
    """

    model_type: str
    architectures: Sequence[str]
    read: Callable[[ConfigReader], Config]
    build: Callable[[Config, str], Module]
    signature: Callable[[Config, str], Signature]
    alternatives: Callable[[Config], Mapping[str, Ref]] = _no_alternatives
    stored: Layout = ()
    prefixes: Sequence[str] = ("",)
    unused: Sequence[str] = ()
    inside: str = ""
    parts: Mapping[str, Family[Config]] = field(default_factory=dict[str, Any])

    def part(self, name: str) -> Family[Config]:
        """The program of this name; the family itself where the name is empty."""
        if name and name not in self.parts:
            has = f"its parts are {', '.join(self.parts)}" if self.parts else "it has no parts"
            raise Error(f"model_type {self.model_type} has no part {name!r}; {has}")
        return self.parts[name] if name else self

    def read_config(self, values: Mapping[str, Any], ignore: Sequence[str] = ()) -> Config:
        """The sizes in a config.json; an Error lists keys that are neither read nor ignored."""
        reader = self._reader(values, ignore)
        config = self.read(reader)
        reader.finish(f"model_type {self.model_type}", HARMLESS.union(ignore))
        return config

    def unread(self, values: Mapping[str, Any]) -> list[str]:
        """The keys of the config.json of another family that have no meaning in this one."""
        reader = self._reader(values)
        self.read(reader)
        return [*reader.unread(HARMLESS)]

    def _reader(self, values: Mapping[str, Any], ignore: Sequence[str] = ()) -> ConfigReader:
        names = [] if "architectures" in ignore else ConfigReader(values).words("architectures")
        chosen = next((name for name in names if name in self.architectures), None)
        if self.inside:
            shared = {key: values[key] for key in _SHARED if key in values}
            values = {**ConfigReader(values).inner(self.inside), **shared}
        return ConfigReader(values, architecture=chosen or self.architectures[0])

    def trace(
        self, config: Config, dtype: str = "f32", dims: Dims | None = None, name: str | None = None
    ) -> core.Module:
        """The module, its weights unbound; `dims` replaces ranges of symbols."""
        signature = self.signature(config, dtype)
        ranges = {**signature.dims, **(dims or {})}
        model = self.build(config, dtype)
        name = name or self.model_type.replace("-", "_")
        module = trace(model, signature.inputs, ranges, name, signature.aliases)
        for weight, ref in stored_references(module.weights, laid_out(self.stored, config)).items():
            module.weights[weight].ref = ref
        return module


_FACTS = ("states", "dtypes", "meshes", "schemes")
_FEW = 5  # keys that a near family may lack
_LISTED = "irc models lists those that irc loads"
_OTHERWISE = (
    "Add the family in a Python file, as examples/custom_llm.py does, and give --load FILE; or "
    "export the model with torch.onnx.export, and compile that: irc compile MODEL.onnx"
)

# (model_type, architecture) -> family, in the order of registration
FAMILIES: dict[tuple[str, str], Family[Any]] = {}
watch("model", FAMILIES, lambda family: defining_modules(family.read, family.build))


def register(family: Family[Config]) -> Family[Config]:
    """Make a family known for its model_type and architectures, and return it."""
    for architecture in family.architectures:
        key = (family.model_type, architecture)
        if key in FAMILIES:
            raise Error(f"a family for {architecture} ({family.model_type}) is registered already")
        FAMILIES[key] = family
    return family


def register_inside(
    text: Family[Config], model_type: str, architecture: str, unused: str
) -> Family[Config]:
    """Register the models whose text is computed as those of `text` are.

    `unused` are patterns of the tensors of other parts, separated by spaces.
    """
    return register(
        replace(
            text,
            model_type=model_type,
            architectures=(architecture,),
            prefixes=("model.", "language_model.model.", "model.language_model."),
            unused=(*text.unused, *unused.split()),
            inside="text_config",
        )
    )


def described() -> dict[str, dict[str, Any]]:
    """By model_type: its architectures, and the row of checked.json, which tests derive.

    A family of a user has no row: its kind is "", and nothing of it is checked.
    """
    load_installed(GROUP)
    checked = read_object(Path(__file__).with_name("checked.json"))
    rows: dict[str, dict[str, Any]] = {}
    for model_type, architecture in sorted(FAMILIES):
        facts = checked.get(model_type, {"kind": "", **{key: [] for key in _FACTS}})
        row = rows.setdefault(model_type, {"model_type": model_type, "architectures": [], **facts})
        row["architectures"].append(architecture)
    return rows


def find_family(values: Mapping[str, Any], ignore: Sequence[str] = ()) -> Family[Any]:
    """The family of a config.json, by its model_type and architectures."""
    load_installed(GROUP)
    reader = ConfigReader(values)
    model_type = reader.word("model_type", None)
    names = [] if "architectures" in ignore else reader.words("architectures")
    if model_type is None and not names:
        raise Error(f"config.json has no model_type and no architectures; {_LISTED}")
    of_type = {name: f for (t, name), f in FAMILIES.items() if model_type in (None, t)}
    if not of_type:
        near = _nearest(values)
        raise Error(f"irc has no model of model_type {model_type!r}; {_LISTED}. {near}{_OTHERWISE}")
    for name in names:
        if name not in of_type:
            expected = _LISTED if model_type is None else f"expected {' or '.join(of_type)}"
            raise reader.error("architectures", f"{expected}. {_OTHERWISE}")
    return of_type[names[0]] if names else next(iter(of_type.values()))


def _nearest(values: Mapping[str, Any]) -> str:
    """A sentence about the family that has nearly all keys of a config.json, if one reads it."""
    values = {**values, **ConfigReader(values).inner("text_config"), "text_config": None}
    best: tuple[str, list[str]] | None = None
    for family in FAMILIES.values():
        if family.inside:
            continue  # another family reads the object that is in front here
        try:
            unread = family.unread(values)
        except Error:
            continue  # it lacks sizes that this family has
        if best is None or len(unread) < len(best[1]):
            best = family.model_type, unread
    if best is None or len(best[1]) > _FEW:
        return ""
    keys = f"which does not have {', '.join(best[1])}" if best[1] else "which has the same keys"
    return f"Its nearest family is {best[0]}, {keys}. "
