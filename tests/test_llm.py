"""The offline face with the real model: batching, streaming, stop strings, clear refusals."""

from __future__ import annotations

import pytest
from tests.default_model import REASON, default_model_path

from pellucid.core.errors import ConfigError, ModelError, RequestRejected
from pellucid.llm import LLM, Completion


@pytest.fixture(scope="module")
def llm() -> LLM:
    path = default_model_path()
    if path is None:
        pytest.skip(REASON)
    return LLM(str(path), kv_memory=16 * 2**20, dtype="float32", max_running=4)


def test_completions_come_in_the_order_of_the_prompts(llm):
    prompts = ["The capital of France is", "1 2 3 4 5 6", "Once upon a time"]
    together = llm.generate(prompts, max_tokens=6, temperature=0)
    alone = [llm.generate(prompt, max_tokens=6, temperature=0)[0] for prompt in prompts]
    assert [one.text for one in together] == [one.text for one in alone]
    assert together[0].text.startswith(" Paris")


def test_a_stream_is_its_completion(llm):
    *pieces, completion = llm.stream("The capital of France is", max_tokens=8, temperature=0)
    assert isinstance(completion, Completion)
    assert "".join(pieces) == completion.text
    assert len(completion.token_ids) == 8


def test_leaving_a_stream_frees_its_blocks(llm):
    stream = llm.stream("The capital of France is", max_tokens=200, temperature=0, ignore_eos=True)
    next(stream)
    stream.close()
    assert llm._engine.stats().blocks_active == 0
    assert not llm._engine.has_work


def test_a_stop_string_ends_the_text_before_it(llm):
    whole = llm.generate("1 2 3 4 5", max_tokens=12, temperature=0)[0].text
    stop = whole[5:8]
    cut = llm.generate("1 2 3 4 5", max_tokens=12, temperature=0, stop=[stop])[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole[: whole.index(stop)]
    assert llm._engine.stats().blocks_active == 0


def test_seeds_repeat_and_differ(llm):
    def sample(seed: int) -> str:
        return llm.generate("Once upon a time", max_tokens=8, temperature=1.0, seed=seed)[0].text

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_output_is_clamped_to_what_fits_and_a_prompt_that_does_not_is_refused(llm):
    fits = llm.limits.max_length
    completion = llm.generate("word " * (fits - 12), max_tokens=10_000, temperature=0, ignore_eos=True)[0]
    assert completion.num_prompt_tokens + len(completion.token_ids) == fits
    with pytest.raises(RequestRejected, match="exceeds the available context size"):
        llm.generate("word " * (fits + 1), max_tokens=1)


def test_unknown_names_are_refused_with_the_known_ones(llm):
    with pytest.raises(ConfigError, match=r"temprature.*temperature"):
        llm.generate("x", temprature=0)
    with pytest.raises(ConfigError, match=r"kv_memry.*kv_memory"):
        LLM(kv_memry=1)
    with pytest.raises(ModelError, match="there is no file or directory"):
        LLM("/no/such/model")
