"""Answer two prompts in this process, as one batch."""

import sys

from pellucid import LLM

llm = LLM(*sys.argv[1:2], kv_memory=2**27)
for completion in llm.generate(["The capital of France is", "Water boils at"], max_tokens=12, temperature=0):
    print(repr(completion.text), completion.finish_reason)
