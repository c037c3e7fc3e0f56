"""No model: print what the scheduler decides for three prompts on eight blocks of four tokens."""

from pellucid.core.config import SchedulerConfig
from pellucid.core.plan import StepResult
from pellucid.core.request import Request, SamplingParams
from pellucid.core.scheduler import Scheduler

scheduler = Scheduler(SchedulerConfig(num_blocks=8, block_size=4, max_running=3, token_budget=6, max_context=32))
for name, length in [("a", 4), ("b", 11), ("c", 4)]:
    scheduler.add(Request(name, range(length), SamplingParams(max_tokens=6)), now=0.0)
while plan := scheduler.schedule(now=0.0):
    print(plan)
    tokens = tuple((7,) if chunk.samples else () for chunk in plan.chunks)
    for event in scheduler.commit(StepResult(plan.step_id, tokens, seconds=0.01), now=0.0):
        print("   ", event)
