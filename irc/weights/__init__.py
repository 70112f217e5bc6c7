"""Weight references: a source of bytes, such as a tensor of a file, and steps that transform it.

A source is a tensor in a file, bytes of a file, joined references, a tensor computed from others,
zeros, seeded random numbers, or an unbound name. A reference never holds the bytes;
`irc.weights.checkpoint` reads them.
"""

from .computed import ComputedRef as ComputedRef
from .computed import LowRankSumRef as LowRankSumRef
from .computed import ProductRef as ProductRef
from .computed import QuantizedRef as QuantizedRef
from .computed import ReciprocalRef as ReciprocalRef
from .computed import RepeatedRef as RepeatedRef
from .computed import SortingRef as SortingRef
from .computed import StridedRef as StridedRef
from .computed import TakenRef as TakenRef
from .computed import UnpackedRef as UnpackedRef
from .computed import is_computed as is_computed
from .sources import BytesRef as BytesRef
from .sources import ConcatRef as ConcatRef
from .sources import FileRef as FileRef
from .sources import RandomRef as RandomRef
from .sources import Ref as Ref
from .sources import UnboundRef as UnboundRef
from .sources import ZerosRef as ZerosRef
from .sources import check_steps as check_steps
from .sources import ref_dtype as ref_dtype
from .sources import ref_shape as ref_shape
from .sources import with_shape as with_shape
from .steps import Cast as Cast
from .steps import Cyclic as Cyclic
from .steps import Pad as Pad
from .steps import Shard as Shard
from .steps import Slice as Slice
from .steps import Step as Step
from .steps import Transpose as Transpose
from .steps import Unsqueeze as Unsqueeze
