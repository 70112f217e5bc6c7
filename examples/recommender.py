"""An example of a ranking model: DLRM, with one table of 64-bit keys for all its categories.

    irc compile examples/recommender.py --checkpoint examples/recommender -o build/recommender
    irc compile examples/recommender.py --checkpoint examples/recommender -o build/on3 \
        --mesh dp=3 --embedding kd

Every rank has rows of the batch and a third of the table; --embedding kd exchanges keys and rows.
`train_recommender.py` made the weights in `recommender/`.
"""

from itertools import pairwise

import irc
from irc.frontends import Module, ModuleList
from irc.frontends import functional as F
from irc.frontends.layers import All2AllDenseEmbedding, Linear

PADDING = -1  # fills slots that have fewer keys than others


class Layers(Module):
    """Linear layers with a relu between them."""

    def __init__(self, *sizes):
        self.layers = ModuleList(Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class Recommender(Module):
    """The probability of a click, from numbers and from the keys of `slots` categories."""

    def __init__(self, vocabulary, slots, nnz, dense, size, hidden):
        self.table = All2AllDenseEmbedding(
            vocabulary, size, slots, nnz, combiner="mean", padding_key=PADDING
        )
        self.bottom = Layers(dense, hidden, size)
        pairs = slots * (slots + 1) // 2
        self.top = Layers(size + pairs, hidden, 1)

    def forward(self, dense, keys):
        x = self.bottom(dense)
        vectors = F.concat([x.unsqueeze(1), self.table(keys)], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        pairs = [products[:, i, :i] for i in range(1, vectors.shape[1])]
        return {"click": F.sigmoid(self.top(F.concat([x, *pairs], dim=-1)).squeeze(-1))}


def model(vocabulary=420, slots=4, nnz=3, dense=6, size=16, hidden=32):
    """The model before it is traced."""
    return Recommender(vocabulary, slots, nnz, dense, size, hidden)


def build(slots: int = 4, nnz: int = 3, dense: int = 6):
    """The traced model, its weights unbound."""
    inputs = {"dense": irc.Spec("f32", ("B", dense)), "keys": irc.Spec("i64", ("B", slots, nnz))}
    return irc.trace(model(slots=slots, nnz=nnz, dense=dense), inputs, {"B": (1, 64, 1024)})
