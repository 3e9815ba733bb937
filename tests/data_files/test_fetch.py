"""`launch.py fetch` against a local server, with every fault that a network and a disk can have."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub.constants
import pytest

from sage_ray.fetch import transfer
from tests.conftest import ROOT
from tests.data_files.fake_hub import COMMIT, PIPELINE, REPO, FakeHub, Fault, files, run

FOLDER = "HunyuanVideo-1.5-Diffusers-480p_t2v"
BIG = "transformer/diffusion_pytorch_model.safetensors"
SMALL = "model_index.json"
LISTING = f"/api/models/{REPO}/revision/main"
SIZE = len(PIPELINE[BIG])


def cdn(file: str) -> str:
    return f"/cdn/{REPO}/resolve/{COMMIT}/{file}"


def test_brings_a_pipeline_once(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run(tmp_path)
    assert files(tmp_path / FOLDER) == PIPELINE
    assert [path.name for path in (tmp_path / ".fetch").iterdir()] == ["lock"]
    assert sum(request.sent for request in hub.requests) == sum(map(len, PIPELINE.values()))
    assert "complete, for model.path" in capsys.readouterr().out
    hub.requests.clear()
    run(tmp_path)
    assert [request.path for request in hub.requests] == [LISTING]
    assert f"{len(PIPELINE)} files" in (out := capsys.readouterr().out) and "0 of them to fetch, 0 B" in out


def test_a_dry_run_writes_nothing(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run(tmp_path / "new", "policy", "--dry-run")
    assert not (tmp_path / "new").exists() and len(hub.requests) == 1
    assert f"{FOLDER}/{BIG}  missing" in capsys.readouterr().out


def test_a_damaged_file_is_found_by_its_hash(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run(tmp_path)
    path = tmp_path / FOLDER / BIG
    path.write_bytes(PIPELINE[BIG][:-1] + bytes([PIPELINE[BIG][-1] ^ 1]))
    (tmp_path / FOLDER / SMALL).write_bytes(b"{}")
    hub.requests.clear()
    run(tmp_path)
    assert files(tmp_path / FOLDER) == PIPELINE
    assert hub.sent(BIG) == SIZE and sum(request.sent for request in hub.requests) == SIZE + len(PIPELINE[SMALL])
    assert "to be replaced: has sha256:" in (out := capsys.readouterr().out) and "has 2 bytes" in out


def test_goes_on_after_a_cut_without_repeating_a_byte(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults[cdn(BIG)] = Fault(times=1, cut_after=SIZE // 2)
    run(tmp_path)
    assert files(tmp_path / FOLDER) == PIPELINE and hub.sent(BIG) == SIZE
    assert [request.range for request in hub.requests if request.path == cdn(BIG)] == [None, f"bytes={SIZE // 2}-"]


def test_a_server_that_always_cuts_is_fetched_piece_by_piece(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults[cdn(BIG)] = Fault(cut_after=SIZE // 7 + 1)
    run(tmp_path)
    assert files(tmp_path / FOLDER) == PIPELINE and hub.sent(BIG) == SIZE


def test_gives_up_and_the_next_call_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults[cdn(BIG)] = Fault(times=1, cut_after=1000)
    run_until = hub.faults[cdn(BIG)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "ATTEMPTS", 1)
        with pytest.raises(ValueError, match=rf"{BIG}: got no further in 1 attempts.*the same command goes on"):
            run(tmp_path)
    assert run_until.times == 0 and not (tmp_path / FOLDER / BIG).exists()
    hub.faults[cdn(BIG)] = Fault(cut_after=0)
    with pytest.raises(ValueError, match="no further in 3 attempts"):
        run(tmp_path)
    hub.faults[cdn(BIG)] = Fault(status=503)
    with pytest.raises(ValueError, match="no further in 3 attempts, the last: the server answered 503"):
        run(tmp_path)
    hub.faults.clear()
    run(tmp_path)
    assert files(tmp_path / FOLDER) == PIPELINE and hub.sent(BIG) == SIZE


@pytest.mark.parametrize("how", [{"reset": True}, {"no_length": True}])
def test_other_kinds_of_cuts(hub: FakeHub, tmp_path: Path, how: dict) -> None:
    hub.faults[cdn(BIG)] = Fault(times=2, cut_after=SIZE // 3, **how)
    run(tmp_path)
    assert files(tmp_path / FOLDER) == PIPELINE
    assert "reset" in how or hub.sent(BIG) == SIZE


def test_a_server_without_ranges_starts_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults[cdn(BIG)] = Fault(times=1, cut_after=1000, no_range=True)
    run(tmp_path)
    hub.faults[cdn(BIG)] = Fault(cut_after=1000, no_range=True)
    (tmp_path / FOLDER / BIG).unlink()
    with pytest.raises(ValueError, match="no further in 3 attempts"):
        run(tmp_path)
    hub.faults[cdn(BIG)] = Fault(no_range=True)
    run(tmp_path)
    assert files(tmp_path / FOLDER) == PIPELINE


@pytest.mark.parametrize("file", [BIG, SMALL])
def test_wrong_content_gets_no_name(hub: FakeHub, tmp_path: Path, file: str) -> None:
    """Of a large file the listing has the sha256, of a small one Git's hash."""
    path = cdn(file) if file == BIG else cdn(file).removeprefix("/cdn")
    hub.faults[path] = Fault(body=bytes(len(PIPELINE[file])))
    kind = "sha256" if file == BIG else "git"
    with pytest.raises(ValueError, match=rf"{REPO}/{file}: what came has {kind}:\w+, must have {kind}:\w+; it was del"):
        run(tmp_path)
    assert not (tmp_path / FOLDER / file).exists() and not list((tmp_path / ".fetch").glob("*.partial"))
    hub.faults.clear()
    run(tmp_path)
    assert files(tmp_path / FOLDER) == PIPELINE


@pytest.mark.parametrize("change", [-5, 5])
def test_wrong_size(hub: FakeHub, tmp_path: Path, change: int) -> None:
    hub.faults[cdn(BIG)] = Fault(body=bytes(SIZE + change))
    with pytest.raises(ValueError, match=rf"{BIG}: has {SIZE + change} bytes, must have {SIZE}"):
        run(tmp_path)
    assert not (tmp_path / FOLDER / BIG).exists()


@pytest.mark.parametrize(
    ("path", "fault", "message"),
    [
        (LISTING, Fault(status=404), f"{REPO} at main: not found .404."),
        (LISTING, Fault(status=401), "access refused .401., HF_TOKEN's account may not read it: accept its terms"),
        (LISTING, Fault(status=500), "got no further in 3 attempts, the last: the server answered 500"),
        (cdn(BIG), Fault(status=404), f"{REPO}/{BIG}: not found .404."),
        (cdn(BIG).removeprefix("/cdn"), Fault(status=403, headers={"X-Error-Code": "GatedRepo"}), "refused .403."),
        (cdn(BIG), Fault(stall_s=1, cut_after=0), "no further in 3 attempts, the last: ReadTimeout"),
        (LISTING, Fault(status=200), "is not a hub's listing|holds no"),
    ],
)
def test_refusals_name_file_and_rule_and_never_the_token(
    hub: FakeHub, tmp_path: Path, path: str, fault: Fault, message: str, monkeypatch, capsys, caplog
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.faults[path] = fault
    with pytest.raises(ValueError, match=message) as caught:
        run(tmp_path)
    assert "hf_secret" not in str(caught.value) + capsys.readouterr().out + caplog.text


def test_the_token_goes_to_the_hub_alone(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "saved").write_text("hf_saved")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "saved"))
    run(tmp_path)
    assert {request.token for request in hub.requests} == {None}
    shutil.rmtree(tmp_path / FOLDER)
    hub.requests.clear()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    run(tmp_path)
    tokens = {request.path.startswith("/cdn"): request.token for request in hub.requests}
    assert tokens == {False: "Bearer hf_secret", True: None}
    monkeypatch.setenv("HF_TOKEN", "hf_sec ret")
    with pytest.raises(ValueError, match="HF_TOKEN: must be visible ASCII") as caught:
        run(tmp_path)
    assert "ret" not in str(caught.value)


def test_a_slow_answer_is_asked_for_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults[cdn(BIG)] = Fault(times=2, stall_s=1, cut_after=1000)
    run(tmp_path)
    assert files(tmp_path / FOLDER) == PIPELINE and hub.sent(BIG) == SIZE


def test_a_full_disk_is_refused_before_and_named_during(hub: FakeHub, tmp_path: Path, monkeypatch) -> None:
    total = sum(map(len, PIPELINE.values()))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: argparse.Namespace(free=total - 1))
        with pytest.raises(
            ValueError, match=rf"{tmp_path}: needs 14.23 MB \({total} bytes\), its disk has 14.23 MB fr"
        ):
            run(tmp_path)
        assert len(hub.requests) == 1
        patch.setattr(shutil, "disk_usage", lambda path: argparse.Namespace(free=total))

        def full(handle: int) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "fsync", full)
        with pytest.raises(ValueError, match=f"{tmp_path}: No space left on device"):
            run(tmp_path)
    run(tmp_path)
    assert files(tmp_path / FOLDER) == PIPELINE


def _sizes(folder: Path, sent: int) -> list[int]:
    """Sizes of the large file's partial file, once it is under way."""
    return [path.stat().st_size for path in folder.glob(f"{Path(BIG).name}.*.partial") if sent and path.stat().st_size]


def test_no_network(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.close()
    with pytest.raises(ValueError, match=f"{REPO} at main: got no further in 3 attempts, the last: ConnectError"):
        run(tmp_path)


def test_two_processes_and_a_killed_one(hub: FakeHub, tmp_path: Path) -> None:
    """The second is refused at once; after the first was killed the next goes on with what it left."""
    hub.faults[cdn(BIG)] = Fault(bytes_per_s=SIZE // 20)
    program = (
        "import os, argparse; os.environ.setdefault('HF_HUB_OFFLINE', '1')\n"
        "from sage_ray.fetch import command as fetch; parser = argparse.ArgumentParser(); fetch.add_arguments(parser)\n"
        f"fetch.run(parser.parse_args(['policy', '--to', {str(tmp_path)!r}]))"
    )
    first = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    deadline_s = time.monotonic() + 20
    while not _sizes(tmp_path / ".fetch", hub.sent(BIG)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    with pytest.raises(ValueError, match=f"--to {tmp_path}: another fetch is writing to it"):
        run(tmp_path)
    first.send_signal(signal.SIGKILL)
    assert first.wait(10) == -signal.SIGKILL and not (tmp_path / FOLDER / BIG).exists()
    hub.faults.clear()
    hub.requests.clear()
    run(tmp_path)
    assert files(tmp_path / FOLDER) == PIPELINE and 0 < hub.sent(BIG) < SIZE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rfilename": "vae/../../out"}, "lists the file 'vae/../../out', which is not a path inside a folder"),
        ({"rfilename": "vae/x", "blobId": None}, f"{REPO}/vae/x: is listed without size or hash"),
        ({"rfilename": "vae/x", "size": None}, f"{REPO}/vae/x: is listed without size or hash"),
    ],
)
def test_a_listing_that_cannot_be_trusted(hub: FakeHub, tmp_path: Path, change: dict, message: str) -> None:
    entry = {"rfilename": "vae/x", "size": 1, "blobId": "00", **change}
    hub.listing[REPO] = lambda answer: {**answer, "siblings": [*answer["siblings"], entry]}
    with pytest.raises(ValueError, match=message):
        run(tmp_path)
    del hub.repos[REPO]["guider/guider_config.json"]
    hub.listing.clear()
    with pytest.raises(ValueError, match=f"{REPO} at v2: holds no guider/guider_config.json"):
        run(tmp_path, "policy", "--revision", "v2")
