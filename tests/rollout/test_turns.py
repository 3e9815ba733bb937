"""A worker that leaves its device and comes back computes the same bits, under the weights that it was given last."""

import pytest
import torch

from actors.rollout_worker import AwayError, RolloutWorker, StaleWeightsError
from tests.rollout.small_rollout import equal, publication, requests, worker

LORA = ("lora.rank=2", "lora.alpha=4")


def bytes_there(made: RolloutWorker) -> int:
    model = made.model
    tensors = [*model.velocity.parameters(), *model.vae.parameters(), *model.prompts.tensors()]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("turns", ["cluster.take_turns=true", "cluster.take_turns=false"])
def test_a_worker_leaves_and_comes_back(tmp_path, turns: str) -> None:
    """With turns the encoders wait on the host anyway, without they leave with the others."""
    made = worker(tmp_path, turns)
    before, there = made.generate(*requests(1)), bytes_there(made)
    assert there > 10_000_000
    assert made.leave() == there and bytes_there(made) == 0 and made.leave() == 0
    with pytest.raises(AwayError, match="enter brings them back"):
        made.generate(*requests(1))
    with pytest.raises(AwayError, match="enter brings them back"):
        made.load_weights(*publication(1, 1.01))
    assert made.version == 0
    made.enter()
    made.enter()
    assert bytes_there(made) == there
    assert equal(made.generate(*requests(1)), before)
    made.generate(*requests(3))
    assert made.leave() == there


@pytest.mark.parametrize("lora", [(), LORA], ids=["weights", "adapters"])
def test_weights_between_turns_stay(tmp_path, lora: tuple[str, ...]) -> None:
    made, stays = worker(tmp_path, *lora, "cluster.take_turns=true"), worker(tmp_path, *lora)
    answers = []
    for version, factor in ((1, 1.02), (2, 0.97)):
        made.leave()
        made.enter()
        with pytest.raises(StaleWeightsError):
            made.generate(*requests(1, version))
        for one in (made, stays):
            one.load_weights(*publication(version, factor, lora))
        made.leave()
        made.enter()
        answers.append(made.generate(*requests(1, version)))
        assert equal(answers[-1], stays.generate(*requests(1, version)))
    assert not torch.equal(*(torch.from_numpy(answer[0].latents) for answer in answers))
