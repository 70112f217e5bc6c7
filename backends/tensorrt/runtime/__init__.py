"""Runs engines: one rank per process and GPU, weights from the checkpoint, caches in place.

`load` is what the backend calls. Everything is written against the protocol in driver.py.
"""

from irc.backends.tensorrt.runtime.driver import Driver, Drivers
from irc.backends.tensorrt.runtime.load import load
from irc.backends.tensorrt.runtime.program import EngineProgram, EngineStream

__all__ = ["Driver", "Drivers", "EngineProgram", "EngineStream", "load"]
