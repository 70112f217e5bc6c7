"""Installs one group of packages into .venv: base, test or benchmarks.

The group `test` includes the oracle (torch and transformers) where the package index offers torch
without CUDA, with libraries that write quantized checkpoints, and TensorRT-RTX, which builds
engines without a GPU, where it supports this machine.
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
    """Create .venv unless it works already, and install irc in editable mode."""
    if not works():
        say(f"creating .venv with Python {sys.version.split()[0]}")
        make_environment()
    say("installing irc and its base packages")
    install("-e", ".")


def test() -> None:
    """Install the test tools, and the oracle and TensorRT-RTX where they are available."""
    say("installing the test tools")
    install("-e", ".[test,graphsurgeon]")
    reason = why_no_oracle()
    if reason is None:
        say("installing the oracle: torch for CPU, transformers")
        install("-e", ".[oracle]")
        say("installing the libraries that write quantized checkpoints")
        if pip("install", "--quiet", "-e", ".[quantized]").returncode != 0:
            say("they are not available; their tests are skipped")
    else:
        say(f"the oracle is not available: {reason}; tests marked oracle are skipped")
    say("installing TensorRT-RTX, the builder of engines")
    if pip("install", "--quiet", "-e", ".[test-engines]").returncode != 0:
        say("TensorRT-RTX is not available; tests marked needs_rtx are skipped")


def benchmarks() -> None:
    """Install the peers that the CPU benchmarks compare with."""
    say("installing the peers of the benchmarks")
    install("-e", ".[benchmarks]")


def works() -> bool:
    """Whether .venv has a working Python of a supported version, with pip."""
    check = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
    return PYTHON.exists() and subprocess.run([PYTHON, "-c", check]).returncode == 0


def make_environment() -> None:
    """Create .venv; exit with a message where ensurepip is missing."""
    try:
        import ensurepip  # noqa: F401  a separate package on Debian
    except ImportError:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        sys.exit(f"{sys.executable} cannot create environments: install python{version}-venv.")
    venv.create(FOLDER, clear=True, with_pip=True)


def why_no_oracle() -> str | None:
    """None if the package index offers torch without CUDA, else the reason."""
    command = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    answer = pip(*command, "--report", "-", TORCH, capture_output=True)
    if answer.returncode != 0:
        return f"the package index has no {TORCH} for this Python"
    version = json.loads(answer.stdout)["install"][0]["metadata"]["version"]
    # Wheels for macOS never contain CUDA; elsewhere only +cpu wheels do not.
    if version.endswith("+cpu") or sys.platform == "darwin":
        return None
    return f"the package index offers torch {version} with CUDA and no +cpu build"


def install(*requirements: str) -> None:
    """Install with .venv's pip; exit with its status if that fails, after its own message."""
    status = pip("install", "--quiet", *requirements).returncode
    if status != 0:
        sys.exit(status)


def pip(*arguments: str, capture_output: bool = False) -> subprocess.CompletedProcess[str]:
    """Run .venv's pip from the repository root, without questions."""
    command = [str(PYTHON), "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
    environment = {**os.environ, "PIP_ROOT_USER_ACTION": "ignore"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=capture_output, text=True
    )


def say(text: str) -> None:
    """Print one line of progress, flushed before pip's own output."""
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    main()
