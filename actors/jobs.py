"""Ray's Jobs API as launch.py uses it: the project is uploaded, a launch.py command runs on the head, logs come back.

A cluster's address is, --address, RAY_API_SERVER_ADDRESS, RAY_ADDRESS, the Ray that runs on this machine.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import requests
from ray.dashboard.modules.job.pydantic_models import JobDetails
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from actors.auth import explain
from sage_ray.redact import redact

ROOT = Path(__file__).parents[1]
LEFT_OUT = [".git", ".ci", ".hypothesis", ".pytest_cache", ".ruff_cache", "docs", "tests", "outputs", "checkpoints"]
"""Of the project, what no job needs; what .gitignore names is left out too."""
PASSED_ON = ("HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM")
"""Environment variables that a job has as this process has them."""
STOP_WAIT_S = 600
"""Time that a job which is stopped has to save."""
POLL_S = 0.5
STOPPED_CODE = 143


class JobError(ValueError):
    """A job or a cluster that is not there, or does not answer; one line."""


@contextmanager
def _answers(address: str) -> Iterator[None]:
    """Inside, what the cluster refuses is a JobError that names the address."""
    try:
        yield
    except AuthenticationError as error:
        raise JobError(f"{address}: {explain(str(error))}") from None
    except (ConnectionError, requests.exceptions.RequestException, aiohttp.ClientError, TimeoutError) as error:
        raise JobError(f"{address}: no cluster answers ({type(error).__name__}); {HOW_TO_START}") from None
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise JobError(f"{address}: {redact(lines[0])}") from None


HOW_TO_START = (
    "start one with `ray up cluster.yaml` and forward its port with `ray dashboard cluster.yaml`, or with "
    "`ray start --head` on this machine; name another one with --address http://HOST:8265"
)


class Jobs:
    """The jobs of one cluster. Raises JobError where the cluster does not answer or refuses."""

    def __init__(self, address: str | None):
        self.address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or "auto"
        if address:  # Ray lets both variables overrule the argument
            os.environ["RAY_API_SERVER_ADDRESS"] = address
        with _answers(self.address):
            self._client = JobSubmissionClient(None if self.address == "auto" else self.address)
        self.address = self._client.get_address()

    def submit(self, words: Sequence[str], name: str, *, job: str | None = None, stop_wait_s: int = STOP_WAIT_S) -> str:
        """Upload the project and start `launch.py WORDS` on the head; the job's id.

        Args: name: shown as the job's name. job: its id, None makes one. stop_wait_s: time to save when it is stopped.
        """
        variables = {key: os.environ[key] for key in PASSED_ON if key in os.environ}
        variables |= {"RAY_JOB_STOP_WAIT_TIME_S": str(stop_wait_s), "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}
        with _answers(self.address):
            return self._client.submit_job(
                entrypoint=f"exec python launch.py {shlex.join(words)}",
                submission_id=job,
                runtime_env={"working_dir": str(ROOT), "excludes": LEFT_OUT, "env_vars": variables},
                metadata={"job_name": name, "project": "sage-ray", "command": redact(shlex.join(words))},
            )

    def follow(self, job: str) -> int:
        """Print the job's log until it ends; its exit code. Ctrl-C leaves the job alone."""
        with _answers(self.address):
            asyncio.run(self._tail(job))
        return self.wait(job, timeout_s=60.0)

    async def _tail(self, job: str) -> None:
        async for part in self._client.tail_job_logs(job):
            print(redact(part), end="", flush=True)

    def logs(self, job: str) -> str:
        """What the job has written so far."""
        with _answers(self.address):
            return redact(self._client.get_job_logs(job))

    def details(self, job: str) -> JobDetails:
        """State, times and name."""
        with _answers(self.address):
            return self._client.get_job_info(job)

    def all(self) -> list[JobDetails]:
        """Every submitted job, the newest first."""
        with _answers(self.address):
            jobs = [job for job in self._client.list_jobs() if job.submission_id]
        return sorted(jobs, key=lambda job: -(job.start_time or 0))

    def stop(self, job: str) -> None:
        """Ask the job to save and end; see `wait`."""
        with _answers(self.address):
            self._client.stop_job(job)

    def wait(self, job: str, timeout_s: float) -> int:
        """Wait for the job's end; its exit code, 143 where it was stopped. Raises JobError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            details = self.details(job)
            if details.status.is_terminal():
                return exit_code(details)
            if time.monotonic() > deadline:
                raise JobError(f"{job}: still {details.status.value} after {timeout_s:.0f} s")
            time.sleep(POLL_S)


def exit_code(details: JobDetails) -> int:
    """Of a job that has ended: the driver's own; 143 where it was stopped, 1 where Ray could not start it."""
    if details.status == JobStatus.SUCCEEDED:
        return 0
    if details.status == JobStatus.STOPPED:
        return STOPPED_CODE
    return details.driver_exit_code or 1


def row(details: JobDetails) -> tuple[str, str, str, str]:
    """(id, name, state, what is known besides) for a table."""
    begun, ended = details.start_time, details.end_time
    seconds = ((ended or time.time() * 1000) - begun) / 1000 if begun else 0.0
    note = f"{seconds:.0f} s"
    if details.status.is_terminal():
        note += f", exit code {exit_code(details)}"
    if details.status == JobStatus.FAILED and details.driver_exit_code is None:
        note += f", {redact((details.message or 'no reason given').splitlines()[0])}"
    return details.submission_id or "", (details.metadata or {}).get("job_name", ""), details.status.value, note


def check_words(words: Sequence[str], files: Sequence[Path], output: str) -> None:
    """What can be seen here of a command that is to run elsewhere.

    Args: files: configuration files; output: where it writes, empty where it writes nowhere.

    Raises: JobError for files outside the project, and for a relative output, which would go with the job's folder.
    """
    for file in files:
        if file.is_absolute() or not (ROOT / file).resolve().is_relative_to(ROOT):
            raise JobError(f"--config {file}: must be relative to {ROOT}: only the project is uploaded")
        if not (ROOT / file).is_file():
            raise JobError(f"--config {file}: the configuration file does not exist in {ROOT}")
    if output and not Path(output).is_absolute():
        raise JobError(
            f"output_dir={output!r}: must be an absolute path on the cluster: the folder of a job is thrown away"
        )


def tell(text: str) -> None:
    """A line about the job, beside its log."""
    print(text, file=sys.stderr, flush=True)
