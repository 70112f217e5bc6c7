"""Runs engines: one rank per process and GPU, weights from the checkpoint, caches in place.

`load` is what the backend calls. A GPU is used through the protocols in
`irc.backends.cuda.driver`.
"""

from irc.backends.tensorrt.runtime.load import load
from irc.backends.tensorrt.runtime.program import EngineProgram

__all__ = ["EngineProgram", "load"]
