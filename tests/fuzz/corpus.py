"""The texts that the fuzzer starts from: random modules, every operation, the example models."""

import random

import irc.passes  # noqa: F401  (registers them)
from irc.frontends.script import load_script
from irc.pipeline import run_pipeline
from irc.text import print_module
from tests.layout import ROOT
from tests.ops.example import module_of
from tests.ops.examples import EXAMPLES
from tests.random_modules import random_module

SMALL = {"layers": "1"}
PIPELINE = "fuse-gated-mlp, fuse-qkv, fuse-norm"


def corpus(rng: random.Random) -> list[list[str]]:
    """Groups of texts. A mutation chooses a group, then a text."""
    return [
        [print_module(random_module(rng.randrange(10**9)), locs=True) for _ in range(200)],
        [
            print_module(module_of(example, example.dtypes[0]))
            for examples in EXAMPLES.values()
            for example in examples
        ],
        models(),
    ]


def models() -> list[str]:
    """The example scripts as they are traced, and after fusions that change their weights."""
    texts: list[str] = []
    for path, settings in (("llama.py", SMALL), ("two_tower.py", {})):
        module = load_script(str(ROOT / "examples" / path), settings)
        texts.append(print_module(module, locs=True))
        run_pipeline(module, PIPELINE)
        texts.append(print_module(module))
    return texts
