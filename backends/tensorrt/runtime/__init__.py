"""Runs engines: one rank per process and GPU, weights from the checkpoint, caches in place.

`load` is what the backend calls. The GPU, its memory, streams and NCCL are those of
`irc.backends.cuda.execute`.
"""

from irc.backends.tensorrt.runtime.load import load

__all__ = ["load"]
