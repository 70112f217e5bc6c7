"""Layers to build models from. Their parameters have the names of Hugging Face checkpoints."""

from .attention import Attention as Attention
from .attention import Cache as Cache
from .basic import Embedding as Embedding
from .basic import GroupNorm as GroupNorm
from .basic import LayerNorm as LayerNorm
from .basic import Linear as Linear
from .basic import RmsNorm as RmsNorm
from .embedding import All2AllDenseEmbedding as All2AllDenseEmbedding
from .embedding import SlotEmbedding as SlotEmbedding
from .index import FrozenIndex as FrozenIndex
from .index import frozen_levels as frozen_levels
from .masks import BlockSparse as BlockSparse
from .mlp import MLP as MLP
from .mlp import GatedMLP as GatedMLP
from .mlp import activation as activation
from .moe import Experts as Experts
from .moe import MixtureOfExperts as MixtureOfExperts
from .positions import RelativePositions as RelativePositions
from .rope import Rope as Rope
from .tables import Table as Table
from .tables import export_table as export_table
from .tables import import_table as import_table
