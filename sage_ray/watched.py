"""The table of everything that is exported to Prometheus, and how it comes from an iteration's metrics.

Ray prefixes every name with ray_ and appends _total to counters. Its counters cannot show 0, so counts that should be
seen before they rise (failures, alarms) are gauges that only rise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

PREFIX = "ray_"
ACTOR_PHASES, ACTOR_WALL = "sage_actor_phase_seconds", "sage_actor_seconds"


class Family(NamedTuple):
    """A metric. kind: gauge or counter; labels: beside those that Ray adds; unit: Grafana's."""

    name: str
    description: str
    labels: tuple[str, ...] = ()
    unit: str = "short"
    kind: str = "gauge"

    @property
    def exported(self) -> str:
        """Its name in Prometheus."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")


class Sample(NamedTuple):
    """A value of a family, or what a counter rises by."""

    family: str
    labels: dict[str, str]
    value: float


FAMILIES = {
    family.name: family
    for family in (
        Family("sage_iteration", "Finished iterations."),
        Family("sage_policy_version", "Optimizer steps of the policy."),
        Family("sage_reward_mean", "Mean reward of an iteration's videos, in total and per part.", ("part",)),
        Family("sage_reward_std", "Standard deviation of the reward over an iteration's videos.", ("part",)),
        Family("sage_reward_std_in_group", "Standard deviation of the reward in a group, mean over groups."),
        Family("sage_truth_mean", "Mean truth of an iteration's videos, where the run has a judge.", ("part",)),
        Family("sage_evaluation", "Mean over the prompts of an evaluated set.", ("set", "measure", "part")),
        Family("sage_kl", "KL to the anchor and to the previous step, nats per dimension.", ("term",)),
        Family("sage_kl_lambda", "Weight of the KL."),
        Family("sage_kl_gradient_share", "Norm of the KL's gradient over that of the whole.", (), "percentunit"),
        Family("sage_loss", "Loss."),
        Family("sage_ratio_mean", "Mean probability ratio of policy and sampling policy."),
        Family("sage_clip_share", "Share of the pairs whose ratio is clipped.", (), "percentunit"),
        Family("sage_gradient_norm", "Gradient norm before clipping."),
        Family("sage_learning_rate", "Learning rate."),
        Family("sage_agreement", "Largest difference of rollout and learner log-prob, nats per dimension."),
        Family("sage_policy_age", "Publishes between the sampling weights and those that are trained."),
        Family("sage_effective_sample_size", "Effective share of the pairs that are trained.", (), "percentunit"),
        Family("sage_phase_seconds", "Seconds of a phase of the last iteration.", ("phase",), "s"),
        Family("sage_pool_busy", "Share of the wall time that a pool works.", ("pool",), "percentunit"),
        Family("sage_videos_per_second", "Videos made, scored and learned from."),
        Family("sage_tokens_per_second", "Tokens through the transformer in rollout and learner."),
        Family("sage_flops_per_second", "Useful floating-point operations.", (), "flops"),
        Family("sage_mfu", "Useful operations over the peak of the run's devices.", (), "percentunit"),
        Family("sage_queue_depth", "Videos or groups that wait.", ("queue",)),
        Family("sage_workers", "Actors by role and state.", ("role", "state")),
        Family("sage_rollout_groups", "Rollout groups that serve, and that are wanted.", ("state",)),
        Family("sage_device_bytes", "Peak of GPU memory; none on CPUs.", ("role",), "bytes"),
        Family("sage_failures", "Failures of the run so far, by kind.", ("kind",)),
        Family("sage_alarms", "Alarms of the run so far, by kind.", ("kind",)),
        Family("sage_videos", "Videos made.", (), "short", "counter"),
        Family("sage_bytes_moved", "Bytes through the object store.", ("what",), "bytes", "counter"),
        Family(ACTOR_PHASES, "Seconds of an actor in a phase, or idle.", ("actor", "role", "phase"), "s", "counter"),
        Family(ACTOR_WALL, "Seconds of an actor since it began.", ("actor", "role"), "s", "counter"),
    )
}

RULES: tuple[tuple[str, str], ...] = (
    ("policy_version", "sage_policy_version"),
    ("reward/std_in_group", "sage_reward_std_in_group"),
    (r"reward/(?:failed|small_groups|flat_groups|score_s)", ""),
    (r"reward/(?P<part>.+)", "sage_reward_mean"),
    (r"reward_std/(?P<part>.+)", "sage_reward_std"),
    (r"truth/(?P<part>.+)", "sage_truth_mean"),
    (r"evaluation/.*_error", ""),
    (r"evaluation/(?P<set>[^/]+)/(?P<measure>[^/]+)/(?P<part>.+)", "sage_evaluation"),
    (r"kl/(?P<term>anchor|previous)", "sage_kl"),
    ("kl/lambda", "sage_kl_lambda"),
    ("kl/gradient_share", "sage_kl_gradient_share"),
    ("loss/total", "sage_loss"),
    ("loss/ratio_mean", "sage_ratio_mean"),
    ("loss/clip_share", "sage_clip_share"),
    ("learner/grad_norm", "sage_gradient_norm"),
    ("learner/learning_rate", "sage_learning_rate"),
    ("agreement/max_abs", "sage_agreement"),
    ("policy/age", "sage_policy_age"),
    ("policy/effective_sample_size", "sage_effective_sample_size"),
    (r"phase/(?P<phase>.+)_s", "sage_phase_seconds"),
    (r"pool/(?P<pool>.+)_busy", "sage_pool_busy"),
    ("throughput/videos_per_s", "sage_videos_per_second"),
    ("throughput/tokens_per_s", "sage_tokens_per_second"),
    ("throughput/flops_per_s", "sage_flops_per_second"),
    ("throughput/mfu", "sage_mfu"),
    (r"queue/(?P<queue>.+)", "sage_queue_depth"),
    (r"memory/(?P<role>.+)_peak_bytes", "sage_device_bytes"),
    (r"bytes/(?P<what>.+)", "sage_bytes_moved"),
    (r"(?P<what>publish)/bytes", "sage_bytes_moved"),
    (r"(?:reward_service|failures)/(?P<kind>.+)", "sage_failures"),
    (r"rollout_pool/(?P<state>serving|wanted)", "sage_rollout_groups"),
)
"""A metric's name -> its family; the first that fits. Labels are the pattern's groups; "" is not exported."""
COMPILED = tuple((re.compile(pattern), family) for pattern, family in RULES)


def samples(metrics: Mapping[str, float | None]) -> Iterator[Sample]:
    """What an iteration's metrics come to; values that are missing or not finite are left out."""
    for name, value in metrics.items():
        if value is None or not math.isfinite(value):
            continue
        for pattern, family in COMPILED:
            if found := pattern.fullmatch(name):
                if family:
                    yield Sample(family, found.groupdict(), float(value))
                break
