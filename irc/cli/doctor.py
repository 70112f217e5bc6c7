"""`irc doctor`: is the installation sound, and an artifact as it was compiled?"""

from __future__ import annotations

import platform
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from .. import __version__
from ..artifact import advancing, problems, read_manifest
from ..errors import Error
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
    ("tokenizers", "irc generate with text", True),
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
    return findings + [_package(*package) for package in PACKAGES]


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


def _mark(finding: Finding) -> str:
    if finding.ok is None:
        return paint("--", "dim")
    return paint("ok", "green") if finding.ok else paint("no", "red")
