"""What a request may expect before it queues, and whether it may queue at all.

The forecast of the time to the first token is arithmetic over what the scheduler sees, nothing is simulated: prompts
are read at the rate that the cost model gives for a full step, those that the policy puts before the request come
first, and where all slots are taken one must become free. It looks at the asker's own cached prefix and at nobody
else's, so it tells nobody what others have cached.

A refusal says whose limit it was, the numbers, and when asking again makes sense.
"""

from __future__ import annotations

from collections.abc import Mapping

from pellucid.core.config import SchedulerConfig
from pellucid.core.cost import CostModel, StepFeatures
from pellucid.core.errors import RequestRejected
from pellucid.core.policy import Policy
from pellucid.core.sequence import Sequence
from pellucid.core.service import ServiceBook

_TYPICAL_OUTPUT = 128.0
_OUTPUT_MEMORY = 0.1
_MIN_RETRY_SECONDS = 1.0


class Admission:
    """Reads the scheduler's state, changes none of it. `typical_output` follows the lengths of finished requests."""

    def __init__(
        self,
        config: SchedulerConfig,
        cost: CostModel,
        book: ServiceBook,
        waiting: Policy,
        running: Mapping[int, Sequence],
    ) -> None:
        self._config = config
        self._cost = cost
        self._book = book
        self._waiting = waiting
        self._running = running
        self._typical_output = _TYPICAL_OUTPUT

    def finished(self, num_generated: int) -> None:
        """A request ended after so many tokens."""
        self._typical_output += _OUTPUT_MEMORY * (num_generated - self._typical_output)

    def forecast(self, sequence: Sequence) -> float:
        """Seconds from now to the first token of `sequence`, which is about to queue; `num_matched` is known."""
        decodes = sum(1 for s in self._running.values() if s.num_due <= 1)
        step_seconds, step_tokens = self._full_step(decodes)
        seconds_per_token = step_seconds / step_tokens
        own = sequence.num_due - sequence.num_matched
        reading = [s.num_due for s in self._running.values() if s.num_due > 1]
        ahead, share = self._waiting.ahead(sequence)
        seconds = (sum(reading) + ahead / share + own) * seconds_per_token
        if self._config.step_target is not None and own <= self._config.token_budget:
            shorter = sum(n for n in reading if n <= own) + ahead / share
            alone = len(reading) == 0
            seconds = min(seconds, (shorter + own) * seconds_per_token * (1.0 if alone else 2.0))
        whole_steps = max(seconds, self._cost.predict(_step(decodes + own, sequence.num_tokens, decodes + 1)).seconds)
        in_flight = 0.5 * step_seconds if self._running else 0.0
        return in_flight + whole_steps + self._seconds_to_slot(decodes)

    def check(self, sequence: Sequence, now: float) -> float:
        """The forecast; or RequestRejected, with whose limit it was and when to come back."""
        request, config = sequence.request, self._config
        account = self._book.account(request.tenant)
        tenant = account.tenant
        blocks = -(-(sequence.num_prompt + 1) // config.block_size)
        if blocks > tenant.kv_share * config.num_blocks:
            raise RequestRejected(
                "kv_share_exceeded",
                f"the prompt needs {blocks} blocks; this tenant may hold {tenant.kv_share:.0%} of {config.num_blocks}",
                limit="tenant",
            )
        expected = self.forecast(sequence)
        if tenant.max_waiting is not None and account.num_waiting >= tenant.max_waiting:
            raise _come_back(
                "tenant_queue_full",
                f"{account.num_waiting} requests of this tenant are waiting; it may queue {tenant.max_waiting}",
                expected / account.num_waiting,
                tenant_limit=True,
            )
        seconds = self._book.seconds_until_allowed(request.tenant, now)
        if seconds > 0:
            raise _come_back(
                "tokens_per_minute",
                f"this tenant has used its {tenant.tokens_per_minute} tokens per minute; {seconds:.1f} s to the next",
                seconds,
                tenant_limit=True,
            )
        if len(self._waiting) >= config.max_waiting:
            raise _come_back(
                "queue_full",
                f"{len(self._waiting)} requests are waiting; the machine queues at most {config.max_waiting}",
                expected / len(self._waiting),
            )
        if request.deadline is not None and now + expected > request.deadline:
            left = max(0.0, request.deadline - now)
            raise _come_back(
                "deadline_hopeless",
                f"the first token is expected in {expected:.2f} s; the deadline is in {left:.2f} s",
                expected - left,
            )
        return expected

    def _full_step(self, decodes: int) -> tuple[float, int]:
        """Seconds and prompt tokens of a step that is as full as budget and target allow."""
        config = self._config
        context = sum(s.num_tokens for s in self._running.values()) // max(1, len(self._running))
        tokens = max(1, config.token_budget - decodes)
        seconds = self._cost.predict(_step(decodes + tokens, context, decodes + 1)).seconds
        if config.step_target is not None:
            while seconds > config.step_target and tokens > 32:
                tokens //= 2
                seconds = self._cost.predict(_step(decodes + tokens, context, decodes + 1)).seconds
        return seconds, tokens

    def _seconds_to_slot(self, decodes: int) -> float:
        """How long until as many running sequences have ended as must, at the typical length of an output."""
        missing = len(self._running) + len(self._waiting) + 1 - self._config.max_running
        if missing <= 0 or not self._running:
            return 0.0
        left = sorted(
            min(s.max_length - s.num_tokens, max(1.0, self._typical_output - s.num_generated))
            for s in self._running.values()
        )
        rounds, index = divmod(missing - 1, len(left))
        context = sum(s.num_tokens for s in self._running.values()) // len(self._running)
        step = self._cost.predict(_step(max(1, decodes), context, max(1, decodes))).seconds
        return step * (left[index] + rounds * self._typical_output)


def _step(num_tokens: int, context: int, num_sequences: int) -> StepFeatures:
    return StepFeatures(num_tokens, num_tokens * context, num_sequences * context, num_sequences, num_sequences)


def _come_back(code: str, message: str, seconds: float, *, tenant_limit: bool = False) -> RequestRejected:
    seconds = max(_MIN_RETRY_SECONDS, seconds)
    return RequestRejected(code, message, retry_after=seconds, limit="tenant" if tenant_limit else "machine")
