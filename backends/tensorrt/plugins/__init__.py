"""Plugins for TensorRT, each described once (`PluginSpec`), and IrcCollective, which irc brings.

`register_creators(trt)` makes a library know them, `load(paths)` reads files that register more,
`versions()` is what a manifest records and `require(versions)` what a runtime asks before it loads
an engine. See the guide in README.md of this folder.
"""

from __future__ import annotations

from . import collective, communicators
from .adapter import make_plugin, register_creators
from .describe import describe
from .expressions import known
from .fields import REQUIRED, Field, Values
from .instance import Instance, attributes_of, evaluate, fields_of, take_failure
from .load import files_of, load, users
from .schema import plugin_of_node, register_schemas
from .spec import (
    SPECS,
    Launch,
    PluginSpec,
    Shape,
    Tensor,
    TensorDesc,
    find,
    register,
    require,
    shown,
    versions,
)

__all__ = [
    "REQUIRED",
    "SPECS",
    "Field",
    "Instance",
    "Launch",
    "PluginSpec",
    "Shape",
    "Tensor",
    "TensorDesc",
    "Values",
    "attributes_of",
    "collective",
    "communicators",
    "describe",
    "evaluate",
    "fields_of",
    "files_of",
    "find",
    "known",
    "load",
    "make_plugin",
    "plugin_of_node",
    "register",
    "register_creators",
    "register_schemas",
    "require",
    "shown",
    "take_failure",
    "users",
    "versions",
]
