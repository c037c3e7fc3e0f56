"""What a server is told once: where it listens, and what it serves."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pellucid.core.config import SchedulerConfig
from pellucid.core.errors import ConfigError

if TYPE_CHECKING:
    from pellucid.text.chat_template import ChatTemplate
    from pellucid.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """`api_key`, where set, is asked of every request but health checks (as `Authorization: Bearer KEY`). With
    `tenants` each of them has its own keys; `api_key` is one more, the operator's. `served_model_name` replaces the
    model's own name. `max_choices` bounds prompts times `n` of one request, `max_body_bytes` the size of its body."""

    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on."})
    port: int = field(default=8000, metadata={"help": "Port to listen on; 0 takes a free one."})
    served_model_name: str | None = field(default=None, metadata={"help": "Name under which the model is served."})
    api_key: str | None = field(
        default=None,
        metadata={"help": "Key that requests must bring as a bearer token; beside --tenants one more, the operator's."},
    )
    tenants: Path | None = field(
        default=None,
        metadata={
            "help": "TOML file of tenants with their keys and limits (see `pellucid tenant`); read again on SIGHUP."
        },
    )
    store: str = field(
        default="auto",
        metadata={
            "help": "File that keeps every request's ledger for `pellucid explain`: no text, two weeks or 256 MiB; "
            "auto takes store.sqlite in the state directory, off keeps none."
        },
    )
    record: Path | None = field(
        default=None,
        metadata={"help": "Write every request to this file as a trace that can be replayed (block hashes, no text)."},
    )
    record_text: bool = field(
        default=False,
        metadata={"help": "Prompts and replies go into the --record file too, as token ids.", "flag": "--record-text"},
    )
    metrics_compat: Literal["none", "vllm"] = field(
        default="none", metadata={"help": "Show /metrics under these names as well, for dashboards made for them."}
    )
    otlp_endpoint: str | None = field(
        default=None,
        metadata={"help": "Send a trace of each request to this OpenTelemetry collector, e.g. http://host:4318."},
    )
    ops_page: Literal["on", "off"] = field(
        default="on", metadata={"help": "The page at / that shows what the engine is doing, and the stream behind it."}
    )
    show_text: bool = field(
        default=False,
        metadata={
            "help": "Show the beginnings of prompts on the ops page, and in ledgers where they left the cached text.",
            "flag": "--show-text",
        },
    )
    max_choices: int = 128
    max_body_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must lie in [0, 65535]")
        if self.api_key == "":
            raise ConfigError("api_key is empty; leave it out to ask for no key")
        if self.record_text and self.record is None:
            raise ConfigError("--record-text says what --record writes; name its file with --record")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otlp_endpoint is {self.otlp_endpoint!r}; it must be a URL such as http://host:4318")
        if self.max_choices < 1 or self.max_body_bytes < 1:
            raise ConfigError("max_choices and max_body_bytes must be at least 1")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model of a server: its name, how its text is handled and what fits. `limits` is the scheduler's own
    configuration, so the server refuses and clamps by the very rule of the engine. `chat_template` is None for a model
    without one, which then serves completions only. `created` is in Unix seconds."""

    name: str
    tokenizer: Tokenizer
    limits: SchedulerConfig
    chat_template: ChatTemplate | None = None
    created: int = 0
