"""Kernels compiled by NVRTC, several at once, and kept in the user's cache.

A compiled kernel is kept under a hash of everything that determines its bytes.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from irc.artifact.atomic import whole_file
from irc.backends.cuda.codegen.files import PRELUDE
from irc.backends.cuda.plan import Kernel
from irc.backends.cuda.runtime import call, unavailable
from irc.errors import Error
from irc.files import sharing_problem

VARIABLE = "IRC_CACHE"  # the environment variable with the user's folder
LEAST = 80  # the compute capability that kernels need
_AT_ONCE = 16  # kernels that are compiled at the same time, at most
_LONGEST = 2000  # characters of the compiler's log in a message
Key: TypeAlias = tuple[str, str, tuple[tuple[str, str], ...]]


def default_folder() -> Path | None:
    """Where compiled kernels are kept: `kernels` in `$IRC_CACHE`, or in irc's folder for caches.

    None for a user without a home folder, as in containers.
    """
    if named := os.environ.get(VARIABLE):
        return Path(named) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "irc" / "kernels" if os.path.isabs(base) else None


def unshared(folder: Path | None) -> Path | None:
    """The folder; None, with a warning, where other users could have written into it."""
    problem = "" if folder is None else sharing_problem(folder)
    if problem:
        advice = f"to use one, set {VARIABLE} to a folder of your own"
        warnings.warn(f"the cache of kernels is not used: {problem}; {advice}", stacklevel=2)
    return None if problem else folder


def kept(folder: Path) -> list[Path]:
    """The compiled kernels of a cache."""
    return [path for path in folder.glob("*.cubin") if re.fullmatch(r"[0-9a-f]{64}", path.stem)]


def key_of(kernel: Kernel) -> Key:
    """What distinguishes a kernel from others."""
    return kernel.name, kernel.source, tuple(sorted(kernel.macros.items()))


class Compiler:
    """Compiles kernels for GPUs of one compute capability. `folder`: of the cache, None for none.

    `compiled` counts the kernels that were in no cache.
    """

    def __init__(self, capability: int, folder: Path | None = None) -> None:
        if capability < LEAST:
            raise Error(
                f"expected a GPU of compute capability {LEAST / 10} or more, found "
                f"{capability / 10}; compile with --backend onnx, which runs on CPU"
            )
        self._architecture, self._folder = architecture_of(capability), unshared(folder)
        self._version = nvrtc_version()
        self.compiled = 0

    def images(self, kernels: Iterable[Kernel]) -> dict[Key, bytes]:
        """The cubins of kernels."""
        wanted = list({key_of(kernel): kernel for kernel in kernels}.values())
        workers = min(_AT_ONCE, os.cpu_count() or 1, max(1, len(wanted)))
        with ThreadPoolExecutor(workers) as pool:  # NVRTC works outside of Python's lock
            return dict(zip(map(key_of, wanted), pool.map(self.image, wanted), strict=True))

    def image(self, kernel: Kernel) -> bytes:
        """The cubin of a kernel, from the cache if it is there."""
        path = None if self._folder is None else self._folder / f"{self._hash(kernel)}.cubin"
        if path is not None:
            with suppress(OSError):
                data = path.read_bytes()
                if _is_intact(data) and not sharing_problem(path):
                    return data[:-_SIZE]
        image = compile_kernel(kernel, self._architecture)
        self.compiled += 1
        if path is not None:
            with suppress(OSError):  # a cache that cannot be written is no reason to fail
                path.parent.mkdir(0o700, parents=True, exist_ok=True)
                with whole_file(path) as file:
                    file.write(image + hashlib.sha256(image).digest())
        return image

    def _hash(self, kernel: Kernel) -> str:
        facts = [PRELUDE, *key_of(kernel), self._architecture, *self._version]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


_SIZE = hashlib.sha256().digest_size


def _is_intact(data: bytes) -> bool:
    """Whether bytes end with the checksum of those before it."""
    return hashlib.sha256(data[:-_SIZE]).digest() == data[-_SIZE:]


def architecture_of(capability: int) -> str:
    """What NVRTC compiles for; a capability of 9.0 with the products of groups of warps."""
    return f"sm_{capability}a" if capability == 90 else f"sm_{capability}"


def nvrtc_version() -> tuple[int, int]:
    """The version of NVRTC; an Error where it is missing."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise unavailable("NVRTC, which compiles kernels,", error) from error
    return int(major), int(minor)


def compile_kernel(kernel: Kernel, architecture: str) -> bytes:
    """The cubin of a kernel for an architecture such as sm_90; no GPU is needed."""
    from cuda.bindings import nvrtc

    text, name = (PRELUDE + kernel.source).encode(), f"{kernel.name}.cu".encode()
    program = call("nvrtcCreateProgram", text, name, 0, [], [])
    options = [f"--gpu-architecture={architecture}", "--std=c++17"]
    options.append("--device-as-default-execution-space")  # of generic lambdas in NVRTC 13.0
    options += [f"-D{key}={value}" for key, value in kernel.macros.items()]
    try:
        call("nvrtcCompileProgram", program, len(options), [option.encode() for option in options])
        return _output(program, "CUBIN")
    except Error as error:
        log = _output(program, "ProgramLog").decode(errors="replace").strip("\0\n ")
        raise Error(
            f"the CUDA kernel {kernel.name} does not compile for {architecture}: "
            f"{log[:_LONGEST] or error.message}"
        ) from None
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _output(program: Any, kind: str) -> bytes:
    """What NVRTC has written: a log or a cubin."""
    data = b" " * call(f"nvrtcGet{kind}Size", program)
    call(f"nvrtcGet{kind}", program, data)
    return data
