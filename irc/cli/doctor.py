"""`irc doctor`: is the installation sound, and an artifact as it was compiled?"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from .. import __version__
from ..artifact import advancing, problems, read_manifest
from ..errors import Error
from ..leftovers import leftovers
from .arguments import add_json
from .console import Progress, paint, print_json

EXAMPLES = """
  irc doctor
  irc doctor build/llama
"""

DISTRIBUTION = "irc-compiler"
# (distribution, what it is for, whether the main road needs it)
PACKAGES = (
    ("numpy", "arrays and the reference backend", True),
    ("ml_dtypes", "bf16 and other element types", True),
    ("networkx", "finding ranks that wait for each other", True),
    ("onnx", "writing and checking ONNX", True),
    ("onnxruntime", "running artifacts on CPU", True),
    ("onnx-graphsurgeon", "reading ONNX files that others wrote", True),
    ("tokenizers", "irc generate with text", True),
    ("cuda-python", "running engines: memory and streams of the GPU", False),
    ("nccl4py", "running engines: GPUs that talk to each other", False),
    ("torch", "the oracle of the tests", False),
    ("transformers", "the oracle of the tests", False),
)


@dataclass(frozen=True)
class Finding:
    """One line of the examination; `ok` is None for what is optional and absent."""

    what: str
    ok: bool | None
    detail: str


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc doctor`."""
    parser.add_argument(
        "folder", metavar="DIR", nargs="?", help="an artifact folder, to check every byte of"
    )
    add_json(parser)


def run(args: Namespace) -> int:
    """0 if nothing has to be changed, else 1."""
    findings = installation()
    if args.folder is not None:
        with Progress() as progress:
            findings += artifact(Path(args.folder), progress)
        real = Path(os.path.realpath(args.folder))
        findings += [_leftover(real, *each) for each in leftovers(real)]
    sick = any(finding.ok is False for finding in findings)
    if args.json:
        print_json({"ok": not sick, "findings": [asdict(finding) for finding in findings]})
        return int(sick)
    for finding in findings:
        print(f"{_mark(finding)}  {finding.what}: {finding.detail}")
    return int(sick)


def installation() -> list[Finding]:
    """Python, irc itself and the packages it uses."""
    python = sys.version_info >= (3, 11)
    version = platform.python_version()
    needs = "" if python else "; irc needs 3.11 or newer"
    findings = [Finding("python", python, f"{version} in {sys.prefix}{needs}")]
    findings.append(Finding("irc", True, f"{__version__} in {Path(__file__).parent.parent}"))
    findings.append(_clash())
    findings += [_package(*package) for package in PACKAGES]
    return [*findings, *_engines(), _driver()]


def _clash() -> Finding:
    """Whether another distribution brings an import package called `irc` too."""
    owners = dict.fromkeys(metadata.packages_distributions().get("irc", []))
    others = [owner for owner in owners if owner != DISTRIBUTION]
    if not others:
        return Finding("import name", True, "no other package is called irc")
    named = " and ".join(others)
    return Finding(
        "import name",
        False,
        f"{named} also installs a package called irc (a chat library has that name), and the two "
        f"overwrite each other's files: pip uninstall {' '.join(others)} {DISTRIBUTION}, "
        f"then pip install {DISTRIBUTION} again, or give each an environment of its own",
    )


def _package(name: str, purpose: str, needed: bool) -> Finding:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        missing = f"not installed ({purpose})"
        if not needed:
            return Finding(name, None, missing)
        return Finding(name, False, f"{missing}: pip install {name}")
    return Finding(name, True, f"{version} ({purpose})")


def _engines() -> list[Finding]:
    """The libraries that build and run engines: whether they load and are new enough."""
    from ..backends.tensorrt.builder.library import TRAITS, find, installed

    found: list[Finding] = []
    for flavour, traits in TRAITS.items():
        purpose = f"engines of {traits.name}"
        if not installed(flavour):
            get = f"pip install '{DISTRIBUTION}[{traits.extra}]'"
            found.append(Finding(flavour, None, f"not installed ({purpose}): {get}"))
            continue
        try:
            found.append(Finding(flavour, True, f"{find(flavour).version} ({purpose})"))
        except Error as error:
            found.append(Finding(flavour, False, str(error)))
    return found


def _driver() -> Finding:
    """Whether engines can run here. Building them for TensorRT-RTX needs no GPU."""
    from ..backends.tensorrt.builder.library import NVIDIA_DRIVER, device_count

    try:
        driver = ctypes.CDLL(NVIDIA_DRIVER)
    except OSError:
        return Finding("gpu driver", None, "none: engines of TensorRT-RTX are built, not run, here")
    version = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    cuda = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    count = device_count()
    return Finding("gpu driver", True if count else None, f"{cuda}, {count} GPUs")


def artifact(folder: Path, progress: Progress) -> list[Finding]:
    """The manifest, every file of the folder, and the weight files outside."""
    try:
        manifest = read_manifest(folder)
    except Error as error:
        return [Finding("artifact", False, str(error))]
    facts = f"backend {manifest['backend']}, dtype {manifest['dtype']}, irc {manifest['irc']}"
    findings = [Finding("artifact", True, f"{folder}: {facts}")]
    paths = [folder / name for name in manifest["files"]]
    advance = advancing(f"reading {folder}", paths, progress)
    wrong = list(problems(folder, manifest, whole=True, advance=advance))
    findings += [Finding("file", False, problem) for problem in wrong]
    if not wrong:
        inside, outside = len(manifest["files"]), len(manifest["weights"])
        detail = f"{inside} in the folder and {outside} weight files outside are as compiled"
        findings.append(Finding("files", True, detail))
    return findings


def _leftover(folder: Path, path: Path, dead: bool) -> Finding:
    """A folder that a compilation works in, or left when it was killed."""
    if dead:
        return Finding("left over", None, f"{path}: the next compilation to {folder} removes it")
    return Finding(
        "left over",
        None,
        f"{path}: a compilation writes it, or one on another host or before a restart did; delete "
        "it if none runs",
    )


def _mark(finding: Finding) -> str:
    if finding.ok is None:
        return paint("--", "dim")
    return paint("ok", "green") if finding.ok else paint("no", "red")
