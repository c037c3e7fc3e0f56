"""The executor as the scheduler and the process see it: with the real scheduler, its determinism, memory, refusals."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.driver import Driver
from tests.runtime.tiny_models import build, reference_tokens

from pellucid.core.config import PreemptionFate, SchedulerConfig
from pellucid.core.errors import ConfigError, InvariantViolation
from pellucid.core.events import Finished, Preempted, TokensGenerated
from pellucid.core.plan import BlockCopy, BlockUpdate, Chunk, NewSequence, StepPlan, StepResult
from pellucid.core.request import Request, SamplingParams
from pellucid.core.scheduler import Scheduler
from pellucid.kernels import reference
from pellucid.kernels.processors import native
from pellucid.models.config import CacheSpec, LayerGroup
from pellucid.runtime.config import RuntimeConfig, resolve
from pellucid.runtime.executor import TorchExecutor, load_executor
from pellucid.runtime.memory import blocks_that_fit


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("tiny")
    return path, build("smollm2", path)


def executor_of(path: Path, num_blocks: int = 200, num_host_blocks: int = 0, **options: Any) -> TorchExecutor:
    config = RuntimeConfig(**{"dtype": "float32", "block_size": 4, "threads": 1, **options})
    return load_executor(path, config, num_blocks=num_blocks, num_host_blocks=num_host_blocks)


def serve(
    executor: TorchExecutor, config: SchedulerConfig, requests: list[Request]
) -> tuple[dict[str, list[int]], int]:
    """Run requests through the real scheduler, one arriving every second step. Returns tokens and preemptions."""
    scheduler, waiting, step, preemptions = Scheduler(config), [*requests], 0, 0
    outputs: dict[str, list[int]] = {request.id: [] for request in requests}
    while waiting or scheduler.has_work:
        if waiting and step % 2 == 0:
            scheduler.add(waiting.pop(0), float(step))
        plan = scheduler.schedule(float(step))
        step += 1
        if plan is None:
            continue
        for event in scheduler.commit(executor.collect(executor.launch(plan)), float(step)):
            if isinstance(event, TokensGenerated):
                outputs[event.request_id].extend(event.token_ids)
            preemptions += isinstance(event, Preempted)
            assert not isinstance(event, Finished) or event.reason == "length"
    return outputs, preemptions


@pytest.fixture(scope="module")
def answered(tiny: tuple[Path, Any]) -> list[tuple[Request, list[int]]]:
    """Eight requests, several of which begin alike, each with what transformers answers."""
    rng = random.Random(3)
    head = [rng.randrange(199) for _ in range(30)]
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    rows = []
    for i in range(8):
        prompt = head[: rng.choice([0, 13, 30])] + [rng.randrange(199) for _ in range(rng.choice([1, 9, 25]))]
        rows.append((Request(f"r{i}", tuple(prompt), sampling), reference_tokens(tiny[1], prompt, 24)))
    return rows


@pytest.mark.parametrize("options", [{}, {"chunked_prefill": False}, {"prefix_cache": False}, {"token_budget": 12}])
@pytest.mark.parametrize("num_blocks", [200, 24])
def test_with_the_real_scheduler(
    tiny: tuple[Path, Any], answered: list[tuple[Request, list[int]]], options: dict[str, Any], num_blocks: int
) -> None:
    """With room and without: every answer is what transformers says, preempted or not."""
    config = SchedulerConfig(num_blocks=num_blocks, block_size=4, max_running=8, **{"token_budget": 64, **options})
    outputs, preemptions = serve(executor_of(tiny[0], num_blocks), config, [request for request, _ in answered])
    assert (preemptions > 0) == (num_blocks == 24)
    assert outputs == {request.id: tokens for request, tokens in answered}


@pytest.mark.parametrize("fate", ["swap", "recompute", "auto"])
def test_what_was_preempted_comes_back_from_the_host(
    tiny: tuple[Path, Any], answered: list[tuple[Request, list[int]]], fate: PreemptionFate
) -> None:
    """Swapped, computed again or never preempted: the same tokens, and those of transformers."""
    config = SchedulerConfig(
        num_blocks=24, block_size=4, max_running=8, num_host_blocks=100, bytes_per_block=3072, preemption=fate
    )
    executor = executor_of(tiny[0], 24, 100)
    moved: Counter[str] = Counter()
    collect = executor.collect

    def watched(ticket: int) -> StepResult:
        moved.update(transfer.kind for transfer in executor._launched[0].transfers)
        return collect(ticket)

    executor.collect = watched  # type: ignore[method-assign]
    outputs, preemptions = serve(executor, config, [request for request, _ in answered])
    assert preemptions > 0
    assert outputs == {request.id: tokens for request, tokens in answered}
    if fate == "swap":
        assert moved["out"] > 0
        assert moved["in"] > 0


@pytest.mark.parametrize("isa", ["reference", "auto"])
def test_an_int8_cache_survives_pressure(tmp_path: Path, answered: list[tuple[Request, list[int]]], isa: str) -> None:
    """Never preempted, swapped, computed again: the same tokens, from blocks half as large."""
    if isa == "auto" and native() is None:
        pytest.skip("the native kernels are not built")
    build("native", tmp_path)
    options = {"dtype": "bfloat16", "block_size": 16, "deterministic": True, "isa": isa}

    def run(num_blocks: int, kv_dtype: str, fate: PreemptionFate = "auto") -> tuple[dict[str, list[int]], int]:
        executor = executor_of(tmp_path, num_blocks, 40, kv_dtype=kv_dtype, **options)
        block_bytes = executor.memory().block_bytes
        assert block_bytes == 16 * 2 * 2 * (2 * 32 if kv_dtype == "auto" else 32 + 4)
        assert executor.memory().kv_bytes == num_blocks * block_bytes
        config = SchedulerConfig(
            num_blocks=num_blocks, block_size=16, max_running=8, num_host_blocks=40, bytes_per_block=block_bytes,
            preemption=fate,
        )  # fmt: skip
        return serve(executor, config, [request for request, _ in answered])

    plenty, preemptions = run(60, "int8")
    assert preemptions == 0
    for fate in ("swap", "recompute"):
        tokens, preemptions = run(9, "int8", fate)
        assert preemptions > 0
        assert tokens == plenty
    exact, _ = run(60, "auto")
    same = sum(a == b for name in exact for a, b in zip(exact[name], plenty[name]))
    assert same >= 0.25 * sum(map(len, exact.values())), "random weights part ways soon, but not at once"


class Recording:
    """Stands in for a sampler: keeps every row of logits by (sequence, position), and samples greedily."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], torch.Tensor] = {}

    def sample(self, logits: torch.Tensor, requests: Any, positions: Any) -> torch.Tensor:
        for row, (seq_id, _), position in zip(logits, requests, positions.tolist()):
            self.rows[seq_id, position] = row.clone()
        return logits.argmax(-1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["smollm2", "qwen3"])
def test_deterministic_logits_are_the_same_bits(tmp_path: Path, family: str, dtype: str) -> None:
    """Alone and whole; batched in chunks of 1, 7, 16; behind a shared prefix: the logits do not differ in one bit."""
    build(family, tmp_path)
    rng = random.Random(5)
    prompts = {i: [rng.randrange(199) for _ in range(length)] for i, length in enumerate((3, 90, 41, 700))}

    def run(chunk: int, together: bool, shared: bool = False) -> dict[tuple[int, int], torch.Tensor]:
        executor = executor_of(tmp_path, num_blocks=600, dtype=dtype, deterministic=True)
        recording = Recording()
        executor._sampler = recording  # type: ignore[assignment]
        driver = Driver(executor, 600, 4)
        if shared:
            source = driver.add(99, prompts[3])
            driver.generate(99, 1)
            driver.add(3, prompts[3], shared=source.blocks[:150])
        for i, prompt in prompts.items():
            if not (shared and i == 3):
                driver.add(i, prompt)
            if not together:
                driver.generate(i, 5)
                driver.release(i)
        for i in prompts if together else ():
            driver.generate(i, 5, chunk)
        return {key: row for key, row in recording.rows.items() if key[0] < 99 and key[1] < len(prompts[key[0]]) + 5}

    alone = run(512, together=False)
    assert len(alone) == 5 * len(prompts)
    for other in (run(16, True), run(7, True), run(512, True), run(100, True, shared=True)):
        assert other.keys() == alone.keys()
        assert all(torch.equal(other[key], alone[key]) for key in alone)


def test_determinism_is_verified_not_assumed(tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a product gives a row other bits in another place, the engine refuses to start."""
    honest = reference.linear

    def by_place(x: torch.Tensor, weight: reference.DenseWeight) -> torch.Tensor:
        out = honest(x, weight)
        out[5] += 1e-6
        return out

    monkeypatch.setattr(reference, "linear", by_place)
    with pytest.raises(ConfigError, match=r"cannot be promised here: with 1 threads.*try --threads 1"):
        executor_of(tiny[0], deterministic=True)
    executor_of(tiny[0])


def test_copies_move_a_block(tiny: tuple[Path, Any]) -> None:
    """A sequence whose first block is a copy of another's goes on as the other does."""
    path, model = tiny
    executor = executor_of(path)
    prompt, greedy = [3, 1, 4, 1, 5, 9], SamplingParams(temperature=0.0)
    first = NewSequence(0, tuple(prompt), 6, greedy)
    plan = StepPlan(0, (Chunk(0, 0, 6, True),), (first,), (BlockUpdate(0, 0, (8, 9)),))
    executor.collect(executor.launch(plan))
    plan = StepPlan(
        1,
        (Chunk(1, 4, 6, True),),
        (NewSequence(1, tuple(prompt), 6, greedy),),
        (BlockUpdate(1, 0, (20, 21)),),
        copies=(BlockCopy(8, 20),),
    )
    assert list(executor.collect(executor.launch(plan)).tokens[0]) == reference_tokens(model, prompt, 1)


def test_result_says_what_it_took(tiny: tuple[Path, Any]) -> None:
    executor = executor_of(tiny[0])
    new = NewSequence(0, (1, 2, 3), 3, SamplingParams(temperature=0.0))
    plan = StepPlan(4, (Chunk(0, 0, 2, False),), (new,), (BlockUpdate(0, 0, (0,)),))
    result = executor.collect(executor.launch(plan))
    assert (result.step_id, result.tokens) == (4, ((),))
    assert [name for name, _ in result.phases] == ["prepare", "forward", "sample"]
    assert 0 < sum(seconds for _, seconds in result.phases) <= result.seconds


def test_refusals(tiny: tuple[Path, Any]) -> None:
    executor = executor_of(tiny[0])
    executor.launch(StepPlan(1, ()))
    with pytest.raises(InvariantViolation, match="step 7 is collected out of order"):
        executor.collect(7)
    assert executor.collect(1).tokens == ()
    with pytest.raises(ConfigError, match=r"device 'cuda' cannot be used: .*--device cpu"):
        executor_of(tiny[0], device="cuda")
    for options in (
        {"dtype": "int3"},
        {"kv_dtype": "int4"},
        {"block_size": 0},
        {"threads": -1},
        {"deterministic": True, "device": "cuda"},
    ):
        with pytest.raises(ConfigError):
            RuntimeConfig(**options)


def test_auto_is_resolved() -> None:
    config = resolve(RuntimeConfig())
    assert config.dtype in ("float32", "bfloat16")
    assert config.threads >= 1
    assert config.cache_dtype == config.dtype
    assert resolve(RuntimeConfig(kv_dtype="int8")).cache_dtype == "int8"
    with pytest.raises(ConfigError, match="not known before it is resolved"):
        RuntimeConfig().cache_dtype  # noqa: B018
    assert resolve(RuntimeConfig(dtype="float32", threads=3)) == RuntimeConfig(dtype="float32", threads=3)


def test_blocks_that_fit() -> None:
    spec = CacheSpec((LayerGroup(30, 3, 64, 2),))
    assert spec.bytes_per_token == 23_040
    assert blocks_that_fit(2 << 30, spec, 16) == (2 << 30) // (16 * 23_040)
    with pytest.raises(ConfigError, match="do not hold one block"):
        blocks_that_fit(16 * 23_040 - 1, spec, 16)


_MEASURE = """
import json, random, sys
from collections import Counter
from pathlib import Path
from pellucid.runtime.config import RuntimeConfig
from pellucid.runtime.executor import load_executor
from pellucid.runtime.memory import resident_bytes
from tests.runtime.driver import Driver
import pellucid.models.decoder, safetensors, gguf
import torch
torch.nn.functional.linear(torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16())
baseline = resident_bytes()
executor = load_executor(Path(sys.argv[1]), RuntimeConfig(dtype="bfloat16", threads=1), num_blocks=1024)
driver = Driver(executor, 1024, 16)
with torch.inference_mode():  # the cache's pages come when they are used, and are no growth
    for keys, values in executor._store.layers:
        keys.zero_(), values.zero_()
report = {"baseline": baseline, "weights": executor.memory().weight_bytes, "kv": executor.memory().kv_bytes}
report["start"] = resident_bytes()
for i in range(64):
    driver.add(i, [random.randrange(4000) for _ in range(100)])
    driver.generate(0, i + 1, chunk=100)
report["streams"] = resident_bytes()
print(json.dumps(report))
"""


def test_memory_holds_one_copy(tmp_path: Path) -> None:
    """A 94 MB model beside 67 MB of cache: resident memory at the start is within 1.3 x both over the baseline, and 64
    streams later it has not grown by as much as another copy of the weights."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=4000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": "src:.", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["weights"] > 90e6
    assert report["kv"] == 1024 * 16 * 2 * 4 * 2 * 128 * 2
    assert report["start"] <= report["baseline"] + 1.3 * (report["weights"] + report["kv"])
    assert report["streams"] <= report["start"] + 0.9 * report["weights"]
