// A box to send a prompt from, and to see what it becomes, here and in its lane.

import { byId, durationText, say } from "./draw.js";
import { follow } from "./lanes.js";
import { events, headers, refusal } from "./stream.js";

let running = null; // an AbortController

export function start() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running && byId("prompt").value.trim()) ask();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
  });
  byId("stop").addEventListener("click", () => running?.abort());
}

async function ask() {
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  byId("answer").textContent = "";
  try {
    await stream(running.signal);
  } catch (error) {
    say(byId("asked"), error.name === "AbortError" ? "stopped" : error.message);
  } finally {
    running = null;
    byId("send").disabled = false;
    byId("stop").disabled = true;
  }
}

/** The reply, or {error} as the server words it. */
async function post(path, body, signal) {
  const tenantKey = byId("tenant-key").value.trim();
  const key = tenantKey ? { Authorization: `Bearer ${tenantKey}` } : headers();
  const reply = await fetch(path, {
    method: "POST", signal, headers: { ...key, "Content-Type": "application/json" }, body: JSON.stringify(body),
  });
  return reply.ok ? reply : { error: await refusal(reply) };
}

async function stream(signal) {
  const content = byId("prompt").value;
  const wish = { stream: true, max_tokens: Number(byId("max-tokens").value), temperature: Number(byId("temperature").value) };
  const began = performance.now();
  let reply = await post("v1/chat/completions", { ...wish, messages: [{ role: "user", content }] }, signal);
  if (reply.error?.code === "no_chat_template") reply = await post("v1/completions", { ...wish, prompt: content }, signal);
  if (reply.error) {
    if (reply.error.code === "tenant_key_needed") byId("tenant-key-row").hidden = false;
    throw new Error(reply.error.message);
  }
  const id = reply.headers.get("x-request-id") ?? "";
  follow(id);
  say(byId("asked"), `request ${id}`);
  let first = null, tokens = 0;
  for await (const [, data] of events(reply)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    for (const choice of chunk.choices) {
      first ??= performance.now();
      tokens += choice.num_tokens ?? 0;
      byId("answer").append(choice.delta?.content ?? choice.text ?? "");
    }
  }
  const seconds = (performance.now() - began) / 1000;
  const ttft = first === null ? "" : `, the first after ${durationText((first - began) / 1000)}`;
  say(byId("asked"), `${tokens} tokens in ${durationText(seconds)}${ttft}; request ${id}`);
}
