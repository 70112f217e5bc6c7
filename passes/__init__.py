"""Transformations of modules: one file per pass. Importing this registers them all."""

if __name__ != "irc.passes":
    raise ImportError("import irc.passes, not passes: a bare import loads a second copy")

from . import canonicalize as canonicalize
from . import convert_floats as convert_floats
from . import cse as cse
from . import dce as dce
from . import embeddings as embeddings
from . import expand as expand
from . import fold as fold
from . import fuse_collectives as fuse_collectives
from . import fuse_gated_mlp as fuse_gated_mlp
from . import fuse_linears as fuse_linears
from . import fuse_norm as fuse_norm
from . import inline as inline
from . import localize as localize
from . import next_tokens as next_tokens
from . import pipeline_parallel as pipeline_parallel
from . import quantize as quantize
from . import shard as shard
from . import static_capacity as static_capacity
