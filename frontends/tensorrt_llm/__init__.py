"""The API of TensorRT-LLM's TensorRT workflow, traced into irc."""

from . import functional as functional
from .context import Session as Session
from .context import current_session as current_session
from .context import new_session as new_session
from .dtypes import DataType as DataType
from .merge import merge as merge
from .module import Module as Module
from .module import ModuleList as ModuleList
from .module import Parameter as Parameter
from .network import Network as Network
from .network import default_net as default_net
from .network import default_trtnet as default_trtnet
from .network import net_guard as net_guard
from .settings import PluginConfig as PluginConfig
from .tensor import Tensor as Tensor
