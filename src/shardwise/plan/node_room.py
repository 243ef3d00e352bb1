"""Whether the nodes of a cluster have room for what their ranks hold off the device."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.hardware import Cluster
from shardwise.quantities import format_bytes


@dataclass(frozen=True)
class NodeRoom:
    """What the ranks of one node hold together, on its host and in its files, and what it has.

    It is the node with the most. ``file_capacity_bytes`` is None where nobody has said.
    """

    num_ranks: int
    host_bytes: int
    host_capacity_bytes: int
    file_bytes: int
    file_capacity_bytes: int | None

    @property
    def missing(self) -> str | None:
        """Say what does not fit; None where all of it does."""
        tiers = (
            ("host memory", self.host_bytes, self.host_capacity_bytes),
            ("space for files", self.file_bytes, self.file_capacity_bytes),
        )
        for name, num_bytes, capacity in tiers:
            if capacity is not None and num_bytes > capacity:
                return (
                    f"the {self.num_ranks} ranks of a node need {format_bytes(num_bytes)} of "
                    f"{name}, and it has {format_bytes(capacity)}"
                )
        return None


def node_room(
    cluster: Cluster, candidate: Candidate, by_stage: Mapping[int, tuple[int, int]]
) -> NodeRoom:
    """Add up what one rank of each pipeline stage has on the host, and in files.

    A stage that is not told is taken for the largest. Neighbours are of one stage (`axes`).
    """
    node = cluster.node
    num_ranks = min(node.num_accelerators, candidate.world_size)
    of_stage = candidate.world_size // candidate.pp
    together = max(1, num_ranks // of_stage)  # stages that a node has ranks of
    most = []
    for kind in (0, 1):
        largest = max(each[kind] for each in by_stage.values())
        stages = [by_stage[i][kind] if i in by_stage else largest for i in range(candidate.pp)]
        nodes = (stages[first : first + together] for first in range(0, candidate.pp, together))
        most.append(max(map(sum, nodes)) * (num_ranks // together))
    host = node.host
    return NodeRoom(num_ranks, most[0], host.memory_bytes, most[1], host.nvme_bytes)
