"""The process that builds one engine: a request comes as one line of JSON, events go as lines.

    python -P -m irc.backends.tensorrt.builder.child

It lives apart because the library may end its process. It stops when its standard input closes,
which also happens when the process that asked for the engine dies.
"""

from __future__ import annotations

import _thread
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from irc.backends.tensorrt.builder.library import find
from irc.backends.tensorrt.builder.network import Builder, Failure
from irc.backends.tensorrt.builder.process import PART
from irc.errors import Error

GRACE = 2.0  # seconds that a build has to stop by itself
CANCELLED, FAILED, BROKEN = 130, 1, 70

Say: TypeAlias = Callable[..., None]


def main() -> None:
    """Build what standard input asks for; the exit status is 0 where the engine is written."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who asked decides
    say = _events()
    request: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    cancelled = threading.Event()
    try:
        _load_plugins(request)
    except Error as error:
        say("error", text=error.message)
        sys.exit(FAILED)

    def work() -> None:
        status = BROKEN
        try:
            status = _work(request, say, cancelled)
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    # The library orders some values by their addresses, so engines are reproducible only if its
    # memory looks the same each time. A new thread has memory of its own, where nothing was freed
    # before; this one only waits, and nothing is collected at a moment that differs.
    gc.disable()
    _thread.start_new_thread(work, ())
    _wait(cancelled)


def _work(request: dict[str, Any], say: Say, cancelled: threading.Event) -> int:
    try:
        report = _build(request, say, cancelled)
    except KeyboardInterrupt:
        return CANCELLED
    except Failure as failure:
        say("failed", doing=failure.doing, errors=failure.errors)
        return FAILED
    except Error as error:
        say("error", text=error.message)
        return FAILED
    except OSError as error:
        say("disk", text=str(error.strerror or error), number=error.errno or 0)
        return FAILED
    say("done", report=report, peak=_peak())
    return 0


def _build(request: dict[str, Any], say: Say, cancelled: threading.Event) -> dict[str, Any]:
    library = find(request["flavour"])
    if not _has_plugins(request):
        return Builder(library, request, say, cancelled).run()
    from irc.backends.tensorrt import plugins

    plugins.register_creators(library.module)
    try:
        return Builder(library, request, say, cancelled).run()
    finally:
        # The library prints what a plugin raises and goes on, or fails with a number.
        failure = plugins.take_failure()
        if failure is not None:
            say("plugin", text=str(failure) or type(failure).__name__)


def _has_plugins(request: dict[str, Any]) -> bool:
    return bool(request["plugins"] or request["has_plugins"])


def _load_plugins(request: dict[str, Any]) -> None:
    if _has_plugins(request):
        from irc.backends.tensorrt import plugins

        plugins.load(request["plugins"])


def _peak() -> int:
    """The largest resident memory of this process so far in bytes, 0 where the system has none."""
    try:
        import resource
    except ImportError:
        return 0
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def _events() -> Say:
    """Says an event on what was standard output; what the library prints goes to the errors."""
    descriptor = os.dup(1)
    os.dup2(2, 1)
    lock = threading.Lock()

    def say(event: str, **facts: Any) -> None:
        line = memoryview(json.dumps({"event": event, **facts}).encode() + b"\n")
        with lock:
            while line:
                line = line[os.write(descriptor, line) :]

    return say


def _wait(cancelled: threading.Event) -> None:
    """Wait until standard input closes; then the build has a little time to stop."""
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    cancelled.set()
    time.sleep(GRACE)
    Path(os.path.realpath(PART)).unlink(missing_ok=True)
    os._exit(CANCELLED)


if __name__ == "__main__":
    main()
