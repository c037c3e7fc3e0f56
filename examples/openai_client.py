"""Stream a chat from a running server (`make serve`) with the official client."""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
question = {"role": "user", "content": "What is the capital of France?"}
for chunk in client.chat.completions.create(model=model, messages=[question], stream=True, temperature=0):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
