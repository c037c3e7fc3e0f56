"""What a user may choose about an engine, as one frozen record: flags, variables and configuration keys are made of it.

Imports little, because a command that needs no more than its flags should start at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pellucid.core.config import PreemptionFate
from pellucid.planner.quantity import parse_bytes, parse_seconds
from pellucid.runtime.config import RuntimeConfig
from pellucid.runtime.config import resolve as resolve_runtime

OnOff = Literal["on", "off"]


def _setting(default: Any, help: str, **more: Any) -> Any:
    """A field whose flag, environment variable and configuration key are all made from it (see `cli/options.py`)."""
    return field(default=default, metadata={"help": help, **more})


def parse_seconds_or_off(text: str) -> float:
    """Seconds above 0, or 0.0 for "off"."""
    if text in ("off", "0", "0.0"):
        return 0.0
    return parse_seconds(text)


def _parse_kv_memory(text: str) -> int:
    """A size; "auto" is 0. Raises ConfigError."""
    return 0 if text == "auto" else parse_bytes(text)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What a user may choose about an engine. The same names serve as flags, variables and configuration keys."""

    device: str = _setting("cpu", "Where the model runs.")
    dtype: Literal["auto", "float32", "bfloat16"] = _setting(
        "auto",
        "Precision of weights and activations; auto takes bfloat16 where the native "
        "kernels run or the processor has it, else float32.",
    )
    kv_dtype: Literal["auto", "int8"] = _setting(
        "auto",
        "Precision of the KV cache: auto is that of --dtype; int8, with a scale per token and head, holds nearly twice "
        "the tokens of bfloat16.",
    )
    threads: int = _setting(0, "Threads that compute; 0 takes one per physical core.")
    block_size: int = _setting(16, "Tokens in a KV block: the unit of allocation and of sharing.")
    kv_memory: int = _setting(
        2 * 2**30,
        "Memory of the KV cache, such as 2GiB; auto takes what is free beside the model, if it can be used.",
        parser=_parse_kv_memory,
        shown="2GiB",
    )
    max_context: int = _setting(0, "Most tokens of one request, prompt and output; 0 takes what the model allows.")
    max_running: int = _setting(64, "Most requests that are computed in one step.")
    token_budget: int = _setting(512, "Most tokens computed in one step: bounds how long a prompt may hold up others.")
    deterministic: bool = _setting(
        False, "Make a request's tokens independent of what else is in its batch; slower.", flag="--deterministic"
    )
    seed: int = _setting(0, "Seed of requests that bring none.")
    prefix_cache: OnOff = _setting("on", "Reuse the KV blocks of prompts and replies that begin alike.")
    step_target: float = _setting(
        0.05,
        "Time that prompts may stretch a step to, such as 50ms: bounds the gaps between tokens that users see; off "
        "fills steps up to the token budget.",
        parser=parse_seconds_or_off,
        metavar="TIME|off",
        shown="50ms",
    )
    policy: Literal["auto", "fcfs", "priority", "fair"] = _setting(
        "auto", "Order in which prompts are served: auto is fair where tenants are configured, else fcfs."
    )
    max_waiting: int = _setting(4096, "Most requests that wait; further ones are answered 503 with Retry-After.")
    swap_memory: int = _setting(
        0,
        "Host memory for KV blocks that leave the cache but will probably be wanted again, such as 1GiB.",
        parser=parse_bytes,
        shown="0",
    )
    preemption: PreemptionFate = _setting(
        "auto", "How preempted requests come back: by swap, by recompute, or whichever is predicted to be cheaper."
    )
    chunked_prefill: OnOff = _setting("on", "Cut long prompts into steps; off computes a prompt in one step.")
    weights: Literal["auto", "bf16", "int8", "int4"] = _setting(
        "auto", "How the native kernels hold weights; auto keeps the precision of the model's files."
    )
    isa: str = _setting(
        "auto", "Kernels: auto, portable, avx2, avx512 or amx for the native ones, reference for plain PyTorch."
    )
    step_records: int = _setting(
        2048, "Steps that the recorder keeps for `pellucid steps` and for dumps on anomalies; 0 keeps none."
    )
    input_log: Path | None = _setting(
        None, "Write every call into the scheduler to this file (JSON lines), from which the run can be replayed."
    )

    def runtime(self) -> RuntimeConfig:
        """The executor's part, with "auto" decided for this machine."""
        return resolve_runtime(
            RuntimeConfig(
                device=self.device,
                dtype=self.dtype,
                kv_dtype=self.kv_dtype,
                block_size=self.block_size,
                threads=self.threads,
                deterministic=self.deterministic,
                isa=self.isa,
                weights=self.weights,
            )
        )
