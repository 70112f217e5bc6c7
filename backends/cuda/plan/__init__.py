"""Plans: what a function runs on a GPU at given sizes, in order, and where every value lies."""

from .core import Argument as Argument
from .core import Buffer as Buffer
from .core import Kernel as Kernel
from .core import Launch as Launch
from .core import Library as Library
from .core import LibraryCall as LibraryCall
from .core import Place as Place
from .core import Plan as Plan
from .core import Step as Step
from .template import KERNELS as KERNELS
from .template import LAUNCHES as LAUNCHES
from .template import AnyTemplate as AnyTemplate
from .template import CallTemplate as CallTemplate
from .template import Template as Template
from .template import kernels_of as kernels_of
from .template import launches_of as launches_of
