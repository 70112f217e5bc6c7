"""Ways into the IR: traced scripts, layers, models and checkpoint folders."""

if __name__ != "irc.frontends":
    raise ImportError("import irc.frontends, not frontends: a bare import loads a second copy")

from .module import Module as Module
from .module import ModuleList as ModuleList
from .module import Parameter as Parameter
from .module import StackedParameter as StackedParameter
from .random_weights import random_weights as random_weights
from .tensor import Tensor as Tensor
from .trace import Spec as Spec
from .trace import trace as trace
