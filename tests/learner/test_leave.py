"""By turns, through the plain classes: who leaves holds no byte on the device, and who comes back has lost no bit."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from actors.learner import LearnerRank
from actors.reward_worker import RewardWorker
from actors.turns import Turns
from sage_ray.parallel import free_port
from sage_ray.parked import tensors_of
from sage_ray.rewards.scorer import modules_of
from tests.learner.test_policy_update import PROMPT, batch, request, worker  # noqa: F401  (worker is a fixture)
from tests.small import small_config

CLIPS = np.random.default_rng(0).integers(0, 255, (2, 9, 32, 32, 3), np.uint8)


def learner_rank(tmp_path, *overrides: str) -> LearnerRank:
    """One rank with references, a moving average and Muon beside AdamW."""
    words = ["optimizer.name=muon", "optimizer.ema_decay=0.5", "loss.max_disagreement=10", *overrides]
    made = LearnerRank(small_config(tmp_path, words), 0, "cpu")
    made.setup("127.0.0.1", free_port())
    return made


@pytest.fixture(params=[(), ("lora.rank=3",)], ids=["full", "lora"])
def learner(request, tmp_path) -> Iterator[LearnerRank]:
    yield learner_rank(tmp_path, *request.param)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def reward(tmp_path_factory) -> RewardWorker:
    return RewardWorker(small_config(tmp_path_factory.mktemp("reward")), "cpu")


def sizes(tensors) -> set[int]:
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return {t.untyped_storage().nbytes() for t in local}


def of_reward(reward: RewardWorker) -> list[torch.Tensor]:
    found = [tensors_of(module) for named in reward.scorers for module in modules_of(named.scorer.scorer)]
    return [t for pair in found for part in pair for t in part]


def of_learner(learner: LearnerRank) -> list[torch.Tensor]:
    """Everything an update leaves behind, found without `held_tensors`."""
    rule = learner.update_rule
    held = [*rule.model.parameters(), *rule.model.buffers()]
    held += [v for state in rule.optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
    banks = [bank for one in (rule.bank, rule.averages) for bank in (*one._copies.values(), one._stash)]
    return held + [tensor for bank in banks for tensor in bank.values()]


def values(tensors) -> list[torch.Tensor]:
    return [(t.to_local() if hasattr(t, "to_local") else t).detach().clone() for t in tensors]


def test_a_learner_that_left_holds_nothing_and_comes_back_as_it_was(learner, worker) -> None:  # noqa: F811
    """After an update, so that optimizer, references, average and stash are there."""
    trajectory = worker.generate(request())[0]
    learner.update_rule.update([[batch(trajectory)]], [12.0])
    held = of_learner(learner)
    before, num_bytes = values(held), sum(t.nbytes for t in values(held))
    assert learner.leave() == num_bytes > 0
    assert sizes(held) == {0}
    assert learner.leave() == 0
    learner.enter()
    assert all(torch.equal(a, b) for a, b in zip(before, values(held), strict=True))
    learner.enter()
    metrics = learner.update_rule.update([[batch(trajectory, 1)]], [12.0])
    assert np.isfinite(list(metrics.values())).all() and learner.update_rule.version == 2


@pytest.mark.parametrize("overrides", [(), ("lora.rank=3",)], ids=["full", "lora"])
def test_leaving_changes_no_step(tmp_path, worker, overrides) -> None:  # noqa: F811
    trajectory, results = worker.generate(request())[0], []
    for leaves in (True, False):
        learner = learner_rank(tmp_path / str(leaves), *overrides)
        metrics = []
        for seed in range(3):
            if leaves:
                learner.leave()
                learner.enter()
            metrics.append(learner.update_rule.update([[batch(trajectory, seed)]], [12.0]))
        results.append((metrics, learner.publish()[1], learner.publish(average=True)[1]))
        dist.destroy_process_group()
    assert results[0] == results[1]


def test_a_reward_worker_that_left_holds_nothing_and_scores_as_before(reward) -> None:
    def parts() -> list[list[float]]:
        return [score.parts.tolist() for score in reward.score([0, 1], [PROMPT.text] * 2, CLIPS, CLIPS)]

    before = parts()
    assert reward.leave() == sum(t.nbytes for t in {id(t): t for t in of_reward(reward)}.values()) > 0
    assert sizes(of_reward(reward)) == {0}
    assert reward.leave() == 0
    reward.enter()
    assert parts() == before and np.isfinite(before).all()


class Side:
    """Plain actors as the pools that Turns speaks to."""

    def __init__(self, **members):
        self.members = members

    def leave(self) -> dict[str, int]:
        return {role: member.leave() for role, member in self.members.items()}

    def enter(self) -> None:
        for member in self.members.values():
            member.enter()


def test_one_side_is_empty_while_the_other_is_in(learner, reward, worker) -> None:  # noqa: F811
    generation = [*of_reward(reward), *worker.model.velocity.parameters(), *worker.model.vae.parameters()]
    turns = Turns(True, Side(rollout=worker, reward=reward), learner)
    for _ in range(2):
        turns.learn()
        assert sizes(generation) == {0} and 0 not in sizes(of_learner(learner))
        seconds = turns.seconds
        turns.learn()
        assert turns.seconds == seconds
        turns.generate()
        assert 0 not in sizes(generation) and sizes(of_learner(learner)) == {0}
        turns.generate()
    learner.enter()
    found = turns.sizes()
    assert found.keys() == {"turns/rollout_bytes", "turns/reward_bytes", "turns/learner_bytes"}
    assert min(found.values()) > 0 and turns.seconds > 0


def test_without_turns_nobody_leaves(reward) -> None:
    turns = Turns(False, Side(reward=reward), reward)
    turns.learn()
    turns.generate()
    assert 0 not in sizes(of_reward(reward)) and turns.sizes() == {} and turns.seconds == 0
