"""All tables of elements: importing this registers them."""

from . import elementwise as elementwise
from . import layout as layout
from . import rope as rope
