"""Trains the model of recommender.py on made-up clicks, and writes recommender/model.safetensors.

    python examples/train_recommender.py

Users of SparseOperationKit read their table from a dump instead: import_table("dump").
"""

from pathlib import Path

import numpy as np
import torch
from recommender import PADDING, model
from safetensors.numpy import save_file

from irc.frontends.layers import Table

SLOTS, IDS, NNZ, DENSE, SIZE, HIDDEN = 4, 100, 3, 6, 16, 32


def hashed(slot, ids):
    """A 64-bit key of its own for every category of every slot, as loggers make them."""
    x = (np.asarray(slot, np.uint64) << np.uint64(32)) + np.asarray(ids, np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x ^ (x >> np.uint64(31))).view(np.int64)


def clicks(rng, count):
    """(numbers, categories [count, SLOTS, NNZ] with -1 as padding, clicks) of a made-up world."""
    world = np.random.default_rng(7)
    taste = world.normal(size=(SLOTS, IDS, 2))
    weight = world.normal(size=DENSE) / 2
    ids = np.minimum(rng.zipf(1.3, (count, SLOTS, NNZ)) - 1, IDS - 1)
    ids[..., 1:][rng.random((count, SLOTS, NNZ - 1)) < 0.4] = -1
    dense = rng.normal(size=(count, DENSE))
    rows = np.where(ids[..., None] >= 0, taste[np.arange(SLOTS)[:, None], ids], 0)
    means = rows.sum(2) / (ids >= 0).sum(2)[..., None]
    score = dense @ weight + 2 * (means[:, 0] * means[:, 1]).sum(-1) + means[:, 2, 0]
    return dense.astype(np.float32), ids, (score > rng.logistic(size=count) / 4).astype(np.float32)


class Torch(torch.nn.Module):
    """The same model in torch, with a table per slot."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(SLOTS, IDS, SIZE) / 4)
        self.bottom = layers(DENSE, HIDDEN, SIZE)
        self.top = layers(SIZE + SLOTS * (SLOTS + 1) // 2, HIDDEN, 1)

    def forward(self, dense, ids):
        present = (ids >= 0).float().unsqueeze(-1)
        rows = self.table[torch.arange(SLOTS)[:, None], ids.clamp(min=0)] * present
        x = self.bottom(dense)
        vectors = torch.cat([x[:, None], rows.sum(2) / present.sum(2)], 1)
        below = torch.tril_indices(SLOTS + 1, SLOTS + 1, -1)
        pairs = (vectors @ vectors.mT)[:, below[0], below[1]]
        return self.top(torch.cat([x, pairs], 1)).squeeze(-1)


def layers(a, b, c):
    return torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.ReLU(), torch.nn.Linear(b, c))


def train(steps=3000, batch=512):
    torch.manual_seed(1)
    rng, net = np.random.default_rng(1), Torch()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3, weight_decay=1e-5)
    for step in range(steps):
        dense, ids, wanted = map(torch.from_numpy, clicks(rng, batch))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(net(dense, ids), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 500 == 0:
            print(step, f"{loss.item():.3f}")
    return net


def arrays(net):
    """The weights under irc's names; the table by keys."""
    keys = hashed(np.arange(SLOTS)[:, None], np.arange(IDS)[None]).reshape(-1)
    assert PADDING not in keys
    table = Table(keys, net.table.detach().numpy().reshape(-1, SIZE))
    named = {f"table.{name}": array for name, array in model().table.arrays(table).items()}
    for part in ("bottom", "top"):
        for number, layer in enumerate(getattr(net, part)[::2]):
            for name, value in layer.named_parameters():
                named[f"{part}.layers.{number}.{name}"] = value.detach().numpy()
    return named


if __name__ == "__main__":
    net = train()
    dense, ids, wanted = map(torch.from_numpy, clicks(np.random.default_rng(2), 20000))
    right = ((net(dense, ids) > 0).float() == wanted).float().mean().item()
    print(f"accuracy on new clicks: {right:.3f}, of always the same answer: {wanted.mean():.3f}")
    folder = Path(__file__).with_name("recommender")
    folder.mkdir(exist_ok=True)
    save_file(arrays(net), folder / "model.safetensors")
