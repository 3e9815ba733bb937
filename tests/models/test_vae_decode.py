"""Decoding in chunks of latent frames gives the numbers of a whole decode, and a longer video takes no more memory."""

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sage_ray.models.hunyuan_video import HunyuanVideo, batched_vae
from sage_ray.models.vae_decode import decoded_chunks
from tests.conftest import POLICY


@pytest.fixture(scope="module")
def vaes(policy) -> dict[str, AutoencoderKLHunyuanVideo15]:
    """The shipped one; a random one with several layers per block, a block without upsampler, and attention that
    counts."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        random = AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(8, 8, 16, 16), layers_per_block=2, spatial_compression_ratio=8
        )
        with torch.no_grad():
            random.decoder.mid_block.attentions[0].proj_out.weight.mul_(10)
    return {"policy": policy.vae, "random": batched_vae(random.eval())}


def latents(vae: AutoencoderKLHunyuanVideo15, num_videos: int, num_frames: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_frames)
    return torch.randn(num_videos, vae.config.latent_channels, num_frames, 3, 4, generator=generator)


@pytest.mark.parametrize("name", ["policy", "random"])
@pytest.mark.parametrize("num_frames", [1, 2, 3, 6])
@torch.no_grad()
def test_chunks_of_any_size_are_the_whole_decode(vaes, name: str, num_frames: int) -> None:
    vae = vaes[name]
    z = latents(vae, 2, num_frames)
    whole = vae.decode(z).sample
    for size in (1, 2, 4, 6, 100):
        chunks = list(decoded_chunks(vae.decoder, z, size))
        assert len(chunks) == -(-num_frames // size)
        assert chunks[0].shape[2] == 4 * (min(size, num_frames) - 1) + 1
        assert torch.allclose(torch.cat(chunks, 2), whole, rtol=0, atol=4e-6 * float(whole.abs().max()))


@torch.no_grad()
def test_what_is_kept_between_chunks_matters(vaes) -> None:
    """The latter frames on their own are another video: the tolerance above is not what makes it pass."""
    z = latents(vaes["random"], 1, 4)
    whole = vaes["random"].decode(z).sample
    alone = vaes["random"].decode(z[:, :, 2:]).sample
    assert float((whole[:, :, -4:] - alone[:, :, -4:]).abs().max()) > 1e-2


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation gave."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = (leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        self.num_elements = max(self.num_elements, *sizes, 0)
        return out


@torch.no_grad()
def test_a_longer_video_makes_no_larger_tensor(vaes) -> None:
    def largest(num_frames: int, size: int) -> int:
        z = latents(vaes["random"], 1, num_frames)
        with LargestTensor() as mode:
            for _ in decoded_chunks(vaes["random"].decoder, z, size):
                pass
        return mode.num_elements

    assert largest(8, 2) == largest(4, 2)
    assert largest(8, 8) > 3 * largest(8, 2)


def test_frames_of_chunks_are_those_of_a_whole_decode(policy, vaes) -> None:
    """uint8, and where a float lies at the edge between two levels it may take the other."""
    z = latents(policy.vae, 3, 5)
    whole = policy.decode(z)
    assert whole.dtype == torch.uint8 and whole.shape == (3, 17, 24, 32, 3)
    for size in (1, 3):
        frames = HunyuanVideo.load(POLICY, decode_frames=size).decode(z)
        apart = (frames.int() - whole.int()).abs()
        assert frames.shape == whole.shape and int(apart.max()) <= 1 and float((apart > 0).float().mean()) < 1e-3
