"""A replayed forward on a real card: the same bits as an eager one, with other inputs and with new weights."""

import pytest
import torch

from sage_ray.models.condition import condition_tensors
from sage_ray.models.graphed import MAX_GRAPHS, GraphedForward
from sage_ray.models.hunyuan_video import HunyuanVideo
from sage_ray.models.packed_velocity import guided_velocity
from tests.conftest import POLICY

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TEXTS = ("a small red circle moves left slowly on a gray background", "a red circle")


@pytest.fixture(scope="module")
def model() -> HunyuanVideo:
    return HunyuanVideo.load(POLICY, torch.float32, "cuda")


def velocity(model, forward, seed: int, videos: int, scale: float = 1.0, texts=TEXTS) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    latents = torch.randn(videos, *model.latent_shape(9, 32, 32), generator=generator, device="cuda")
    condition = condition_tensors([model.encode_prompt(text) for text in texts], "cuda")
    negative = condition_tensors([model.encode_prompt("")], "cuda")
    with torch.no_grad():
        return guided_velocity(forward, latents, [0.3 + 0.1 * seed], condition, negative, scale)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_replay_gives_the_bits_of_an_eager_forward(model, scale: float) -> None:
    graphed = GraphedForward(model.velocity)
    for seed in range(3):
        for videos in (2, 8):
            eager = velocity(model, model.velocity, seed, videos, scale)
            assert torch.equal(velocity(model, graphed, seed, videos, scale), eager)


def test_weights_that_are_overwritten_in_place_are_seen(model) -> None:
    graphed = GraphedForward(model.velocity)
    before = velocity(model, graphed, 0, 4)
    held = {name: p.detach().clone() for name, p in model.velocity.named_parameters()}
    with torch.no_grad():
        for p in model.velocity.parameters():
            p.mul_(1.01)
    after = velocity(model, graphed, 0, 4)
    assert torch.equal(after, velocity(model, model.velocity, 0, 4)) and not torch.equal(before, after)
    with torch.no_grad():
        for name, p in model.velocity.named_parameters():
            p.copy_(held[name])
    assert torch.equal(velocity(model, graphed, 0, 4), before)


def test_old_shapes_make_room_and_come_back(model) -> None:
    graphed = GraphedForward(model.velocity)
    first = velocity(model, graphed, 0, 1, texts=TEXTS[:1])
    for videos in range(2, MAX_GRAPHS + 3):
        velocity(model, graphed, 0, videos, texts=TEXTS[:1])
    assert torch.equal(velocity(model, graphed, 0, 1, texts=TEXTS[:1]), first)
