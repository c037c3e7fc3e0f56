"""Two turns of a conversation: the second one reads only what is new."""

import sys

from pellucid import LLM

llm = LLM(*sys.argv[1:2], kv_memory=2**27)
messages = []
for question in ("Name a large river in Africa.", "And one in Asia?"):
    messages.append({"role": "user", "content": question})
    for piece in llm.chat(messages, max_tokens=40, temperature=0):
        if isinstance(piece, str):
            print(piece, end="", flush=True)
        else:
            messages.append({"role": "assistant", "content": piece.text})
            print(f"\n({piece.num_cached_tokens} of {piece.num_prompt_tokens} prompt tokens came from the cache)")
