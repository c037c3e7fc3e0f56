// Panel 2: the block pool, a cell a block (or a few), and the prefix tree's heaviest branches.

import { byId, colours, count, element, percent, say, surface } from "./draw.js";

const HELD = 1, IN_TREE = 2, SHARED = 4, MOVING = 8;
// Every kind has a shape of its own beside its colour, for eyes that do not tell the colours.
const KINDS = [
  ["free", "free", "free"],
  ["cached", "cached, nobody's", "sky"],
  ["active", "in use", "green"],
  ["shared", "in use by several", "orange"],
  ["moving", "being copied", "pink"],
];
const TENANT_COLOURS = ["blue", "orange", "green", "pink", "sky", "red", "yellow"];
const grid = { cells: 0, columns: 1, size: 8, flags: new Uint8Array(), owners: new Uint8Array(), cursor: -1 };
let last = null;

/** A tenant's colour, by its place in the list. */
export const tenantColour = (index) => TENANT_COLOURS[index % TENANT_COLOURS.length];

const byTenant = () => document.querySelector("#colour-by input:checked").value === "tenant";
const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

function kindOf(flags) {
  if (flags & MOVING) return "moving";
  if (flags & SHARED) return "shared";
  if (flags & HELD) return "active";
  return flags & IN_TREE ? "cached" : "free";
}

export function start(hello) {
  say(byId("pool-size"), `${count(hello.num_blocks)} blocks of ${hello.block_size} tokens`);
  byId("colour-by").addEventListener("change", () => last && show(last, hello));
  const canvas = byId("blocks");
  canvas.addEventListener("pointermove", (event) => pointAt(event.offsetX, event.offsetY));
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -grid.columns, ArrowDown: grid.columns }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    grid.cursor = Math.min(grid.cells - 1, Math.max(0, grid.cursor + by));
    draw();
    describe(grid.cursor);
  });
}

export function show(tick, hello) {
  if (!tick.inside) return;
  last = tick;
  const { blocks, tenants } = tick.inside;
  grid.flags = bytes(blocks.flags);
  grid.owners = bytes(blocks.owners);
  grid.cells = grid.flags.length;
  grid.perCell = blocks.per_cell;
  grid.tenants = tenants;
  if (blocks.per_cell > 1) {
    const size = `${count(hello.num_blocks)} blocks of ${hello.block_size} tokens, ${blocks.per_cell} a cell`;
    say(byId("pool-size"), size);
  }
  showLevel(blocks);
  showLegend(tenants);
  draw();
  showBranches(tick.inside.branches, blocks.total, hello);
}

function showLevel(blocks) {
  const parts = [["active", "in use", "green"], ["in_flight", "being copied", "pink"], ["cached", "cached", "sky"],
    ["free", "free", "free"]];
  const shares = parts.map(([name, words]) => `${words} ${percent(blocks[name] / blocks.total)}`);
  const bar = byId("level");
  bar.setAttribute("aria-label", `The pool: ${shares.join(", ")}`);
  bar.title = shares.join(", ");
  bar.replaceChildren(...parts.map(([name, , colour]) => {
    const part = element("i");
    part.style.width = `${100 * blocks[name] / blocks.total}%`;
    part.style.background = colours[colour];
    return part;
  }));
}

function showLegend(tenants) {
  const list = byId("block-kinds");
  const counted = new Map();
  for (let i = 0; i < grid.cells; i++) {
    const key = byTenant() ? ownerOf(i) : kindOf(grid.flags[i]);
    counted.set(key, (counted.get(key) ?? 0) + 1);
  }
  const share = (key) => percent((counted.get(key) ?? 0) / (grid.cells || 1));
  const rows = byTenant()
    ? [...tenants.map((tenant, i) => [i + 1, tenant.name || "default", "active", tenantColour(i)]),
      [0, "nobody's", "cached", "grey"], [-1, "free", "free", "free"]]
    : KINDS.map(([kind, words, colour]) => [kind, words, kind, colour]);
  const shown = rows.filter(([key]) => counted.get(key) || !byTenant()).slice(0, 12);
  list.replaceChildren(...shown.map(([key, words, shape, colour]) => {
    const swatch = element("canvas", { width: 28, height: 28 });
    const context = swatch.getContext("2d");
    context.scale(2, 2);
    cell(context, 1, 1, 12, shape, colours[colour]);
    return element("li", {}, swatch, `${words} ${share(key)}`);
  }));
}

/** 1 + the tenant's index, 0 for a cached block that nobody holds, -1 for a free one. */
function ownerOf(index) {
  const kind = kindOf(grid.flags[index]);
  return kind === "free" ? -1 : grid.owners[index];
}

function draw() {
  const canvas = byId("blocks");
  const width = canvas.clientWidth;
  if (!width || !grid.cells) return;
  const most = width < 420 ? 300 : 330;
  grid.size = Math.max(4, Math.min(14, Math.floor(Math.sqrt((width * most) / grid.cells))));
  grid.columns = Math.max(1, Math.floor(width / grid.size));
  const height = Math.ceil(grid.cells / grid.columns) * grid.size;
  canvas.style.height = `${height}px`;
  const { context } = surface(canvas, height);
  for (let i = 0; i < grid.cells; i++) {
    const kind = kindOf(grid.flags[i]);
    const colour = byTenant() && grid.owners[i] ? tenantColour(grid.owners[i] - 1)
      : byTenant() && kind !== "free" ? "grey" : KINDS.find(([name]) => name === kind)[2];
    cell(context, (i % grid.columns) * grid.size, Math.floor(i / grid.columns) * grid.size, grid.size - 1, kind,
      colours[colour]);
  }
  if (grid.cursor >= 0 && document.activeElement === canvas) {
    context.strokeStyle = colours.text;
    context.lineWidth = 2;
    const [x, y] = [grid.cursor % grid.columns, Math.floor(grid.cursor / grid.columns)];
    context.strokeRect(x * grid.size, y * grid.size, grid.size - 1, grid.size - 1);
  }
}

/** One block's picture: nothing but ground when free, small when cached, full in use, holed when shared, cut when moving. */
function cell(context, x, y, size, kind, colour) {
  context.fillStyle = colours.free;
  context.fillRect(x, y, size, size);
  if (kind === "free") return;
  context.fillStyle = colour;
  const inset = kind === "cached" ? Math.max(1, Math.round(size / 4)) : 0;
  context.fillRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset);
  if (kind === "shared") {
    const hole = Math.max(1, Math.round(size / 3));
    const at = Math.round((size - hole) / 2);
    context.fillStyle = colours.panel;
    context.fillRect(x + at, y + at, hole, hole);
  } else if (kind === "moving") {
    context.fillStyle = colours.panel;
    context.beginPath();
    context.moveTo(x, y + size);
    context.lineTo(x + size, y);
    context.lineTo(x + size, y + size);
    context.fill();
  }
}

function pointAt(x, y) {
  const index = Math.floor(y / grid.size) * grid.columns + Math.floor(x / grid.size);
  if (index >= 0 && index < grid.cells) describe(index);
}

function describe(index) {
  const first = index * grid.perCell;
  const end = Math.min(first + grid.perCell, last.inside.blocks.total) - 1;
  const flags = grid.flags[index];
  const parts = [KINDS.find(([name]) => name === kindOf(flags))[1]];
  if (flags & HELD && flags & IN_TREE) parts.push("in the prefix tree");
  const owner = grid.owners[index];
  if (owner) parts.push(`tenant ${grid.tenants[owner - 1]?.name || "default"}`);
  say(byId("block"), `${end > first ? `Blocks ${first} to ${end}, mostly` : `Block ${first}`}: ${parts.join(", ")}`);
}

function showBranches(branches, total, hello) {
  byId("no-branches").hidden = branches.length > 0;
  const below = (parent, level) => branches.flatMap((branch, i) => (branch.parent === parent
    ? [branchRow(branch, level, total, hello), ...below(i, level + 1)] : []));
  byId("branches").replaceChildren(...below(-1, 0));
}

function branchRow(branch, level, total, hello) {
  const name = element("td", {}, `${level ? "└ " : ""}${count(branch.blocks * hello.block_size)} tokens`);
  name.style.paddingLeft = `${Math.min(level, 6) * 12}px`;
  if (branch.start) name.append(element("span", { className: "hint" }, ` after ${count(branch.start * hello.block_size)}`));
  if (branch.text) name.append(element("div", { className: "branch-text", textContent: branch.text }));
  const bar = element("i");
  bar.style.width = `${Math.max(1, 90 * branch.below / total)}px`;
  return element("tr", {}, name, element("td", {}, element("div", { className: "weight" }, bar, count(branch.below))),
    element("td", { className: "number", textContent: count(branch.hits) }),
    element("td", { className: "number", textContent: count(branch.users) }));
}
