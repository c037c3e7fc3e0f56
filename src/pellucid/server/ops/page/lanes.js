// Panel 3: one lane a request, coloured by where its time went; a chosen one is explained below.
//
// A lane's height is shared by the causes of a stretch as its time was, so that an area of colour is time.

import { causeWords, families, paint, swatch } from "./causes.js";
import { explain, follow as explainAgain } from "./explain.js";
import { byId, count, element, say, surface } from "./draw.js";

const GROUPS = ["running", "waiting", "ended"];
const OPEN = { running: "running", swapped: "waiting", waiting: "waiting" };
const rows = new Map(); // request id -> {row, lane}
let lanes = []; // in the order shown
let numWaiting = 0; // of whom only the first have lanes
let active = null; // the id that the arrow keys stand on
let mine = ""; // the id of the playground's own request

const windowSeconds = () => Number(document.querySelector("#span input:checked").value);
const box = () => byId("lanes");

export function start() {
  box().append(...GROUPS.map((name) => {
    const group = element("div", { id: `group-${name}`, hidden: true }, element("h3", { id: `group-${name}-title` }));
    group.setAttribute("role", "group");
    group.setAttribute("aria-labelledby", `group-${name}-title`);
    return group;
  }));
  byId("span").addEventListener("change", draw);
  box().addEventListener("scroll", drawTracks, { passive: true });
  box().addEventListener("keydown", onKey);
  box().addEventListener("focus", () => active ?? activate(lanes[0]?.id));
}

function onKey(event) {
  const at = lanes.findIndex((lane) => lane.id === active);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: lanes.length - 1 }[event.key];
  if (to !== undefined) {
    event.preventDefault();
    activate(lanes[Math.min(lanes.length - 1, Math.max(0, to))]?.id);
  } else if ((event.key === "Enter" || event.key === " ") && rows.has(active)) {
    event.preventDefault();
    choose(rows.get(active).lane);
  }
}

/** Mark the lane of this request as the reader's own. */
export function follow(id) {
  mine = id;
  draw();
}

export function show(tick) {
  if (!tick.inside) return;
  const groupOf = (lane) => GROUPS.indexOf(OPEN[lane.status] ?? "ended");
  const ended = (lane) => (groupOf(lane) === 2 ? -lane.spans.at(-1)[1] : 0);
  lanes = tick.inside.lanes.map((lane, i) => ({ ...lane, group: groupOf(lane), place: [groupOf(lane), ended(lane), i] }))
    .sort((a, b) => a.place[0] - b.place[0] || a.place[1] - b.place[1] || a.place[2] - b.place[2]);
  numWaiting = Object.values(tick.inside.waiting).reduce((sum, number) => sum + number, 0);
  draw();
  explainAgain(lanes);
}

function draw() {
  const span = windowSeconds();
  const shown = lanes.filter((lane) => lane.spans.at(-1)[1] > -span);
  byId("no-lanes").hidden = shown.length > 0;
  box().hidden = byId("axis").hidden = !shown.length;
  drawAxis(span);
  const keep = new Set(shown.map((lane) => lane.id));
  for (const [id, { row }] of rows) {
    if (keep.has(id)) continue;
    row.remove();
    rows.delete(id);
  }
  GROUPS.forEach((name, index) => {
    const members = shown.filter((lane) => lane.group === index);
    const group = byId(`group-${name}`);
    group.hidden = !members.length;
    const all = name === "waiting" ? numWaiting : members.length;
    say(group.firstChild, members.length < all ? `${name}: ${count(all)}, the next ${members.length} shown`
      : `${name}: ${members.length}`);
    members.forEach((lane, i) => {
      const row = rows.get(lane.id)?.row ?? newRow(lane);
      if (group.children[i + 1] !== row) group.insertBefore(row, group.children[i + 1] ?? null);
      rows.set(lane.id, { row, lane });
      describe(row, lane);
    });
  });
  showLegend(new Set(shown.flatMap((lane) => lane.spans.flatMap(([, , causes]) => causes.map(([cause]) => cause)))));
  drawTracks();
}

function newRow(lane) {
  const row = element("div", { className: "lane", id: `lane-${lane.id}` });
  row.setAttribute("role", "option");
  const track = element("canvas", { className: "track" });
  track.setAttribute("aria-hidden", "true");
  row.append(element("div", { className: "who" }, element("b"), element("span")), track);
  row.addEventListener("click", () => {
    activate(lane.id);
    choose(rows.get(lane.id).lane);
  });
  return row;
}

const shortId = (id) => id.replace(/^(chatcmpl|cmpl|req)-/, "").replace(/^([0-9a-f]{6})[0-9a-f]+/, "$1");

function describe(row, lane) {
  const tenant = lane.tenant && lane.tenant !== "default" ? lane.tenant : "";
  const [name, size] = row.firstChild.children;
  say(name, `${tenant} ${shortId(lane.id)} ${lane.text}`.trim());
  say(size, `${count(lane.prompt)}+${count(lane.output)}`);
  row.dataset.mine = mine !== "" && lane.id.startsWith(mine);
  const last = lane.spans.at(-1)[2].reduce((a, b) => (b[1] > a[1] ? b : a), ["", -1])[0];
  const now = lane.status in OPEN ? causeWords(last) : `ended: ${lane.status}`;
  const label = `Request ${shortId(lane.id)}${tenant ? ` of ${tenant}` : ""}, ${now}, ${lane.prompt} prompt tokens, `
    + `${lane.cached} of them cached, ${lane.output} output tokens`;
  if (row.title !== label) {
    row.title = label;
    row.setAttribute("aria-label", label);
  }
}

/** Paint the lanes that can be seen. */
function drawTracks() {
  const span = windowSeconds();
  const [top, bottom] = [box().scrollTop - 30, box().scrollTop + box().clientHeight + 30];
  for (const { row, lane } of rows.values()) {
    const at = row.offsetTop - box().offsetTop;
    if (at >= top && at <= bottom) drawTrack(row.lastChild, lane, span);
  }
}

function drawTrack(track, lane, span) {
  const drawn = surface(track);
  if (!drawn) return;
  const { context, width, height } = drawn;
  const x = (seconds) => Math.max(0, (1 + seconds / span) * width);
  for (const [start, end, causes] of lane.spans) {
    if (end <= -span) continue;
    const [from, length] = [x(start), Math.max(1, x(end) - x(start))];
    let y = 0;
    for (const [cause, seconds] of causes) {
      const share = causes.length === 1 ? 1 : seconds / (end - start);
      paint(context, cause, from, y, length, share * height);
      y += share * height;
    }
  }
}

function activate(id) {
  const found = rows.get(id);
  if (!found) return;
  rows.get(active)?.row.removeAttribute("data-active");
  active = id;
  found.row.dataset.active = true;
  box().setAttribute("aria-activedescendant", found.row.id);
  found.row.scrollIntoView({ block: "nearest" });
}

function choose(lane) {
  for (const { row } of rows.values()) row.removeAttribute("aria-selected");
  rows.get(lane.id)?.row.setAttribute("aria-selected", true);
  explain(lane, () => {
    rows.get(lane.id)?.row.removeAttribute("aria-selected");
    box().focus();
  });
}

function drawAxis(span) {
  const axis = byId("axis");
  axis.style.marginRight = `${box().offsetWidth - box().clientWidth}px`; // the scrollbar's place
  if (axis.dataset.span === String(span)) return;
  axis.dataset.span = span;
  axis.replaceChildren(...[1, 0.75, 0.5, 0.25, 0].map((share) => {
    const mark = element("span", { textContent: share ? `−${share * span} s` : "now" });
    mark.style.left = `${100 * (1 - share)}%`;
    return mark;
  }));
}

function showLegend(causes) {
  const list = byId("causes");
  const shown = families(causes);
  const key = shown.map(([, words]) => words).join() + document.documentElement.dataset.painted;
  if (list.dataset.shown === key) return;
  list.dataset.shown = key;
  list.replaceChildren(...shown.map(([cause, words]) => element("li", {}, swatch(cause), words)));
}
