// The live stream, and the key that it may need. Read with fetch and not with EventSource, which can send no header.

const KEY = "pellucid-key";

/** Headers for a request to this server: the key, where one was given. */
export function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Forget the old key and wait for a new one. `why` is what the server said of the old one. */
export function askForKey(why) {
  const dialog = document.getElementById("key");
  const field = document.getElementById("key-value");
  document.getElementById("key-why").textContent = why;
  sessionStorage.removeItem(KEY);
  field.value = "";
  return new Promise((resolve) => {
    // Without a key there is nothing to see: a dialog that is dismissed comes back.
    dialog.addEventListener("close", () => {
      if (field.value) sessionStorage.setItem(KEY, field.value.trim());
      resolve();
    }, { once: true });
    dialog.showModal();
  });
}

/** {message, code} of a refusal, in the server's own words where it has some. */
export async function refusal(reply) {
  try {
    return (await reply.json()).error;
  } catch {
    return { message: `the server answered ${reply.status}` };
  }
}

/** Yields [name, data] of each server-sent event of a reply. */
export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      let name = "message", data = "";
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data += line.slice(6);
      }
      yield [name, data];
    }
  }
}

/** Read the stream for ever: `on.hello`, `on.tick` with documents, `on.lost` with a reason when it has broken off. */
export async function follow(on) {
  for (let wait = 1; ; wait = Math.min(2 * wait, 10)) {
    try {
      const reply = await fetch("v1/live", { headers: headers(), cache: "no-store" });
      if (reply.status === 401 || reply.status === 403) {
        await askForKey((await refusal(reply)).message);
        wait = 0.5;
        continue;
      }
      if (!reply.ok) throw new Error((await refusal(reply)).message);
      for await (const [name, data] of events(reply)) {
        if (data === "[DONE]") break;
        on[name]?.(JSON.parse(data));
        wait = 0.5;
      }
      on.lost("the server ended the stream");
    } catch (error) {
      on.lost(error instanceof TypeError ? "the server does not answer" : error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, 1000 * Math.max(wait, 1)));
  }
}
