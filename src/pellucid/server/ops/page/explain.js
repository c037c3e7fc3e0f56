// The explanation of one request: the server's ledger of it where there is one, else what its lane tells.

import { causeWords, paint, swatch } from "./causes.js";
import { byId, count, durationText, element, percent, surface } from "./draw.js";
import { headers } from "./stream.js";

const OPEN = ["running", "waiting", "swapped"];
let chosen = null; // the id that is explained
let asked = false; // for its ledger, which closes with the request's last byte
let fromLedger = false;
let onClose = () => {};

/** Open the explanation of a lane's request; `closed` is called when the reader closes it. */
export function explain(lane, closed) {
  [chosen, asked, fromLedger, onClose] = [lane.id, false, false, closed];
  const place = byId("explanation");
  place.hidden = false;
  update(lane);
  place.focus({ preventScroll: true });
  place.scrollIntoView({ block: "nearest" });
}

/** New lanes have come: keep up with the request's own, until there is a ledger. */
export function follow(lanes) {
  const lane = chosen && !fromLedger && lanes.find((one) => one.id === chosen);
  if (lane) update(lane);
}

function update(lane) {
  fromLane(lane);
  if (asked || OPEN.includes(lane.status)) return;
  asked = true;
  askForLedger(lane.id);
}

async function askForLedger(id) {
  const reply = await fetch(`v1/requests/${encodeURIComponent(id)}/ledger`, { headers: headers() }).catch(() => null);
  if (!reply?.ok || chosen !== id) return;
  const { explanation, ledger, reason } = await reply.json();
  fromLedger = true;
  const { with_cache, without_cache } = ledger.floor_seconds;
  const floors = `Alone on this machine it would have taken ${durationText(with_cache)}, and ${durationText(without_cache)} `
    + "without the cache.";
  write(id, Object.entries(ledger.causes), ledger.e2e_seconds, [`Ended: ${reason}.`, ...explanation, floors]);
}

function fromLane(lane) {
  const sums = new Map();
  for (const [, , causes] of lane.spans) {
    for (const [cause, seconds] of causes) sums.set(cause, (sums.get(cause) ?? 0) + seconds);
  }
  const total = [...sums.values()].reduce((sum, seconds) => sum + seconds, 0);
  const cached = lane.cached ? `, ${count(lane.cached)} of them from the cache` : "";
  const again = lane.preemptions ? ` Its blocks were taken from it ${count(lane.preemptions)} times.` : "";
  write(lane.id, [...sums], total, [`${count(lane.prompt)} prompt tokens${cached}; ${count(lane.output)} written.${again}`]);
}

function write(id, causes, total, sentences) {
  const known = causes.filter(([, seconds]) => seconds > 0).sort((a, b) => b[1] - a[1]);
  const close = element("button", { type: "button", className: "close", textContent: "Close" });
  close.addEventListener("click", () => {
    chosen = null;
    byId("explanation").hidden = true;
    onClose();
  });
  const bar = element("canvas", { className: "parts" });
  bar.setAttribute("aria-hidden", "true");
  const row = ([cause, seconds]) => element("tr", {},
    element("td", {}, swatch(cause), ` ${causeWords(cause)} `, element("code", { className: "hint", textContent: cause })),
    element("td", { className: "number", textContent: durationText(seconds) }),
    element("td", { className: "number", textContent: percent(seconds / total) }));
  const held = document.activeElement?.className === "close";
  byId("explanation").replaceChildren(close, element("h3", { textContent: id }),
    element("p", { textContent: `${durationText(total)} in all.` }),
    element("ul", {}, ...sentences.map((text) => element("li", { textContent: text }))), bar,
    element("table", {}, element("tbody", {}, ...known.map(row))));
  if (held) close.focus();
  const drawn = surface(bar);
  let x = 0;
  for (const [cause, seconds] of drawn ? known : []) {
    const width = (seconds / total) * drawn.width;
    paint(drawn.context, cause, x, 0, width, drawn.height);
    x += width;
  }
}
