"""Imports the modules that declare names of the API."""

from . import builder as builder
from . import functional as functional
from . import layers as layers
from . import mapping as mapping
from . import models as models
from . import module as module
from . import network as network
from . import quantization as quantization
from . import runtime as runtime
from . import utilities as utilities
