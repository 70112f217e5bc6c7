"""The two backends as they are named on the command line."""

from irc.backends.tensorrt.backend import TensorRTBackend

tensorrt = TensorRTBackend("tensorrt")
tensorrt_rtx = TensorRTBackend("tensorrt-rtx")
