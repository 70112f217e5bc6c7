"""Weight references: which bytes of which checkpoint file, and the steps that make the tensor.

A reference is a source (a tensor in a file, or at a byte of it, references joined, zeros, seeded
random numbers, or nothing yet) followed by steps. It never holds the bytes; `irc.checkpoint` reads
them.
"""

from .shapes import Known as Known
from .shapes import ref_dtype as ref_dtype
from .shapes import ref_shape as ref_shape
from .shapes import sources_of as sources_of
from .simplify import simplified as simplified
from .sources import BytesRef as BytesRef
from .sources import ConcatRef as ConcatRef
from .sources import FileRef as FileRef
from .sources import RandomRef as RandomRef
from .sources import Ref as Ref
from .sources import UnboundRef as UnboundRef
from .sources import ZerosRef as ZerosRef
from .sources import pinned as pinned
from .steps import Cast as Cast
from .steps import Deal as Deal
from .steps import Pad as Pad
from .steps import Shard as Shard
from .steps import Slice as Slice
from .steps import Step as Step
from .steps import Transpose as Transpose
from .steps import Unsqueeze as Unsqueeze
from .steps import step_shape as step_shape
