"""One thread denoises while another decodes: the bits of one after the other, and errors that end nothing else."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event, get_ident

import pytest
import torch

from actors.rollout_worker import StaleWeightsError
from tests.rollout.small_rollout import equal, publication, requests, worker

WAIT_S = 60


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return worker(tmp_path_factory.mktemp("overlap"), "rollout.overlap_decode=true", "rollout.decode_frames=1")


def test_a_group_is_decoded_while_the_next_is_denoised(made) -> None:
    """The first decode goes on only when another thread has made a forward."""
    serial = [made.generate(request) for request in requests()]
    decoding, forward = [], Event()

    def on_decode(module, inputs) -> None:
        decoding.append(get_ident())
        assert forward.wait(WAIT_S)

    def on_forward(module, inputs, out) -> None:
        assert not torch.is_grad_enabled() or not out.requires_grad
        if decoding and get_ident() != decoding[0]:
            forward.set()

    hooks = [
        made.model.vae.decoder.conv_in.register_forward_pre_hook(on_decode),
        made.model.velocity.register_forward_hook(on_forward),
    ]
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(made.generate, requests()))
    for hook in hooks:
        hook.remove()
    assert forward.is_set() and len(set(decoding)) > 1
    assert all(equal(one, other) for one, other in zip(answers, serial, strict=True))


def test_weights_wait_for_the_denoising_and_leaving_for_both(made) -> None:
    """A group that began under a version ends under it, whatever arrives meanwhile."""
    expected, began, let_go = made.generate(*requests(1)), Event(), Event()

    def on_forward(module, inputs) -> None:
        began.set()
        assert let_go.wait(WAIT_S)

    hook = made.model.velocity.register_forward_pre_hook(on_forward)
    with ThreadPoolExecutor(3) as threads:
        answer = threads.submit(made.generate, *requests(1))
        assert began.wait(WAIT_S)
        loaded = threads.submit(made.load_weights, *publication(1, 1.05))
        with pytest.raises(TimeoutError):
            loaded.result(0.5)
        assert made.version == 0
        hook.remove()
        let_go.set()
        assert equal(answer.result(WAIT_S), expected)
        assert loaded.result(WAIT_S)["version"] == 1
        began.clear()
        let_go.clear()
        hook = made.model.vae.decoder.conv_in.register_forward_pre_hook(on_forward)
        groups = threads.submit(made.generate, *requests(1, version=1))
        assert began.wait(WAIT_S)
        left = threads.submit(made.leave)
        with pytest.raises(TimeoutError):
            left.result(0.5)
        hook.remove()
        let_go.set()
        assert left.result(WAIT_S) > 0
        assert groups.result(WAIT_S)[2].weights_digest == publication(1, 1.05)[1]
    made.enter()
    made.load_weights(*publication(0, 1.0))


def test_an_error_in_either_half_leaves_the_worker_usable(made) -> None:
    made.load_weights(*publication(0, 1.0))
    expected = made.generate(*requests(1))
    with ThreadPoolExecutor(2) as threads:
        wrong, right = threads.map(threads.submit, [made.generate] * 2, [requests(1, 7)[0], requests(1)[0]])
        with pytest.raises(StaleWeightsError, match="version 7 was asked for, this worker holds 0"):
            wrong.result(WAIT_S)
        assert equal(right.result(WAIT_S), expected)
        made.model.decode_frames = 0
        for future in [threads.submit(made.generate, request) for request in requests(2)]:
            with pytest.raises(RuntimeError, match="split"):
                future.result(WAIT_S)
        made.model.decode_frames = 1
        assert equal(threads.submit(made.generate, *requests(1)).result(WAIT_S), expected)
