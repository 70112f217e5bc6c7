"""Plugins for TensorRT, each described once by a `PluginSpec`, and IrcCollective, which irc ships.

`register_creators(trt)` registers them with a library, `load(paths)` runs files that add more,
`versions()` is what a manifest records, and `require(versions)` checks it before an engine is
loaded. The README of this folder is the guide.
"""

from __future__ import annotations

from . import collective as collective
from . import communicators as communicators
from .adapter import register_creators as register_creators
from .instance import Instance as Instance
from .instance import attributes_of as attributes_of
from .instance import fields_of as fields_of
from .instance import take_failure as take_failure
from .spec import SPECS as SPECS
from .spec import Field as Field
from .spec import Launch as Launch
from .spec import PluginSpec as PluginSpec
from .spec import Shape as Shape
from .spec import Tensor as Tensor
from .spec import TensorDesc as TensorDesc
from .spec import Values as Values
from .spec import display_name as display_name
from .spec import files_of as files_of
from .spec import find as find
from .spec import known as known
from .spec import load as load
from .spec import register as register
from .spec import require as require
from .spec import users as users
from .spec import versions as versions
