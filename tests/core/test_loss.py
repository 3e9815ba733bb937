"""The clipped policy loss: numbers by hand, gradients, weight-0 rows."""

import math

import pytest
import torch

from sage_ray.loss import policy_loss

INF, NAN = float("inf"), float("nan")


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def by_hand(ratio, advantage, weight=1.0, scale=1.0, clip_range=0.2):
    log_prob = double(math.log(ratio)).requires_grad_()
    result = policy_loss(log_prob, double(0.0), double(advantage), double(weight), clip_range=clip_range, scale=scale)
    result.sum.backward()
    return result.sum.item(), log_prob.grad.item(), int(result.num_clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),  # on-policy: the gradient is -A
        (1.0, -2.0, 2.0, 2.0, 0),
        (1.1, 2.0, -2.2, -2.2, 0),  # inside the range
        (1.5, 2.0, -2.4, 0.0, 1),  # good and already likelier: clipped at 1.2
        (0.5, 2.0, -1.0, -1.0, 0),  # good but less likely: pulled back
        (1.5, -2.0, 3.0, 3.0, 0),  # bad and likelier: pushed down
        (0.5, -2.0, 1.6, 0.0, 1),  # bad and already less likely: clipped at 0.8
        (1.5, 0.0, 0.0, 0.0, 0),
    ],
)
def test_by_hand(ratio, advantage, loss, gradient, clipped):
    got = by_hand(ratio, advantage)
    assert got == (pytest.approx(loss, rel=1e-12, abs=1e-15), pytest.approx(gradient, rel=1e-12, abs=1e-15), clipped)


def test_weight_and_scale_multiply_value_and_gradient():
    assert by_hand(1.1, 2.0, weight=0.5, scale=3.0)[:2] == pytest.approx((-3.3, -3.3), rel=1e-12)


def test_rows_are_summed_and_counted():
    ratios = double(1.5, 0.5, 1.0, 1.5).requires_grad_()
    result = policy_loss(
        ratios.log(), torch.zeros(4).double(), double(1, -1, 2, 1), double(1, 1, 1, 0), clip_range=0.2, scale=2.0
    )
    # 2 * (-1.2 + 0.8 - 2): the fourth row has no weight and is not counted as clipped.
    assert result.sum.item() == pytest.approx(-4.8, rel=1e-12) and int(result.num_clipped) == 2
    torch.testing.assert_close(result.ratio[:3], ratios[:3].detach())
    assert result.sum.shape == () and not result.ratio.requires_grad


def test_the_official_clip_range_works_in_float32():
    """A log-prob off by 1e-3 removes every row with A < 0 that became less likely: the fault of algorithm.md 5."""
    log_prob = torch.full((2,), 0.5, requires_grad=True)
    old = torch.full((2,), 0.501)
    result = policy_loss(log_prob, old, torch.tensor([1.0, -1.0]), torch.ones(2), clip_range=1e-4, scale=1.0)
    result.sum.backward()
    assert int(result.num_clipped) == 1 and log_prob.grad[1] == 0
    assert log_prob.grad[0].item() == pytest.approx(-math.exp(-1e-3), rel=1e-5)


def test_the_old_log_prob_carries_no_gradient():
    old = double(0.1, 0.2).requires_grad_()
    log_prob = double(0.1, 0.2).requires_grad_()
    policy_loss(log_prob, old, double(1, -1), double(1, 1), clip_range=0.2, scale=1.0).sum.backward()
    assert old.grad is None
    torch.testing.assert_close(log_prob.grad, double(-1, 1))


def test_gradcheck():
    torch.manual_seed(0)
    old, advantages = torch.randn(16).double(), torch.randn(16).double()
    # Away from the kinks at ratio 0.8 and 1.2, on both sides of them.
    offsets = double(-1.0, -0.5, -0.1, 0.05, 0.1, 0.3, 0.5, 1.0).repeat(2)
    weights = (torch.arange(16) % 5 != 0).double()
    log_prob = (old + offsets).requires_grad_()

    def loss(x):
        return policy_loss(x, old, advantages, weights, clip_range=0.2, scale=1.7).sum

    assert torch.autograd.gradcheck(loss, log_prob)


@pytest.mark.parametrize("bad", [1e4, INF, -INF, NAN])
def test_a_row_without_weight_adds_exactly_nothing(bad):
    """Its ratio overflows, and infinity times weight 0 was nan for the whole batch (pitfall 22)."""
    log_prob = torch.tensor([bad, 0.0], requires_grad=True)
    result = policy_loss(
        log_prob, torch.zeros(2), torch.tensor([0.0, 2.0]), torch.tensor([0.0, 1.0]), clip_range=1e-4, scale=1.0
    )
    result.sum.backward()
    assert result.sum.item() == -2.0 and log_prob.grad.tolist() == [0.0, -2.0] and result.ratio.tolist() == [1.0, 1.0]


def test_a_bad_row_with_weight_is_not_hidden():
    args = (torch.tensor([NAN]), torch.zeros(1), torch.ones(1), torch.ones(1))
    assert policy_loss(*args, clip_range=1e-4, scale=1.0).sum.isnan()


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_splitting_a_batch_changes_nothing(pieces):
    torch.manual_seed(1)
    log_prob, old, advantages = (torch.randn(8).double() for _ in range(3))
    weights = double(1, 1, 0, 1, 1, 0, 1, 1)

    def loss(rows: slice) -> torch.Tensor:
        return policy_loss(log_prob[rows], old[rows], advantages[rows], weights[rows], clip_range=0.2, scale=0.5).sum

    size = 8 // pieces
    total = sum(loss(slice(i, i + size)) for i in range(0, 8, size))
    expected = 0.0
    for lp, o, a, w in zip(log_prob, old, advantages, weights, strict=True):
        ratio = math.exp(lp - o)
        expected += 0.5 * w * max(-a * ratio, -a * min(max(ratio, 0.8), 1.2))
    assert float(total) == pytest.approx(float(expected), rel=1e-12)
