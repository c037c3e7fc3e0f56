"""The offline face: a model in this process, prompts in, text out. No server, no HTTP, the same engine.

from pellucid import LLM
for completion in LLM().generate(["The capital of France is"], max_tokens=32):
    print(completion.text)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from pellucid.assembly import build_engine
from pellucid.build import LoadedModel, load_model, plan_engine
from pellucid.core.config import SchedulerConfig
from pellucid.core.errors import ConfigError
from pellucid.core.events import Finished, FinishReason, TokensGenerated
from pellucid.core.request import Request, SamplingParams
from pellucid.engine.engine import Engine
from pellucid.models.sources import DEFAULT_MODEL
from pellucid.settings import EngineSettings
from pellucid.text.detokenizer import Detokenizer
from pellucid.text.stop import StopMatcher


@dataclass(frozen=True, slots=True)
class Completion:
    """What a prompt was answered with. `num_cached_tokens` of the prompt came from the prefix cache."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(slots=True)
class _Answer:
    """A completion in the making."""

    detokenizer: Detokenizer
    stop: StopMatcher
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def show(self, text: str) -> str:
        self.text.append(text)
        return text


class LLM:
    """A model and an engine in this process. Settings are those of `pellucid serve`, by name: `LLM(kv_memory=2**30)`.

    Raises ModelError or ConfigError, in one line, for what cannot work. Not thread-safe.
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, *, progress: Callable[[str], None] | None = None, **settings: Any
    ) -> None:
        known = EngineSettings.__dataclass_fields__
        unknown = sorted(settings.keys() - known)
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}; settings are {', '.join(known)}")
        self._start(EngineSettings(**settings), model, progress)

    @classmethod
    def of(cls, settings: EngineSettings, model: str, progress: Callable[[str], None] | None = None) -> LLM:
        """An LLM with settings that are built already."""
        llm = cls.__new__(cls)
        llm._start(settings, model, progress)
        return llm

    def _start(self, settings: EngineSettings, model: str, progress: Callable[[str], None] | None) -> None:
        self.model: LoadedModel = load_model(model, progress=progress is not None)
        self.limits: SchedulerConfig = plan_engine(settings, self.model)
        path = self.model.files.path
        self._engine: Engine = build_engine(settings, path, self.limits, progress or (lambda text: None))
        self._ids = count()

    @property
    def description(self) -> str:
        """On what the engine runs: kernels, precision, threads."""
        return self._engine.description

    def generate(
        self,
        prompts: str | Sequence[str],
        sampling: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        **params: Any,
    ) -> list[Completion]:
        """Answer all prompts together, as one batch; completions come in the order of the prompts.

        Sampling is given whole or by the fields of SamplingParams (`max_tokens=32, temperature=0.7, seed=1`). Raises
        RequestRejected for a prompt that does not fit.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        chosen = _sampling(sampling, params)
        requests = [self._request(self.model.tokenizer.encode(text), chosen) for text in texts]
        ends = self._run(requests, stop)
        completions = {index: item for index, item in ends if isinstance(item, Completion)}
        return [completions[index] for index in range(len(texts))]

    def stream(
        self, prompt: str, sampling: SamplingParams | None = None, *, stop: Sequence[str] = (), **params: Any
    ) -> Iterator[str | Completion]:
        """Answer one prompt, piece by piece as it is made; the last item is the Completion."""
        yield from self._stream(self.model.tokenizer.encode(prompt), _sampling(sampling, params), stop)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        **params: Any,
    ) -> Iterator[str | Completion]:
        """Answer a conversation (dicts with `role` and `content`), piece by piece; the last item is the Completion."""
        template = self.model.chat_template
        if template is None:
            raise ConfigError(f"{self.model.files.name} has no chat template; use generate or stream")
        token_ids = self.model.tokenizer.encode_parts(template.render(messages))
        yield from self._stream(token_ids, _sampling(sampling, params), stop)

    def _stream(
        self, token_ids: list[int], sampling: SamplingParams, stop: Sequence[str]
    ) -> Iterator[str | Completion]:
        for _, item in self._run([self._request(token_ids, sampling)], stop):
            yield item

    def _request(self, token_ids: list[int], sampling: SamplingParams) -> Request:
        fitting = self.limits.max_output_tokens(len(token_ids))
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, fitting))
        return Request(f"offline-{next(self._ids)}", tuple(token_ids), sampling, arrival=time.monotonic())

    def _run(self, requests: Sequence[Request], stop: Sequence[str]) -> Iterator[tuple[int, str | Completion]]:
        """Step until all requests have ended; yields (index, text) as it comes and (index, Completion) at each end.

        Leaving early aborts what is still open.
        """
        index_of = {request.id: index for index, request in enumerate(requests)}
        answers = [_Answer(Detokenizer(self.model.tokenizer), StopMatcher(stop)) for _ in requests]
        for request in requests:
            self._engine.add(request)
        try:
            while index_of:
                for event in self._engine.step():
                    index = index_of.get(getattr(event, "request_id", ""))
                    if index is None:
                        continue
                    if isinstance(event, TokensGenerated):
                        yield from self._tokens(event, index, answers[index], index_of)
                    elif isinstance(event, Finished):
                        del index_of[event.request_id]
                        answer = answers[index]
                        yield index, answer.show(answer.stop.push(answer.detokenizer.flush()) + answer.stop.flush())
                        yield index, _completion(answer, event, event.reason)
        finally:
            for request_id in index_of:
                self._engine.abort(request_id)

    def _tokens(
        self, event: TokensGenerated, index: int, answer: _Answer, index_of: dict[str, int]
    ) -> Iterator[tuple[int, str | Completion]]:
        """Show what the tokens complete; a stop string ends the request here, before the engine would."""
        answer.token_ids += event.token_ids
        text = answer.show(answer.stop.push(answer.detokenizer.push(event.token_ids)))
        if text:
            yield index, text
        if answer.stop.found is not None:
            del index_of[event.request_id]
            for end in self._engine.abort(event.request_id):
                if isinstance(end, Finished) and end.request_id == event.request_id:
                    yield index, _completion(answer, end, "stop")


def _completion(answer: _Answer, end: Finished, reason: FinishReason) -> Completion:
    return Completion("".join(answer.text), tuple(answer.token_ids), reason, end.num_prompt, end.num_cached)


def _sampling(sampling: SamplingParams | None, params: Mapping[str, Any]) -> SamplingParams:
    """`sampling` with the named fields replaced."""
    unknown = sorted(params.keys() - SamplingParams.__dataclass_fields__)
    if unknown:
        known = ", ".join(SamplingParams.__dataclass_fields__)
        raise ConfigError(f"unknown sampling parameter {unknown[0]!r}; parameters are {known}")
    return replace(sampling or SamplingParams(), **params)
