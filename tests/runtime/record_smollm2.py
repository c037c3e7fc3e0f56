"""Writes `tests/data/smollm2_reference.json`: what transformers says the default model continues ten prompts with.

    python -m tests.runtime.record_smollm2 MODEL.gguf        (needs the package accelerate; takes minutes)

Float32, greedy, 64 tokens; and the log-probability of each of those tokens. `test_smollm2.py` compares with the file,
so that everyday tests neither load transformers' model nor wait for it; its long test records anew and compares files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader

RECORDING = Path(__file__).parent.parent / "data" / "smollm2_reference.json"
COUNT = 64
# Every word, with the space before it, is one token of the model's vocabulary.
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a small",
    "Water is made of two parts",
    "In the year of our Lord the king",
    "To make bread you need flour and",
    "The quick brown fox jumps over the",
    "A good way to learn a new language is",
    "My favorite book is about a",
    "The difference between a cat and a dog is",
    "Music is important because",
)


def record(model_path: Path) -> list[dict[str, Any]]:
    """One row per prompt: `prompt` and `tokens` (ids) and `logprobs` (rounded to 1e-6)."""
    from transformers import AutoModelForCausalLM

    vocabulary = GGUFReader(model_path).get_field("tokenizer.ggml.tokens").contents()
    ids = {token: i for i, token in enumerate(vocabulary)}
    model = AutoModelForCausalLM.from_pretrained(model_path.parent, gguf_file=model_path.name, dtype=torch.float32)
    rows = []
    for text in PROMPTS:
        first, *rest = text.split()
        prompt = [ids[first], *(ids["Ġ" + word] for word in rest)]
        with torch.no_grad():
            done = model.generate(
                torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            scores = model(done).logits[0].log_softmax(-1)
        tokens = done[0, len(prompt) :].tolist()
        logprobs = [round(float(scores[len(prompt) - 1 + i, token]), 6) for i, token in enumerate(tokens)]
        rows.append({"prompt": prompt, "tokens": tokens, "logprobs": logprobs})
    return rows


if __name__ == "__main__":
    RECORDING.write_text(json.dumps(record(Path(sys.argv[1])), separators=(",", ":")).replace("},{", "},\n{") + "\n")
