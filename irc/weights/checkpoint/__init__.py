"""Bytes of weights: any region of a reference, read from checkpoint files a block at a time."""

from .files import Extent as Extent
from .fill import convert as convert
from .reader import Reader as Reader
