"""How the devices of a host are divided between the draft and the target, from their times.

SwiftSpec (arXiv 2506.11309, 3.1) gives x of k devices to the target and k - x to the draft, each a
tensor-parallel group. Which division is best also depends on how good the draft is, so each is
simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pipespec.extras.plan.advice import Layout
from pipespec.extras.plan.pipeline_times import Machine


class Division(NamedTuple):
    """So many devices for the draft, and so many stages of so many devices each."""

    draft: int
    stages: int
    members: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the groups, the draft's first."""
        return (self.draft, *[self.members] * self.stages)

    def layout(self, machine: Machine) -> Layout:
        """With its times, for `advice.predict_all`."""
        settings = (
            f"cluster.tensor_parallel={self.members}",
            f"cluster.draft_tensor_parallel={self.draft}",
            f"cluster.stages={self.stages}",
        )
        return Layout(f"{self.draft} + {self.stages} x {self.members}", machine, settings=settings)


def divisions(count: int) -> Iterator[Division]:
    """All ways to use `count` devices, of which every stage has as many as the others."""
    for draft in range(1, count):
        left = count - draft
        for members in range(1, left + 1):
            if left % members == 0:
                yield Division(draft, left // members, members)
