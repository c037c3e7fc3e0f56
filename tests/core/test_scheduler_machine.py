"""Random histories of add / abort / schedule / commit: no law is ever broken and every answer is the right one."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.core.fakes import Run, generate

from pellucid.core.block_pool import BlockState
from pellucid.core.config import SchedulerConfig
from pellucid.core.errors import RequestRejected
from pellucid.core.events import Finished
from pellucid.core.request import Request, SamplingParams

PREFIXES = [(), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 6, 7, 9, 9, 9), (3,) * 13]
PROMPTS = st.builds(
    lambda prefix, rest: (*prefix, *rest),
    st.sampled_from(PREFIXES),
    st.lists(st.integers(1, 3), min_size=1, max_size=9),
)


class Machine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(3, 24),
        max_running=st.integers(1, 5),
        budget=st.integers(0, 20),
        prefix_cache=st.booleans(),
        chunked=st.booleans(),
        depth=st.integers(1, 3),
        patience=st.sampled_from([0, 2, 512]),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        step_target=st.sampled_from([None, None, 0.003, 1.0]),
        num_host_blocks=st.sampled_from([0, 0, 3, 40]),
        fate=st.sampled_from(["auto", "swap", "recompute"]),
    )
    def start(
        self,
        block_size,
        num_blocks,
        max_running,
        budget,
        prefix_cache,
        chunked,
        depth,
        patience,
        policy,
        step_target,
        num_host_blocks,
        fate,
    ):
        config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_context=40,
            max_running=max_running,
            token_budget=max_running + budget,
            prefix_cache=prefix_cache,
            chunked_prefill=chunked,
            prefix_wait_steps=patience,
            eos_token_ids=(0,),
            policy=policy,
            fair_quantum=16.0,
            step_target=step_target if chunked else None,
            num_host_blocks=num_host_blocks,
            bytes_per_block=1000,
            preemption=fate if fate != "swap" or (num_host_blocks and prefix_cache) else "auto",
        )
        self.run = Run(config, depth=depth)
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        ignore_eos=st.booleans(),
        stops=st.sampled_from([(), (4,)]),
        priority=st.integers(0, 2),
        cache_key=st.sampled_from([b"", b"other"]),
        tenant=st.sampled_from(["", "a", "b"]),
        num_public_blocks=st.sampled_from([0, 0, 1, 2]),
        match_limit=st.sampled_from([None, None, None, 0, 5]),
    )
    def add(self, prompt, max_tokens, ignore_eos, stops, priority, cache_key, tenant, num_public_blocks, match_limit):
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stops)
        request = Request(
            f"r{len(self.requests)}",
            prompt,
            sampling,
            arrival=self.run.now,
            priority=priority,
            cache_key=cache_key,
            tenant=tenant,
            num_public_blocks=min(num_public_blocks, len(prompt) // self.run.config.block_size),
            public_key=b"public" if num_public_blocks else b"",
            match_limit=match_limit,
        )
        too_long = len(prompt) >= self.run.config.max_length
        try:
            self.run.add(request)
        except RequestRejected:
            assert too_long
            return
        assert not too_long
        self.requests[request.id] = request

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        if any(isinstance(e, Finished) and e.request_id == request_id for e in self.run.events):
            before = list(self.run.events)
            self.run.abort(request_id)  # a race that clients lose every day: nothing happens
            assert [e for e in self.run.events if e not in before and isinstance(e, Finished)] == []
        else:
            self.run.abort(request_id)
            self.aborted.add(request_id)

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.run.step()

    @precondition(lambda self: len(self.run.results) < self.run.depth)
    @rule()
    def schedule_ahead(self):
        self.run.schedule()

    def teardown(self):
        if not hasattr(self, "run"):
            return
        self.run.finish()
        pool = self.run.scheduler.kv.pool
        assert pool.num_active == 0, "blocks leaked"
        assert all(pool.state(b) in (BlockState.FREE, BlockState.CACHED) for b in range(pool.num_blocks))
        ends = [e for e in self.run.events if isinstance(e, Finished)]
        assert sorted(e.request_id for e in ends) == sorted(self.requests), "each request ends exactly once"
        outputs = self.run.outputs()
        for end in ends:
            request = self.requests[end.request_id]
            expected = generate(request, self.run.config.max_length)
            got = outputs.get(end.request_id, [])
            if end.request_id in self.aborted:
                assert got == expected[: len(got)]
                assert end.reason == "abort"
            else:
                assert got == expected
                stops = (
                    (0, *request.sampling.stop_token_ids)
                    if not request.sampling.ignore_eos
                    else (request.sampling.stop_token_ids)
                )
                assert end.reason == ("stop" if got[-1] in stops else "length")
            assert end.num_generated == len(got)
            assert end.num_cached % self.run.config.block_size == 0
            assert end.num_cached <= (len(request.prompt) - 1 if request.match_limit is None else request.match_limit)
            # The fake's clock: one millisecond per commit. The ledger misses none of it.
            assert abs(sum(s for _, s in end.causes) - _lifetime(self.run, request)) < 1e-9


def _lifetime(run: Run, request: Request) -> float:
    return run.ended_at[request.id] - request.arrival


Machine.TestCase.settings = settings(
    max_examples=600, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestScheduler = Machine.TestCase
