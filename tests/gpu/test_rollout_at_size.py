"""What only a real card shows of a rollout that fits it: the order of copies, memory that leaves and comes back, and
decoding in chunks, on a stream of its own."""

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15

from actors.rollout_worker import RolloutWorker
from sage_ray.host_copy import HostCopy
from sage_ray.models.hunyuan_video import HunyuanVideo
from sage_ray.models.vae_decode import decoded_chunks
from sage_ray.parked import Parked
from tests.conftest import POLICY
from tests.rollout.small_rollout import equal, publication, requests
from tests.small import small_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_a_copy_waits_for_what_was_queued_before_it_and_not_for_what_comes_later() -> None:
    copy = HostCopy((4, 2**22), torch.float32, "cuda")
    for part in range(4):
        value = torch.zeros(2**22, device="cuda")
        torch.cuda._sleep(20_000_000)
        value += part + 1
        copy.write(part, value)
        del value
        torch.full((2**22,), -1.0, device="cuda")  # would take the freed memory
    done = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    done.record()
    array = copy.numpy()
    assert not done.query()
    assert np.array_equal(array, np.repeat(np.arange(1, 5, dtype=np.float32)[:, None], 2**22, 1))


@pytest.mark.parametrize("shared", [True, False])
def test_memory_leaves_the_card_and_comes_back(shared: bool) -> None:
    tensors = [torch.randn(2**24, device="cuda") for _ in range(4)]
    before = [t.cpu() for t in tensors]
    host, held = Parked(shared), torch.cuda.memory_allocated()
    for factor in (2.0, 4.0):
        assert host.park(tensors[:2], tensors[2:]) == 2**28
        assert torch.cuda.memory_allocated() == held - 2**28
        host.unpark()
        assert all(torch.equal(t.cpu(), b) for t, b in zip(tensors[2:], before[2:], strict=True))
        for t in tensors[:2]:
            t.mul_(2.0)
        assert torch.equal(tensors[0].cpu(), before[0] * factor)


@torch.no_grad()
def test_chunks_are_the_whole_decode_in_bfloat16_and_take_less_memory() -> None:
    torch.manual_seed(0)
    vae = AutoencoderKLHunyuanVideo15(block_out_channels=(32, 32, 64, 64, 64), latent_channels=8)
    vae = vae.to("cuda", torch.bfloat16).eval()
    latents, peaks, pixels = torch.randn(1, 8, 9, 12, 16, device="cuda", dtype=torch.bfloat16), [], []
    exact = copy.deepcopy(vae).float().decode(latents.float()).sample
    for run in (
        lambda: vae.decode(latents).sample,
        lambda: torch.cat(list(decoded_chunks(vae.decoder, latents, 2)), 2),
    ):
        run()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        pixels.append(run().float())
        peaks.append(torch.cuda.max_memory_allocated() - start)
    whole, chunked = (float((one - exact).norm() / exact.norm()) for one in pixels)
    assert chunked < 1.1 * whole < 0.05
    assert peaks[1] < peaks[0] / 2


def test_parked_encoders_give_the_same_bits() -> None:
    stays, parks = (HunyuanVideo.load(POLICY, torch.bfloat16, "cuda", parks_encoders=parks) for parks in (False, True))
    for text in ("a small red circle moves left", 'a sign that says "go"'):
        one, other = stays.encode_prompt(text), parks.encode_prompt(text)
        assert np.array_equal(one.text, other.text) and np.array_equal(one.byt5, other.byt5)
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in parks.prompts.tensors())
    assert all(tensor.is_cuda for tensor in stays.prompts.tensors())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_beside_denoising_and_a_turn_away_change_no_bit(tmp_path, dtype: str) -> None:
    keys = [f"model.dtype={dtype}", "rollout.overlap_decode=true", "rollout.decode_frames=1", "cluster.take_turns=true"]
    made = RolloutWorker(small_config(tmp_path, keys), "cuda")
    made.version = 0
    serial = [made.generate(request) for request in requests()]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            answers = list(threads.map(made.generate, requests()))
            assert all(equal(one, other) for one, other in zip(answers, serial, strict=True))
    held = torch.cuda.memory_allocated()
    freed, left = made.leave(), torch.cuda.memory_allocated()
    assert 10_000_000 < freed <= held - left <= 1.1 * freed
    made.enter()
    assert all(equal(made.generate(request), answer) for request, answer in zip(requests(), serial, strict=True))
    if dtype == "float32":
        made.load_weights(*publication(1, 1.02))
        loaded = made.generate(*requests(1, version=1))
        made.leave()
        made.enter()
        assert equal(made.generate(*requests(1, version=1)), loaded)
