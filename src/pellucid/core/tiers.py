"""What moving a block between tiers costs against computing it again: the host pool's decisions, by the cost model.

A block that leaves the device is *demoted* (copied to the host pool) when

    chance of reuse * (seconds to compute it again - seconds to copy it back) > seconds to copy it out

and dropped otherwise. The chance is 1 for blocks of a preempted sequence whose fate is "swap": it comes back. For
others it is h / (h + 1) after h hits, and before the first hit the share of blocks that were ever hit. A prefix that is
found on the host is *promoted* when copying it is predicted to be cheaper than computing it.
"""

from __future__ import annotations

from pellucid.core.config import SchedulerConfig
from pellucid.core.cost import CostModel, StepFeatures
from pellucid.core.radix_tree import Node

_REUSE_MEMORY = 0.02
_CHUNK = 256
"""Recomputation is priced as part of a chunk of so many tokens."""


class TierCosts:
    """Prices of one pool of `config.num_host_blocks` blocks beside the device's."""

    def __init__(self, config: SchedulerConfig, cost: CostModel) -> None:
        self._config = config
        self._cost = cost
        self._reuse = 0.5

    def copy_seconds(self, num_blocks: int) -> float:
        """Copying so many blocks, one way."""
        empty = StepFeatures(0, 0, 0, 0, 0)
        moved = empty._replace(copied_bytes=num_blocks * self._config.bytes_per_block)
        return self._cost.predict(moved).seconds - self._cost.predict(empty).seconds

    def compute_seconds(self, depth: int, num_tokens: int) -> float:
        """Computing `num_tokens` tokens that begin at block `depth`, as part of a larger chunk."""
        start = depth * self._config.block_size
        middle = start + num_tokens // 2
        chunk = StepFeatures(_CHUNK, _CHUNK * middle, start + _CHUNK, 1, 0)
        return self._cost.predict(chunk).seconds * num_tokens / _CHUNK

    def swap_pays(self, num_blocks: int) -> bool:
        """Whether a preempted sequence's `num_blocks` full blocks are better copied out and back than computed."""
        if not self._config.num_host_blocks or self._config.preemption == "recompute":
            return False
        if self._config.preemption == "swap":
            return True
        compute = self.compute_seconds(0, num_blocks * self._config.block_size)
        return 2.0 * self.copy_seconds(num_blocks) < compute

    def demote_pays(self, node: Node) -> bool:
        """Whether the block of `node`, which leaves the device, is worth its copy."""
        self._reuse += _REUSE_MEMORY * ((node.hits > 0) - self._reuse)
        if node.wanted:
            return True
        chance = (node.hits + self._reuse) / (node.hits + 1)
        copy = self.copy_seconds(1)
        return chance * (self.compute_seconds(node.depth, self._config.block_size) - copy) > copy

    def promote_pays(self, depth: int, num_blocks: int) -> bool:
        """Whether `num_blocks` blocks from `depth` on are better copied back than computed."""
        return self.copy_seconds(num_blocks) < self.compute_seconds(depth, num_blocks * self._config.block_size)
