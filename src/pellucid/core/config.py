"""The scheduler's configuration: small, frozen, checked when built. Sizes come in as arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pellucid.core.cost import DEFAULT_PRIOR, CostPrior
from pellucid.core.errors import ConfigError, RequestRejected
from pellucid.core.tenants import Tenant

PolicyName = Literal["fcfs", "priority", "fair"]
PreemptionFate = Literal["auto", "swap", "recompute"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`num_blocks` blocks of `block_size` token slots form the pool. `token_budget` caps the tokens of one step.

    With `chunked_prefill` off a prompt is computed in one step however long, and the budget only bounds what else
    joins that step. `prefix_wait_steps` bounds for how many steps a request may wait for another one that is computing
    the prefix both need.

    `step_target` is the time in seconds that prompts may stretch a step to (None: as far as the budget goes); the cost
    model that predicts it starts from `cost_prior`. `policy` orders prompts; `fair_quantum` is how far, in weighted
    tokens, `fair` lets one tenant lead; `aging_seconds` of waiting outweigh one level of priority. At most
    `max_waiting` requests queue. `max_overtakes` smaller requests may pass one that does not fit the pool.

    `num_host_blocks` blocks of host memory are the second tier, `bytes_per_block` what copying one moves; `preemption`
    says whether blocks that will be wanted again are copied there, computed anew, or whichever is predicted cheaper.
    """

    num_blocks: int
    block_size: int = 16
    max_context: int = 8192
    max_running: int = 64
    token_budget: int = 512
    prefix_cache: bool = True
    chunked_prefill: bool = True
    prefix_wait_steps: int = 512
    eos_token_ids: tuple[int, ...] = ()
    step_target: float | None = None
    cost_prior: CostPrior = DEFAULT_PRIOR
    policy: PolicyName = "fcfs"
    fair_quantum: float = 2048.0
    aging_seconds: float = 10.0
    max_waiting: int = 4096
    max_overtakes: int = 64
    tenants: tuple[Tenant, ...] = ()
    num_host_blocks: int = 0
    bytes_per_block: int = 0
    preemption: PreemptionFate = "auto"

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_context", "max_running", "token_budget"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.token_budget < self.max_running:
            raise ConfigError(
                f"token_budget ({self.token_budget}) is below max_running ({self.max_running}): some running sequences "
                f"would get no token in a step; raise token_budget or lower max_running"
            )
        if self.step_target is not None and not self.step_target > 0:
            raise ConfigError(f"step_target is {self.step_target}; it must be above 0 seconds, or off")
        if self.step_target is not None and not self.chunked_prefill:
            raise ConfigError(
                "with chunked prefill off there is nothing to fit into a step target: pass --step-target off, too"
            )
        if self.preemption == "swap" and not (self.num_host_blocks and self.prefix_cache):
            raise ConfigError("preemption by swap needs host memory (--swap-memory) and the prefix cache")

    @property
    def pool_tokens(self) -> int:
        """Token slots in the pool."""
        return self.num_blocks * self.block_size

    @property
    def max_length(self) -> int:
        """Most tokens that one sequence, prompt and output together, can ever have."""
        return min(self.max_context, self.pool_tokens)

    def max_output_tokens(self, num_prompt: int) -> int:
        """Most tokens that can be generated after a prompt of this length; at least 1, or RequestRejected."""
        if num_prompt >= self.max_context:
            raise RequestRejected(
                "context_length_exceeded",
                f"the prompt has {num_prompt} tokens, which exceeds the available context size: at most "
                f"{self.max_context - 1} prompt tokens fit a context of {self.max_context}",
            )
        if num_prompt >= self.pool_tokens:
            raise RequestRejected(
                "kv_pool_exceeded",
                f"the prompt has {num_prompt} tokens, which exceeds the available context size: the KV pool holds "
                f"{self.pool_tokens} tokens ({self.num_blocks} blocks of {self.block_size}); raise --kv-memory",
            )
        return self.max_length - num_prompt
