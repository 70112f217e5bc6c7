"""Fills .venv with one group of packages: base, test or benchmarks.

The group test brings the oracle, torch and transformers, where torch is to be had without CUDA,
and TensorRT-RTX, which builds engines without a GPU, where there is one for this machine.
"""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv"
PYTHON = FOLDER / "bin" / "python"
TORCH = "torch==2.13.0"


def main() -> None:
    """Install the group named on the command line."""
    groups = {"base": base, "test": test, "benchmarks": benchmarks}
    if len(sys.argv) != 2 or sys.argv[1] not in groups:
        sys.exit(f"usage: setup.py {'|'.join(groups)}")
    groups[sys.argv[1]]()


def base() -> None:
    """Make .venv, unless a working one is there, and install irc in place."""
    if not works():
        say(f"making .venv with Python {sys.version.split()[0]}")
        make_environment()
    say("installing irc and its base packages")
    install("-e", ".")


def test() -> None:
    """Add the test tools, and the oracle and the builder of engines where they are to be had."""
    say("installing the test tools")
    install("-e", ".[test]")
    reason = why_no_oracle()
    if reason is None:
        say("installing the oracle: torch for CPU, transformers")
        install("-e", ".[oracle]")
    else:
        say(f"no oracle here: {reason}. Tests marked oracle will be skipped")
    say("installing the builder of engines: TensorRT-RTX")
    if pip("install", "--quiet", "-e", ".[test-engines]").returncode != 0:
        say("no TensorRT-RTX here. Tests marked needs_rtx will be skipped")


def benchmarks() -> None:
    """Add the peers that the CPU benchmarks run beside irc."""
    say("installing the peers for the benchmarks")
    install("-e", ".[benchmarks]")


def works() -> bool:
    """Whether .venv has a Python that is new enough, starts and has pip."""
    check = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
    return PYTHON.exists() and subprocess.run([PYTHON, "-c", check]).returncode == 0


def make_environment() -> None:
    """Create .venv afresh; a system without ensurepip gets a sentence, not a traceback."""
    try:
        import ensurepip  # noqa: F401  Debian packs it apart from python3
    except ImportError:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        sys.exit(f"{sys.executable} cannot make environments: install python{version}-venv.")
    venv.create(FOLDER, clear=True, with_pip=True)


def why_no_oracle() -> str | None:
    """None if the package index offers torch without CUDA, else the reason why not."""
    command = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    answer = pip(*command, "--report", "-", TORCH, capture_output=True)
    if answer.returncode != 0:
        return f"the package index has no {TORCH} for this Python"
    version = json.loads(answer.stdout)["install"][0]["metadata"]["version"]
    # No wheel for macOS carries CUDA; elsewhere only the name +cpu promises that.
    if version.endswith("+cpu") or sys.platform == "darwin":
        return None
    return f"the package index offers torch {version}, which brings CUDA, and no +cpu build"


def install(*requirements: str) -> None:
    """Install with .venv's pip, or end with its status: it has said what went wrong."""
    status = pip("install", "--quiet", *requirements).returncode
    if status != 0:
        sys.exit(status)


def pip(*arguments: str, capture_output: bool = False) -> subprocess.CompletedProcess[str]:
    """Run .venv's pip from the repository root; it never asks anything."""
    command = [str(PYTHON), "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
    environment = {**os.environ, "PIP_ROOT_USER_ACTION": "ignore"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=capture_output, text=True
    )


def say(text: str) -> None:
    """Print one line of progress at once, before pip prints its own."""
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    main()
