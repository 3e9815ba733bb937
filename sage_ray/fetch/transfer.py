"""The network side of `launch.py fetch`: what a repository lists, and resumable downloads.

huggingface_hub gives addresses, listings, tokens, proxies and the kinds of refusals. Its downloads are not used: as
measured with 2.4.0 they check a file's size but not its hash, keep no partial file for a later call, repeat up to
10 MB after every cut and give up at a reset connection.

Import this only when HF_HUB_OFFLINE is out of the environment: huggingface_hub reads it once.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import httpx2
from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from sage_ray.fetch.manifest import KNOWN, CodeFile, HubFiles, Wanted
from sage_ray.rewards.remote import check_token

ATTEMPTS = 6
FIRST_WAIT_S = 1.0
RETRIED = (408, 429, 500, 502, 503, 504)
HUB_VARIABLE, CODE_VARIABLE, TOKEN_VARIABLE = "HF_ENDPOINT", "GITHUB_RAW_ENDPOINT", "HF_TOKEN"
CODE_ENDPOINT = "https://raw.githubusercontent.com"
Result = TypeVar("Result")
logger = logging.getLogger(__name__)


def token() -> str | None:
    """HF_TOKEN; a token that was saved on this machine is never used. Raises: ValueError, which does not show it."""
    value = os.environ.get(TOKEN_VARIABLE, "").strip()
    if value:
        check_token(value, TOKEN_VARIABLE)
    return value or None


def code_file(source: CodeFile) -> Wanted:
    """A file of a Git repository, of which everything is known."""
    endpoint = os.environ.get(CODE_VARIABLE, CODE_ENDPOINT).rstrip("/")
    urls = tuple(f"{endpoint}/{repo}/{source.commit}/{source.path}" for repo in source.repos)
    name = f"{source.repos[0]}/{source.path}"
    digest = f"sha256:{source.sha256}"
    return Wanted(source.file, name, urls, source.num_bytes, digest, with_token=False, variable=source.variable)


def hub_files(source: HubFiles, revision: str | None) -> tuple[str, list[Wanted]]:
    """The commit that a revision (default: main) is now, and the files to bring of it.

    Raises: ValueError naming repository, file and rule.
    """
    endpoint = os.environ.get(HUB_VARIABLE, constants.ENDPOINT).rstrip("/")
    api, revision = HfApi(endpoint=endpoint, token=token() or False), revision or constants.DEFAULT_REVISION

    def ask() -> Any:
        timeout_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        return api.model_info(source.repo, revision=revision, files_metadata=True, timeout=timeout_s)

    try:
        info = _with_retries(ask, f"{source.repo} at {revision}", lambda: 0)
        siblings = {entry.rfilename: entry for entry in info.siblings or []}
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{source.repo}: the answer of {endpoint} is not a hub's listing ({error!r})") from error
    if not info.sha or (lacks := [path for path in source.needed if path not in siblings]):
        raise ValueError(f"{source.repo} at {revision}: holds no {lacks[0] if info.sha else 'commit'}")
    names, wanted = dict(source.renamed), []
    for path, entry in siblings.items():
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in source.patterns):
            num_bytes, digest = _stated(source.repo, path, entry)
            url = hf_hub_url(source.repo, path, revision=info.sha, endpoint=endpoint)
            file = f"{source.folder}/{names.get(path, path)}"
            wanted.append(Wanted(file, f"{source.repo}/{path}", (url,), num_bytes, digest, with_token=True))
    return info.sha, wanted


def _stated(repo: str, path: str, entry: Any) -> tuple[int, str]:
    """Bytes and digest that a listing states for one file; they must be those that are known."""
    parts = PurePosixPath(path).parts
    if path.startswith("/") or "\\" in path or ".." in parts or path != str(PurePosixPath(path)):
        raise ValueError(f"{repo}: lists the file {path!r}, which is not a path inside a folder")
    digest = f"sha256:{entry.lfs.sha256}" if entry.lfs else f"git:{entry.blob_id}"
    if not isinstance(entry.size, int) or digest == "git:None":
        raise ValueError(f"{repo}/{path}: is listed without size or hash, so that it could not be checked")
    if (repo, path) in KNOWN:
        num_bytes, sha256 = KNOWN[repo, path]
        if (entry.size, digest) != (num_bytes, f"sha256:{sha256}"):
            raise ValueError(
                f"{repo}/{path}: is listed with {entry.size} bytes and {digest}, "
                f"must be {num_bytes} bytes and sha256:{sha256}"
            )
    return entry.size, digest


def download(wanted: Wanted, partial: Path, told: Callable[[int], None]) -> None:
    """Bring a file's bytes to `partial`, going on where it ends; told: gets the size that it has reached.

    Raises: ValueError naming file and rule, or after ATTEMPTS that got no further; partial stays for the next call.
    """
    if _size(partial) > wanted.num_bytes:
        partial.unlink()

    def once() -> None:
        for i, url in enumerate(wanted.urls):
            try:
                return _transfer(url, wanted, partial, told)
            except HfHubHTTPError as error:
                if error.response.status_code != 404 or i == len(wanted.urls) - 1:
                    raise

    if _size(partial) < wanted.num_bytes or not partial.exists():
        _with_retries(once, wanted.source, lambda: _size(partial))


def _transfer(url: str, wanted: Wanted, partial: Path, told: Callable[[int], None]) -> None:
    """One request. Every byte that came is in the file, also when it ends in an error."""
    start = _size(partial)
    headers = build_hf_headers(token=token() or False) if wanted.with_token else {}
    headers |= {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as answer:
        hf_raise_for_status(answer)
        start = start if answer.status_code == 206 else 0
        length = answer.headers.get("Content-Length")
        if length is not None and start + int(length) != wanted.num_bytes:
            raise ValueError(f"{wanted.source}: has {start + int(length)} bytes, must have {wanted.num_bytes}")
        with partial.open("ab" if start else "wb", buffering=0) as file:
            for chunk in answer.iter_raw():
                start += file.write(chunk)
                if start > wanted.num_bytes:
                    raise ValueError(f"{wanted.source}: has more bytes than the {wanted.num_bytes} it must have")
                told(start)
            os.fsync(file.fileno())
    if start < wanted.num_bytes:
        raise ConnectionError(f"the answer ended at byte {start} of {wanted.num_bytes}")


def _with_retries(action: Callable[[], Result], what: str, reached: Callable[[], int]) -> Result:
    """`action`'s result, after network faults in ATTEMPTS without `reached` growing. Raises: ValueError."""
    failures, best = 0, reached()
    while True:
        try:
            return action()
        except (httpx2.RequestError, HfHubHTTPError, ConnectionError) as error:
            if isinstance(error, HfHubHTTPError) and error.response.status_code not in RETRIED:
                raise ValueError(f"{what}: {_refusal(error)}") from error
            failures, best = (1, reached()) if reached() > best else (failures + 1, best)
            cause = _cause(error)
            if failures >= ATTEMPTS:
                text = f"{what}: got no further in {ATTEMPTS} attempts, the last: {cause}"
                raise ValueError(f"{text}. What came is kept; the same command goes on from there") from error
        except httpx2.InvalidURL as error:
            raise ValueError(f"{what}: the address is wrong: {error}") from error
        wait_s = FIRST_WAIT_S * 2 ** (failures - 1)
        logger.warning("%s: %s; goes on in %g s (%d of %d)", what, cause, wait_s, failures + 1, ATTEMPTS)
        time.sleep(wait_s)


def _refusal(error: HfHubHTTPError) -> str:
    """What a status says, without the address, which may carry a signature."""
    status = error.response.status_code
    if status in (401, 403):
        have = "HF_TOKEN's account may not read it" if token() else "HF_TOKEN is not set"
        return (
            f"access refused ({status}), {have}: accept its terms on the repository's page, if it has any, and set "
            "HF_TOKEN to a token that may read it"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"there is no such revision ({status})"
    return f"not found ({status})" if status == 404 else f"the server answered {status}"


def _cause(error: Exception) -> str:
    if isinstance(error, HfHubHTTPError):
        return f"the server answered {error.response.status_code}"
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
