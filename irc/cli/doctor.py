"""`irc doctor`: checks the installation, and that an artifact is as it was compiled."""

from __future__ import annotations

import os
import platform
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from .. import __version__
from ..artifact.atomic import orphaned_folders
from ..artifact.folder import ArtifactFolder
from ..artifact.manifest import advancing
from ..backends import command_parts
from ..backends.commands import Finding
from ..errors import Error, printable
from ..report import Report, paint
from .arguments import add_json
from .console import Progress, answer

EXAMPLES = """
  irc doctor
  irc doctor build/llama
"""

DISTRIBUTION = "irc-compiler"
# (distribution, its purpose, whether it is required)
PACKAGES = (
    ("numpy", "arrays and the reference backend", True),
    ("ml_dtypes", "bf16 and other element types", True),
    ("filelock", "one writer of a folder at a time", True),
    ("msgspec", "the types of what an artifact's files hold", True),
    ("onnx", "writing and checking ONNX", True),
    ("onnxruntime", "running artifacts on CPU", True),
    ("tokenizers", "irc generate with text", True),
    ("cuda-bindings", "running on NVIDIA GPUs: memory, streams and graphs", False),
    ("nvidia-cuda-nvrtc", "the backend cuda: compiles kernels", False),
    ("nvidia-cublas", "the backend cuda: products of many rows", False),
    ("nccl4py", "several GPUs: collectives", False),
    ("torch", "the reference of the tests", False),
    ("transformers", "the reference of the tests", False),
)


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc doctor`."""
    what = "an artifact folder; all its bytes are read"
    parser.add_argument("folder", metavar="DIR", nargs="?", help=what)
    add_json(parser)


def run(args: Namespace) -> int:
    """0 if nothing has to be changed, else 1."""
    findings = installation()
    if args.folder is not None:
        with Progress() as progress:
            findings += artifact(Path(args.folder), progress)
        real = Path(os.path.realpath(args.folder))
        removed = f"the next compilation to {real} removes it"
        orphaned = [f"{path}: {removed}" for path in orphaned_folders(real)]
        findings += [Finding("orphaned", None, detail) for detail in orphaned]
    bad = any(f.ok is False for f in findings)
    lines = [f"{_mark(f)}  {printable(f'{f.what}: {f.detail}')}" for f in findings]
    facts = {"ok": not bad, "findings": [asdict(f) for f in findings]}
    return answer(args, Report(facts, lines, int(bad)))


def installation() -> list[Finding]:
    """Python, irc itself and the packages it uses."""
    python = sys.version_info >= (3, 11)
    version = platform.python_version()
    needs = "" if python else "; irc needs 3.11 or newer"
    return [
        Finding("python", python, f"{version} in {sys.prefix}{needs}"),
        Finding("irc", True, f"{__version__} in {Path(__file__).parent.parent}"),
        _clash(),
        *(_package(*package) for package in PACKAGES),
        *(finding for part in command_parts() for finding in part.findings()),
    ]


def _clash() -> Finding:
    """Whether another distribution brings an import package called `irc` too."""
    owners = dict.fromkeys(metadata.packages_distributions().get("irc", []))
    others = [owner for owner in owners if owner != DISTRIBUTION]
    if not others:
        return Finding("import name", True, "no other package is called irc")
    detail = (
        f"{' and '.join(others)} also installs a package called irc (a chat library has that name),"
        f" and they overwrite each other's files: pip uninstall {' '.join(others)} {DISTRIBUTION}, "
        "then pip install . in the checkout of irc, or use separate environments"
    )
    return Finding("import name", False, detail)


def _package(name: str, purpose: str, needed: bool) -> Finding:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        hint = f": pip install {name}" if needed else ""
        return Finding(name, False if needed else None, f"not installed ({purpose}){hint}")
    return Finding(name, True, f"{version} ({purpose})")


def artifact(path: Path, progress: Progress) -> list[Finding]:
    """The manifest, every file of the folder, and the weight files elsewhere."""
    try:
        folder = ArtifactFolder.open(path)
    except Error as error:
        return [Finding("artifact", False, str(error))]
    manifest = folder.manifest
    facts = f"backend {folder.backend}, dtype {manifest['dtype']}, irc {manifest['irc']}"
    findings = [Finding("artifact", True, f"{path}: {facts}")]
    paths = [path / name for name in manifest["files"]]
    advance = advancing(f"reading {path}", paths, progress)
    wrong = list(folder.problems(whole=True, advance=advance))
    findings += [Finding("file", False, problem) for problem in wrong]
    if not wrong:
        inside, outside = len(manifest["files"]), len(manifest["weights"])
        detail = f"as compiled: {inside} in the folder, {outside} with weights elsewhere"
        findings.append(Finding("files", True, detail))
    return findings


def _mark(finding: Finding) -> str:
    if finding.ok is None:
        return paint("--", "dim")
    return paint("ok", "green") if finding.ok else paint("no", "red")
