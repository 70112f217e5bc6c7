"""What decides the bits that a program computes: a GPU, and what was chosen for it, in one file.

The file lies in the artifact. `irc compile` writes the GPU, `irc bench kernels` what is the fastest
there. Where nothing is chosen, kernels are those of `tuned` or of rules, and algorithms the first
that cuBLASLt offers: so nothing is timed when a program is loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from irc.artifact.atomic import whole_file
from irc.errors import Error, did_you_mean
from irc.schema import read_json

from .driver import Gpu
from .plan.core import Plan
from .plan.regime import Device, Target

FILE = "choices.json"  # in the folder of the artifact
SHIPPED = Path(__file__).parent / "tuned"  # sm_90.json: choices of kernels for a capability
WRITES = "irc bench kernels DIR"
# What a program is compiled for where its GPU is not at hand: the most common GPU of a capability.
TARGETS = {
    "sm_80": Target(80, 108, 163 << 10),  # A100
    "sm_86": Target(86, 84, 99 << 10),  # A40
    "sm_89": Target(89, 142, 99 << 10),  # L40S
    "sm_90": Target(),  # H200, H100
    "sm_100": Target(100, 148, 227 << 10),  # B200
    "sm_120": Target(120, 170, 99 << 10),  # RTX 5090
}


@dataclass(frozen=True)
class Choices:
    """The GPU that plans are made for, and what is the fastest there.

    `gpu` is the name of the GPU that was measured, "" if none was; `kernels` are names by what the
    choice depends on (Regime.choose), `products` the algorithms of cuBLASLt in hexadecimal by
    product (`key_of`). `versions` are of what decides the bits beside them: irc, NVRTC, cuBLASLt.
    The driver does not: it loads what NVRTC compiled as it is.
    """

    target: Target = field(default_factory=Target)
    gpu: str = ""
    kernels: Mapping[str, str] = field(default_factory=dict[str, str])
    products: Mapping[str, str] = field(default_factory=dict[str, str])
    versions: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        for product, algorithm in self.products.items():
            if not re.fullmatch("[0-9a-f]{128}", algorithm):
                raise ValueError(f"expected 64 bytes in hexadecimal for {product}")

    @property
    def device(self) -> Device:
        """What kernels are made for: choices of irc for the GPU, below those here."""
        return Device(self.target, shipped(self.target.capability) | dict(self.kernels))

    @property
    def summary(self) -> str:
        """What was measured on which GPU, with the checksum of the file."""
        counts = f"{len(self.kernels)} kernels and {len(self.products)} products"
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        hash = hashlib.sha256(self.text().encode()).hexdigest()
        return f"{counts} on {self.gpu} with {versions} (sha256:{hash})"

    def text(self) -> str:
        """The text of the file."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    def on(self, gpu: Gpu, target: Target) -> Choices:
        """What is used on a GPU: these choices, or with a warning none, if they are for another."""
        problem = self._mismatch(gpu, target)
        if not problem:
            return self
        warnings.warn(
            f"{problem}: plans are made for this GPU, with the rules of irc", stacklevel=2
        )
        return Choices(target)

    def check(self, gpu: Gpu, target: Target, versions: Mapping[str, str]) -> None:
        """An Error unless choices were measured on such a GPU, with these versions."""
        if not self.gpu:
            raise Error(f"expected measured choices, found none in {FILE}; {WRITES} writes them")
        if problem := self._mismatch(gpu, target):
            raise Error(f"{problem}; use such a GPU, or choose for this one: {WRITES}")
        for name, version in self.versions.items():
            if (here := versions.get(name, "no version")) != version:
                raise Error(
                    f"the choices in {FILE} were made with {name} {version}, and here is {here}; "
                    f"install {version}, or choose again with {WRITES}"
                )

    def _mismatch(self, gpu: Gpu, target: Target) -> str:
        """How a GPU differs from that of the choices, or ""."""
        if self.target == target and self.gpu in ("", str(gpu)):
            return ""
        own = f"{self.gpu or 'a GPU'} ({self.target})"
        return f"{FILE} is for {own}, and this GPU is {gpu} ({target})"

    def check_plan(self, plan: Plan) -> None:
        """An Error where a plan could have other kernels, of which none is chosen."""
        sizes = ",".join(f"{name}={size}" for name, size in plan.sizes.items())
        for key, names in plan.candidates.items():
            if self.kernels.get(key) not in names:
                raise Error(
                    f"{FILE} has no kernel for {key}, expected one of {', '.join(names)}; "
                    f"{WRITES}{f' --dims {sizes}' if sizes else ''} chooses it"
                )


def read_choices(folder: Path) -> Choices:
    """The choices of an artifact; without the file, an H200 of which nothing was measured."""
    return read_json(folder / FILE, Choices) if (folder / FILE).exists() else Choices()


def device_of(target: Target | None = None) -> Device:
    """A GPU, an H200 by default, with the choices of irc for it."""
    return Choices(target or Target()).device


def parse_target(text: str) -> Target:
    """The GPU that `cuda/sm_90` means; "" means an H200."""
    name = text.removeprefix("cuda/") or "sm_90"
    if name not in TARGETS:
        names = ", ".join(f"cuda/{name}" for name in TARGETS)
        hint = did_you_mean(name, TARGETS)
        raise Error(f"no target {text!r} of the backend cuda{hint}; there are {names}")
    return TARGETS[name]


def shipped(capability: int) -> dict[str, str]:
    """The choices that irc has for a compute capability."""
    path = SHIPPED / f"sm_{capability}.json"
    return read_json(path, dict[str, str]) if path.exists() else {}


def write_shipped(path: Path, kernels: Mapping[str, str]) -> None:
    """Add choices to a file of the folder `tuned`."""
    choices = read_json(path, dict[str, str]) if path.exists() else {}
    with whole_file(path) as file:
        file.write(json.dumps({**choices, **kernels}, indent=1, sort_keys=True).encode() + b"\n")
