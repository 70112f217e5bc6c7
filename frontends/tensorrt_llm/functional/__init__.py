"""Functions over the tensors of a network, by the names of TensorRT-LLM."""

from .. import arithmetic as arithmetic
from .collectives import AllReduceConfig as AllReduceConfig
from .collectives import AllReduceFusionOp as AllReduceFusionOp
from .collectives import AllReduceParams as AllReduceParams
from .collectives import AllReduceStrategy as AllReduceStrategy
from .collectives import allgather as allgather
from .collectives import allreduce as allreduce
from .collectives import recv as recv
from .collectives import reduce_scatter as reduce_scatter
from .collectives import send as send
from .lookup import embedding as embedding
