// Panel 2: the pools of blocks, and the prefix tree's heaviest branches.

import { byId, colours, count, element, percent, say } from "./draw.js";
import { cell, Grid, KINDS, sizeWords, tenantColour } from "./grid.js";

let device = null, host = null; // Grids
let last = null;

const byTenant = () => document.querySelector("#colour-by input:checked").value === "tenant";

export function start(hello) {
  device = new Grid(byId("blocks"), byId("block"));
  host = new Grid(byId("host-blocks"), byId("block"), "host ");
  say(byId("pool-size"), `${count(hello.num_blocks)} blocks of ${hello.block_size} tokens`);
  byId("colour-by").addEventListener("change", () => last && show(last, hello));
}

export function show(tick, hello) {
  if (!tick.inside) return;
  last = tick;
  const { blocks, host: second, tenants, branches } = tick.inside;
  const height = (byId("blocks").clientWidth < 420 ? 300 : 330) * (second ? 0.7 : 1);
  device.show(blocks, tenants, byTenant(), height);
  byId("host").hidden = !second;
  if (second) {
    host.show(second, tenants, byTenant(), height / 2);
    say(byId("host-size"), `Host tier: ${sizeWords(second)}`);
  }
  if (blocks.per_cell > 1) {
    say(byId("pool-size"), `${count(hello.num_blocks)} blocks of ${hello.block_size} tokens, ${blocks.per_cell} a cell`);
  }
  showLevel(blocks);
  showLegend(tenants);
  showBranches(branches, blocks.total, hello);
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
  const counted = device.counts();
  const share = (key) => percent((counted.get(key) ?? 0) / device.cells);
  const rows = byTenant()
    ? [...tenants.map((tenant, i) => [i + 1, tenant.name || "default", "active", tenantColour(i)]),
      [0, "nobody's", "cached", "grey"], [-1, "free", "free", "free"]].filter(([key]) => counted.get(key))
    : KINDS.map(([kind, words, colour]) => [kind, words, kind, colour]);
  byId("block-kinds").replaceChildren(...rows.slice(0, 12).map(([key, words, shape, colour]) => {
    const swatch = element("canvas", { width: 28, height: 28 });
    swatch.setAttribute("aria-hidden", "true");
    const context = swatch.getContext("2d");
    context.scale(2, 2);
    cell(context, 1, 1, 12, shape, colours[colour]);
    return element("li", {}, swatch, `${words} ${share(key)}`);
  }));
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
  bar.style.width = `${Math.max(1, 90 * Math.min(1, branch.below / total))}px`;
  return element("tr", {}, name, element("td", {}, element("div", { className: "weight" }, bar, count(branch.below))),
    element("td", { className: "number", textContent: count(branch.hits) }),
    element("td", { className: "number", textContent: count(branch.users) }));
}
