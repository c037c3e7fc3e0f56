// Where a request's time goes: each cause's words, and the colour and pattern of its family.

import { colours, count, element } from "./draw.js";

const CAUSES = {
  tokenize: ["tokenizing", "deliver"],
  grammar: ["compiling its grammar", "queue"],
  queue: ["waiting to start", "queue"],
  "queue.tenant_limit": ["waiting: its tenant's limit", "queue"],
  "queue.fairness": ["waiting: others were owed first", "queue"],
  "queue.memory": ["waiting: no free blocks", "queue"],
  "queue.capacity": ["waiting: no slot or step time", "queue"],
  "queue.step_in_flight": ["waiting: a step was under way", "queue"],
  "queue.shared_prefix": ["waiting: another computes its prefix", "queue"],
  prefill: ["reading the prompt", "prefill"],
  "prefill.own": ["reading the prompt", "prefill"],
  "prefill.promote": ["fetching cached blocks", "promote"],
  "prefill.wait": ["between chunks of its prompt", "promote"],
  decode: ["writing", "decode"],
  "decode.own": ["writing", "decode"],
  "decode.batch": ["writing, slower for company", "batch"],
  "decode.stalled": ["held up by others' prompts", "stalled"],
  preempted: ["preempted", "preempted"],
  "preempted.wait": ["preempted, waiting", "preempted"],
  "preempted.swap": ["preempted, being copied", "preempted"],
  "preempted.recompute": ["preempted, computing again", "preempted"],
  "engine.gap": ["between steps", "gap"],
  deliver: ["on its way to the client", "deliver"],
  client: ["the client reads slowly", "client"],
};

// Each family's colour, pattern and words. The pattern says the same as the colour, for eyes that do not tell the colours.
const FAMILIES = {
  queue: ["orange", "rising", "waiting"],
  prefill: ["blue", "plain", "reading the prompt"],
  promote: ["blue", "rows", "between chunks, fetching"],
  decode: ["green", "plain", "writing"],
  batch: ["green", "dots", "writing, slower in company"],
  stalled: ["red", "columns", "held up by others' prompts"],
  preempted: ["pink", "crossed", "preempted"],
  gap: ["grey", "plain", "between steps"],
  deliver: ["sky", "plain", "tokenizing, delivering"],
  client: ["yellow", "dots", "slow client"],
};

const familyOf = (cause) => CAUSES[cause]?.[1] ?? CAUSES[cause.split(".")[0]]?.[1] ?? "gap";

/** What a cause is called. One that this page does not know keeps its own name. */
export const causeWords = (cause) => CAUSES[cause]?.[0] ?? cause;

/** "12: no free blocks", ... of requests that wait, counted by cause; the most first. */
export const waitWords = (counts) => Object.entries(counts).sort((a, b) => b[1] - a[1])
  .map(([cause, number]) => `${count(number)}: ${causeWords(cause).replace(/^waiting: /, "")}`);

/** [a cause, words] of each family that these causes belong to, in a fixed order. */
export function families(causes) {
  const seen = new Map([...causes].map((cause) => [familyOf(cause), cause]));
  return Object.keys(FAMILIES).filter((name) => seen.has(name)).map((name) => [seen.get(name), FAMILIES[name][2]]);
}

/** Fill a rectangle with a cause's colour and pattern. */
export function paint(context, cause, x, y, width, height) {
  const [colour, pattern] = FAMILIES[familyOf(cause)];
  context.fillStyle = colours[colour];
  context.fillRect(x, y, width, height);
  if (pattern !== "plain" && width > 2) {
    context.fillStyle = brush(pattern);
    context.fillRect(x, y, width, height);
  }
}

/** A small canvas with a cause's colour and pattern, for a legend. */
export function swatch(cause) {
  const canvas = element("canvas", { width: 28, height: 24 });
  canvas.setAttribute("aria-hidden", "true");
  const context = canvas.getContext("2d");
  context.scale(2, 2);
  paint(context, cause, 0, 0, 14, 12);
  return canvas;
}

const brushes = new Map(); // pattern and colour of the ground -> CanvasPattern

function brush(pattern) {
  const key = pattern + colours.panel;
  if (!brushes.has(key)) {
    const tile = element("canvas", { width: 6, height: 6 });
    const context = tile.getContext("2d");
    context.strokeStyle = context.fillStyle = colours.panel;
    context.globalAlpha = 0.65;
    context.lineWidth = 1.2;
    context.beginPath();
    if (pattern === "rising" || pattern === "crossed") strokes(context, (at) => [at, 6, at + 6, 0]);
    if (pattern === "crossed") strokes(context, (at) => [at, 0, at + 6, 6]);
    if (pattern === "columns") strokes(context, () => [3, 0, 3, 6]);
    if (pattern === "rows") strokes(context, () => [0, 3, 6, 3]);
    if (pattern === "dots") context.fillRect(2, 2, 2, 2);
    context.stroke();
    brushes.set(key, context.createPattern(tile, "repeat"));
  }
  return brushes.get(key);
}

/** Lines that join those of the tiles beside them. */
function strokes(context, line) {
  for (const at of [-6, 0, 6]) {
    const [x0, y0, x1, y1] = line(at);
    context.moveTo(x0, y0);
    context.lineTo(x1, y1);
  }
}
