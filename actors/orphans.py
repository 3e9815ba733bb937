"""A small process that ends what is left of an embedded Ray when its driver has died, even by SIGKILL.

The kernel ends Ray's servers with the driver, and workers end with those, but Ray's agents would stay. The watcher has
one end of a pipe whose other end dies with the driver; then it kills the processes that keep a file of the driver's Ray
session open, and no others: several runs may share a machine. Runs as a script and imports nothing of the project.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

PATIENCE_S, BOUND_S = 2.0, 25.0
"""Time for Ray to end by itself; the time after which the watcher gives up."""


def watch(session: str) -> int:
    """Watch over the processes of the Ray session in this folder until this process ends; the watcher's id."""
    read, write = os.pipe()  # the end kept here is not inherited: it closes with this process
    nowhere = subprocess.DEVNULL
    command = [sys.executable, "-I", __file__, session]
    watcher = subprocess.Popen(command, stdin=read, stdout=nowhere, stderr=nowhere, start_new_session=True)
    os.close(read)
    _KEPT.append((watcher, write))
    return watcher.pid


_KEPT: list[tuple[subprocess.Popen, int]] = []
"""Watchers, and the ends of their pipes that stay open as long as this process lives."""


def of_session(session: str) -> Iterator[int]:
    """Ids of this user's Python and Ray processes that have a file under the session's folder open."""
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid() and _is_ours(name) and _has_open(name, session):
            yield int(name)


def _is_ours(name: str) -> bool:
    try:
        program = os.readlink(f"/proc/{name}/exe").removesuffix(" (deleted)")
    except OSError:
        return False  # another user's, or gone
    return program == os.path.realpath(sys.executable) or os.path.basename(program) in ("raylet", "gcs_server")


def _has_open(name: str, session: str) -> bool:
    try:
        files = os.listdir(f"/proc/{name}/fd")
        return any(os.readlink(f"/proc/{name}/fd/{file}").startswith(session + os.sep) for file in files)
    except OSError:
        return False


def main(session: str) -> None:
    """Wait for the driver's end, then for Ray's, then end what is left."""
    os.read(0, 1)
    time.sleep(PATIENCE_S)
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline and (left := list(of_session(session))):
        for process in left:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.5)


if __name__ == "__main__":
    main(os.path.realpath(sys.argv[1]))
