"""An example of a retrieval model: users and items become vectors, whose cosine is the score.

    irc compile examples/two_tower.py --random-weights 1 -o build/two_tower

Out-of-range indices, such as the -1 that pads a bag, give zeros.
"""

from itertools import pairwise

import irc
from irc.frontends import Module, ModuleList
from irc.frontends import functional as F
from irc.frontends.layers import Embedding, LayerNorm, Linear


class Bag(Module):
    """The mean of the rows of a table at the indices of a row of ids."""

    def forward(self, ids, table):
        present = (ids >= 0).cast(table.weight.dtype)
        count = present.sum(-1, keep=True)
        return table(ids).sum(-2) / F.maximum(count, 1.0)


class Tower(Module):
    """Features to a unit vector."""

    def __init__(self, features, widths):
        sizes = [features, *widths]
        self.norm = LayerNorm(features)
        self.layers = ModuleList(Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x):
        x = self.norm(x)
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        x = self.layers[-1](x)
        return x / F.sqrt((x * x).sum(-1, keep=True) + 1e-12)


class TwoTower(Module):
    """The scores of all pairs of a user and an item; both use the table of items."""

    def __init__(self, users, items, categories, dense, size, widths):
        self.users = Embedding(users, size)
        self.items = Embedding(items, size)
        self.categories = Embedding(categories, size)
        self.bag = Bag()
        self.user_tower = Tower(2 * size + dense, widths)
        self.item_tower = Tower(2 * size, widths)

    def forward(self, user_ids, history, user_features, item_ids, item_categories):
        seen = self.bag(history, self.items)
        user = self.user_tower(F.concat([self.users(user_ids), seen, user_features], dim=-1))
        kinds = self.bag(item_categories, self.categories)
        item = self.item_tower(F.concat([self.items(item_ids), kinds], dim=-1))
        return {"scores": user @ item.transpose(0, 1), "user": user, "item": item}


def build(
    users: int = 1000,
    items: int = 5000,
    categories: int = 40,
    dense: int = 8,
    size: int = 32,
    widths: tuple[int, ...] = (128, 64),
):
    """The traced model, its weights unbound."""
    inputs = {
        "user_ids": irc.Spec("i32", ("B",)),
        "history": irc.Spec("i32", ("B", "H")),
        "user_features": irc.Spec("f32", ("B", dense)),
        "item_ids": irc.Spec("i32", ("N",)),
        "item_categories": irc.Spec("i32", ("N", "K")),
    }
    dims = {"B": (1, 16, 256), "H": (1, 20, 200), "N": (1, 100, 1000), "K": (1, 3, 10)}
    model = TwoTower(users, items, categories, dense, size, widths)
    return irc.trace(model, inputs, dims)
