"""The process that builds one engine: reads one request as JSON, writes events as lines of JSON.

    python -P -m irc.backends.tensorrt.builder.child

It is a process of its own because the library may crash. It stops when its standard input closes,
which also happens when the parent process dies. Its last event is `done`, or one of the failures
`refused`, `unused`, `plugin`, `error` and `disk` that `failures.py` explains.
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
from contextlib import suppress
from pathlib import Path
from typing import Any

from irc.backends.tensorrt.builder.library import find
from irc.backends.tensorrt.builder.network import Builder, Refused, Send, UnusedInputs
from irc.backends.tensorrt.builder.process import PART
from irc.backends.tensorrt.builder.report import Report
from irc.errors import Error

GRACE = 2.0  # seconds in which a cancelled build can stop by itself
CANCELLED, FAILED, CRASHED = 130, 1, 70


def main() -> None:
    """Build what standard input describes; the exit status is 0 if the engine is written."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    send = _make_sender()
    request: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    cancelled = threading.Event()
    if request["has_plugins"]:
        from irc.backends.tensorrt import plugins

        try:
            plugins.load(request["plugins"])
        except Error as error:
            send("error", text=error.message)
            sys.exit(FAILED)

    def work() -> None:
        status = CRASHED
        try:
            status = _work(request, send, cancelled)
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    # The library orders some values by their addresses, so an engine is reproducible only if its
    # memory has the same layout each time: a new thread has an allocation arena in which nothing
    # was freed yet, this thread only waits, and no garbage collection runs in between. Threads in
    # which the library converts constant weights still change it.
    gc.disable()
    _thread.start_new_thread(work, ())
    _wait(cancelled)


def _work(request: dict[str, Any], send: Send, cancelled: threading.Event) -> int:
    try:
        send("done", report=_build(request, send, cancelled).to_json())
    except KeyboardInterrupt:
        return CANCELLED
    except Refused as refused:
        send("refused", step=refused.step, errors=refused.errors)
    except UnusedInputs as unused:
        send("unused", names=unused.names)
    except Error as error:
        send("error", text=error.message)
    except OSError as error:
        send("disk", text=str(error.strerror or error), number=error.errno or 0)
    else:
        return 0
    return FAILED


def _build(request: dict[str, Any], send: Send, cancelled: threading.Event) -> Report:
    library = find(request["flavour"])
    builder = Builder(library, request, send, cancelled)
    if not request["has_plugins"]:
        return builder.run()
    from irc.backends.tensorrt import plugins

    plugins.register_creators(library.module)
    try:
        return builder.run()
    finally:
        # The library prints what a plugin raises and continues, or fails without a reason.
        if (failure := plugins.take_failure()) is not None:
            send("plugin", text=str(failure) or type(failure).__name__)


def _make_sender() -> Send:
    """A function that writes events to standard output; what the library prints goes to stderr."""
    descriptor = os.dup(1)
    os.dup2(2, 1)
    lock = threading.Lock()

    def send(event: str, **facts: Any) -> None:
        line = memoryview(json.dumps({"event": event, **facts}).encode() + b"\n")
        with lock:
            while line:
                line = line[os.write(descriptor, line) :]

    return send


def _wait(cancelled: threading.Event) -> None:
    """Wait until standard input closes; then the build has GRACE seconds to stop."""
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    cancelled.set()
    time.sleep(GRACE)
    Path(os.path.realpath(PART)).unlink(missing_ok=True)
    os._exit(CANCELLED)


if __name__ == "__main__":
    main()
