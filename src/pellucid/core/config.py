"""The scheduler's configuration: small, frozen, checked when built. Sizes come in as arguments."""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.core.errors import ConfigError, RequestRejected


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`num_blocks` blocks of `block_size` token slots form the pool. `token_budget` caps the tokens of one step.

    With `chunked_prefill` off a prompt is computed in one step however long, and the budget only bounds what else
    joins that step. `prefix_wait_steps` bounds for how many steps a request may wait for another one that is computing
    the prefix both need.
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

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_context", "max_running", "token_budget"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.token_budget < self.max_running:
            raise ConfigError(
                f"token_budget ({self.token_budget}) is below max_running ({self.max_running}): some running sequences "
                f"would get no token in a step; raise token_budget or lower max_running"
            )

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
