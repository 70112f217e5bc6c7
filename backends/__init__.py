"""Ways to execute or emit a module: reference, ONNX and ONNX Runtime, CUDA, TensorRT."""

if __name__ != "irc.backends":
    raise ImportError("import irc.backends, not backends: a bare import loads a second copy")

from importlib import import_module
from typing import TYPE_CHECKING

from irc.errors import Error, did_you_mean
from irc.extensions.entry_points import installed, load_entry

if TYPE_CHECKING:
    from irc.artifact.folder import ArtifactFolder
    from irc.backends.base import Backend
    from irc.backends.commands import Commands

GROUP = "irc.backends"
DEFAULT = "onnx"
OWN = {
    "reference": ("irc.backends.reference", "backend"),
    "onnx": ("irc.backends.onnx", "backend"),
    "cuda": ("irc.backends.cuda.backend", "backend"),
    "tensorrt": ("irc.backends.tensorrt.backend", "tensorrt"),
    "tensorrt-rtx": ("irc.backends.tensorrt.backend", "tensorrt_rtx"),
}


def names() -> tuple[str, ...]:
    """The names of all backends, those of other packages last; nothing is loaded."""
    return (*OWN, *(entry.name for entry in installed(GROUP)))


def get(name: str) -> "Backend":
    """The backend called `name`, loaded now.

    Other packages register theirs in the entry-point group `irc.backends`.
    """
    registered = names()
    if registered.count(name) > 1:
        raise Error(f"two installed packages bring a backend called {name!r}; uninstall one")
    if name in OWN:
        module, attribute = OWN[name]
        return getattr(import_module(module), attribute)
    for entry in installed(GROUP):
        if entry.name == name:
            return load_entry(entry, GROUP)
    raise Error(
        f"no backend called {name!r}{did_you_mean(name, registered)}; there are "
        f"{', '.join(registered)}"
    )


def describe(artifact: "ArtifactFolder | None") -> "dict[str, str]":
    """What its backend says about an artifact, see Commands.describe; of another source nothing."""
    return {} if artifact is None else dict(get(artifact.backend).commands.describe(artifact))


def command_parts() -> "list[Commands]":
    """What the backends add to irc's commands, once for those that share it."""
    return list(
        {type(commands): commands for commands in (get(name).commands for name in names())}.values()
    )
