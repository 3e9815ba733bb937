"""Random kills in the middle of weight publishes or of learner steps:
`python -m tests.chaos_kills publish [--kills 50]`, or `make chaos`.

One run of the small world with a learner of two ranks, broadcast weights and two rollout workers. In every iteration
after the first, a random actor of those that take part is killed a random moment after the publish, or the update, has
begun. The run must come to its end with the weights and numbers of a run that nobody disturbs.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray

from actors.controller import Controller
from tests.cluster.troubles import Ended, process_of, run

WORDS = """learner.num_ranks=2 publish.transport=collective publish.timeout_s=20 save_interval=1
checkpoint.keep_last=2 reward.num_workers=1 faults.hung_min_s=60""".split()
WITHIN_S = {"publish": 0.08, "update": 1.0}
"""A kill comes at a random moment in so many seconds: about as long as it takes on two cores."""


class Killer:
    """Kills somebody during a verb of the learner, at most every other time, so that what was lost can be made again.

    kills: so far, as (iteration, who).
    """

    def __init__(self, verb: str, count: int, luck: random.Random):
        self.verb, self.count, self.luck = verb, count, luck
        self.kills: list[tuple[int, str]] = []
        self._spared = True

    def attach(self, controller: Controller) -> None:
        """To a controller that has started nothing yet."""
        original = getattr(controller.learner, self.verb)

        def disturbed(*arguments, **named):
            self._spared = not self._spared
            if controller.finished and not self._spared and len(self.kills) < self.count:
                threading.Timer(self.luck.random() * WITHIN_S[self.verb], self._kill, [controller]).start()
            return original(*arguments, **named)

        setattr(controller.learner, self.verb, disturbed)

    def _kill(self, controller: Controller) -> None:
        chosen = [(f"learner-{n}", rank) for n, rank in enumerate(controller.learner.ranks)]
        if self.verb == "publish":
            seats = controller.rollouts.rollouts.staff.serving
            chosen += [(seat.name, member) for seat in seats for member in seat.group.members]
        name, victim = self.luck.choice(chosen)
        self.kills.append((controller.finished + 1, name))
        os.kill(process_of(victim), signal.SIGKILL)
        print(f"kill {len(self.kills)}: {name} in iteration {controller.finished + 1}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("verb", choices=("publish", "update"))
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=400_000_000,
        namespace="sage_ray_tests",
        log_to_driver=False,
        logging_level="error",
    )
    words = [*WORDS, f"num_iterations={parsed.kills + 2}"]
    killer, start = Killer(parsed.verb, parsed.kills, random.Random(parsed.seed)), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        straight = run(Path(folder) / "straight", *words)
        disturbed = run(Path(folder) / "disturbed", *words, before=killer.attach)
    ray.shutdown()
    return verdict(killer, straight, disturbed, time.monotonic() - start)


def verdict(killer: Killer, straight: Ended, disturbed: Ended, seconds: float) -> int:
    """Say what it came to; 0 when nothing was lost."""
    same = straight.is_as(disturbed)
    rebuilt = sum("it is started again from" in line for line in disturbed.said)
    replaced = sum("is replaced" in line for line in disturbed.said)
    print(
        f"{len(killer.kills)} kills in {len(straight.lines)} iterations, {seconds:.0f} s: the learner was started "
        f"again {rebuilt} times, {replaced} rollout workers were replaced; weights and numbers are "
        f"{'those' if same else 'NOT those'} of the undisturbed run"
    )
    return 0 if same and len(killer.kills) == killer.count else 1


if __name__ == "__main__":
    sys.exit(main())
