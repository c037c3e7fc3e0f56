"""What quantisation costs: perplexity over text, beside the float32 reference on the same weights.

    python benchmarks/perplexity.py MODEL.gguf [--tokens 20480] [--text FILE ...] [--paths auto bf16 int8 ...] [--json]

The text is cut into windows of 512 tokens; every window is read from its start, 512 tokens a step (the products of
many rows) and 8 tokens a step (those of few). By default it is the sessions of agents in `../shared/traces` where that
archive is there, else the project's own documentation. The command fails where a path's perplexity is further from the
reference's than its limit: 0.5 % for bf16, 1 % for the file's own precision, for int8, and with an int8 KV cache (kv8).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pellucid.core.plan import BlockUpdate, Chunk, NewSequence, StepPlan
from pellucid.core.request import SamplingParams
from pellucid.models.config import load_model_config
from pellucid.models.decoder import Decoder, DecoderInput, load_decoder
from pellucid.models.weights.gguf import GgufFile
from pellucid.runtime.batch import SequenceMirror
from pellucid.runtime.config import RuntimeConfig, resolve
from pellucid.runtime.executor import choose_kernels
from pellucid.runtime.kv_store import KVStore
from pellucid.text.tokenizer import tokenizer_from_gguf

ROOT = Path(__file__).resolve().parent.parent
SESSIONS = ROOT.parent / "shared" / "traces" / "lmcache_agent_miniswe_taubench.tar.gz"
WINDOW, BLOCK = 512, 16
# Share of the reference's perplexity.
LIMITS = {"bf16": 0.005, "auto": 0.01, "int8": 0.01, "bf16-kv8": 0.01, "auto-kv8": 0.01}
FEW_ROWS = 8


class Way(NamedTuple):
    """One way to compute: its configuration, and how many tokens a step reads."""

    name: str
    config: RuntimeConfig
    rows: int


class Outcome(NamedTuple):
    """`losses`: of every token but the first of a window, nats. `choices`: the likeliest token there."""

    losses: npt.NDArray[np.float64]
    choices: npt.NDArray[np.int64]

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.losses.mean()))


def session_text(num_characters: int) -> str:
    """The last request of each agent's session, which holds the turns before it, until there is enough."""
    parts: list[str] = []
    with tarfile.open(SESSIONS) as archive:
        for name in sorted(member for member in archive.getnames() if member.endswith(".jsonl")):
            lines = archive.extractfile(name)
            last = json.loads(list(lines or [])[-1])
            parts.append(last["input"] + last["output"])
            if sum(map(len, parts)) >= num_characters:
                break
    return "\n".join(parts)


def default_text(num_characters: int) -> tuple[str, str]:
    """Text and where it is from."""
    if SESSIONS.exists():
        return session_text(num_characters), SESSIONS.name
    pages = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
    return "\n".join(page.read_text(encoding="utf-8") for page in pages), "the documentation"


def windows_of(model: Path, text: str, num_tokens: int) -> npt.NDArray[np.int64]:
    """`[windows, 512]`, as many as the text and `num_tokens` allow."""
    with GgufFile(model) as file:
        tokenizer = tokenizer_from_gguf(file.metadata, str(model))
    tokens = tokenizer.encode(text)[:num_tokens]
    count = len(tokens) // WINDOW
    if count == 0:
        sys.exit(f"the text has {len(tokens)} tokens; at least {WINDOW} are needed")
    return np.array(tokens[: count * WINDOW], dtype=np.int64).reshape(count, WINDOW)


class Reader:
    """A model that reads windows and says what each next token cost."""

    def __init__(self, model: Path, path: Way) -> None:
        config = resolve(path.config)
        kernels = choose_kernels(config, load_model_config(model))
        torch.set_num_threads(config.threads if kernels.team is None else 1)
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        cpu = torch.device("cpu")
        self._decoder: Decoder = load_decoder(model, kernels, self._dtype, cpu, num_positions=WINDOW)
        spec, cached = self._decoder.config.cache_spec(config.cache_dtype), getattr(torch, config.cache_dtype)
        self._store = KVStore(spec, num_blocks=WINDOW // BLOCK, block_size=BLOCK, dtype=cached, device=cpu)
        self._rows = path.rows

    def read(self, windows: npt.NDArray[np.int64]) -> Outcome:
        losses, choices = zip(*(self._read_one(window) for window in windows))
        return Outcome(np.concatenate(losses), np.concatenate(choices))

    def _read_one(self, window: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        mirror = SequenceMirror(BLOCK)
        new = NewSequence(0, tuple(window.tolist()), WINDOW, SamplingParams())
        mirror.apply(StepPlan(0, (), (new,), (BlockUpdate(0, 0, tuple(range(WINDOW // BLOCK))),)))
        scores = [self._step(mirror, start) for start in range(0, WINDOW, self._rows)]
        shares = torch.cat(scores)[:-1]
        targets = torch.from_numpy(window[1:])[:, None]
        losses = -shares.gather(1, targets)[:, 0].double().numpy()
        return losses, shares.argmax(dim=1).numpy()

    def _step(self, mirror: SequenceMirror, start: int) -> torch.Tensor:
        """Log-probabilities after each of the tokens from `start` on."""
        kernels, decoder = self._decoder.kernels, self._decoder
        chunk = Chunk(0, start, min(start + self._rows, WINDOW), True)
        batch = mirror.build([chunk], lambda rows: kernels.padded_rows(rows, self._dtype))
        plan = kernels.plan_attention(batch.layout, decoder.config.num_kv_heads, self._dtype, torch.device("cpu"))
        rows = torch.arange(chunk.end - chunk.start)
        inputs = DecoderInput(torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions), rows, plan)
        with torch.inference_mode():
            return torch.log_softmax(decoder.forward(inputs, self._store.layers)[: len(rows)], dim=-1)


def paths_of(names: list[str]) -> list[Way]:
    """Each precision with many and with few tokens a step."""
    return [Way(name, config_of(name), rows) for name in names for rows in (WINDOW, FEW_ROWS)]


def config_of(name: str) -> RuntimeConfig:
    """The configuration that a path names: weights, and -kv8 for an int8 cache."""
    weights: Any = name.removesuffix("-kv8")
    return RuntimeConfig(dtype="bfloat16", weights=weights, kv_dtype="auto" if weights == name else "int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--text", type=Path, nargs="*", help="read these files instead")
    parser.add_argument("--paths", nargs="*", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    text, origin = default_text(args.tokens * 6)
    if args.text:
        text, origin = "\n".join(file.read_text(encoding="utf-8") for file in args.text), ", ".join(map(str, args.text))
    windows = windows_of(args.model, text, args.tokens)
    reference = Reader(args.model, Way("reference", RuntimeConfig(dtype="float32", isa="reference"), WINDOW))
    expected = reference.read(windows)
    lines = [line_of(path, Reader(args.model, path).read(windows), expected) for path in paths_of(args.paths)]
    head = {"text": origin, "tokens": windows.size, "reference perplexity": expected.perplexity}
    if args.json:
        print(json.dumps({**head, "paths": lines}))
    else:
        print("  ".join(f"{key} {value}" for key, value in head.items()))
        for line in lines:
            print("  ".join(f"{key} {value}" for key, value in line.items()))
    if not all(line["within limit"] for line in lines):
        sys.exit("a path is beyond its limit")


def line_of(path: Way, outcome: Outcome, expected: Outcome) -> dict[str, object]:
    change = outcome.perplexity / expected.perplexity - 1
    differences = np.abs(outcome.losses - expected.losses)
    return {
        "path": path.name,
        "tokens a step": path.rows,
        "perplexity change %": round(100 * change, 3),
        "limit %": 100 * LIMITS[path.name],
        "within limit": abs(change) <= LIMITS[path.name],
        "mean change of a loss": round(float(differences.mean()), 4),
        "99th percentile": round(float(np.quantile(differences, 0.99)), 3),
        "same first choice %": round(100 * float((outcome.choices == expected.choices).mean()), 1),
    }


if __name__ == "__main__":
    main()
