"""The disk side of `launch.py fetch`: what is there, partial files, the lock and the prompt template's text."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from sage_ray.fetch.manifest import Variable, Wanted

STATE = ".fetch"
"""Below the target folder: partial files and the lock."""


def state(file: Wanted, path: Path) -> str:
    """The words there, missing, or what is wrong with the file that has its name."""
    if not path.exists():
        return "missing"
    num_bytes, right = file.num_bytes, file.digest
    if file.variable:
        num_bytes, right = file.variable.num_bytes, f"sha256:{file.variable.sha256}"
    if path.stat().st_size != num_bytes:
        return f"to be replaced: has {path.stat().st_size} bytes, must have {num_bytes}"
    found = digest(path, right)
    return "there" if found == right else f"to be replaced: has {found}, must have {right}"


def take(content: bytes, variable: Variable, name: str) -> bytes:
    """The text of a variable in Python source, which is parsed, never run; or `content` if it is that text itself."""
    if hashlib.sha256(content).hexdigest() == variable.sha256:
        return content
    try:
        body = ast.parse(content).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{name}: is neither the text nor Python source ({error})") from None
    for node in body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [variable.name]:
            text = node.value.value if isinstance(node.value, ast.Constant) else None
            taken = text.encode() if isinstance(text, str) else b""
            if (found := hashlib.sha256(taken).hexdigest()) != variable.sha256:
                raise ValueError(f"{name}: {variable.name} has sha256 {found}, must have {variable.sha256}")
            return taken
    raise ValueError(f"{name}: holds no {variable.name}")


def write(file: Path, content: bytes, to: Path) -> None:
    """A small file, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = to / STATE / f"{file.name}.partial"
    beside.write_bytes(content)
    os.replace(beside, file)


def partial(to: Path, file: Wanted) -> Path:
    """Named by the content it will have, so that a file that changed at its source begins anew."""
    return to / STATE / f"{Path(file.file).name}.{file.digest.split(':')[1][:16]}.partial"


@contextlib.contextmanager
def locked(to: Path) -> Iterator[None]:
    """The folder for this process alone; the system gives it back when the process ends, however it ends."""
    (to / STATE).mkdir(parents=True, exist_ok=True)
    with (to / STATE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--to {to}: another fetch is writing to it; wait for its end") from None
        yield


def digest(path: Path, like: str) -> str:
    """The file's digest of the kind of `like`."""
    with path.open("rb") as file:
        if like.startswith("sha256:"):
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        blob = hashlib.sha1(b"blob %d\0" % path.stat().st_size)
        while chunk := file.read(1 << 20):
            blob.update(chunk)
        return f"git:{blob.hexdigest()}"


def bytes_text(num_bytes: int) -> str:
    """Bytes for people."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} B"
