// Panel 5: what each tenant got against what its weight entitles it to, its limits, and who waits for whom.

import { waitWords } from "./causes.js";
import { byId, colours, count, element, percent } from "./draw.js";
import { tenantColour } from "./grid.js";

const MOST = 60; // ticks
const history = []; // what each tenant had received, by name
const nameOf = (tenant) => tenant.name || "default";
const total = (counts) => Object.values(counts).reduce((sum, number) => sum + number, 0);

/** Remember what everybody had received, shown or not. */
export function take(tick) {
  if (!tick.inside) return;
  history.push(new Map(tick.inside.tenants.map((tenant) => [tenant.name, tenant.received])));
  if (history.length > MOST) history.shift();
}

export function show(tick, hello) {
  if (!tick.inside) return;
  const { tenants, blocks } = tick.inside;
  byId("no-tenants").hidden = tenants.length > 0;
  const got = tenants.map((tenant) => tenant.received - (history[0]?.get(tenant.name) ?? 0));
  const active = tenants.filter((tenant, i) => got[i] > 0 || tenant.running || total(tenant.waiting));
  const sums = { got: got.reduce((sum, value) => sum + value, 0) || 1,
    weight: active.reduce((sum, tenant) => sum + tenant.weight, 0) || 1, blocks: blocks.total };
  byId("tenant-rows").replaceChildren(...tenants.map((tenant, i) => row(tenant, i, got[i], active.includes(tenant), sums)));
  const waits = sentences(tenants, hello.policy);
  byId("waits").replaceChildren(...waits.map((text) => element("li", { textContent: text })));
}

function row(tenant, index, got, active, sums) {
  const [share, due] = [got / sums.got, active ? tenant.weight / sums.weight : 0];
  const bar = element("div", { className: "share" });
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", `${percent(share)} of the service; the weight entitles to ${percent(due)}`);
  const [fill, tick] = [element("i"), element("b")];
  fill.style.width = `${100 * share}%`;
  fill.style.background = colours[tenantColour(index)];
  tick.style.left = `calc(${100 * due}% - 1px)`;
  bar.append(fill, tick);
  const facts = [`${count(tenant.running)} running`, `${count(total(tenant.waiting))} waiting`,
    `${percent(tenant.blocks / sums.blocks)} of the blocks`, ...limits(tenant)];
  return element("li", {},
    element("div", { className: "line" }, element("b", { textContent: nameOf(tenant) }),
      element("small", { className: "hint", textContent: `weight ${tenant.weight}` }),
      element("span", { textContent: active ? `${percent(share)} of ${percent(due)} due` : "idle" })),
    bar, element("p", { className: "note", textContent: facts.join(" · ") }));
}

function limits(tenant) {
  const found = [];
  if (tenant.max_running != null) found.push(`at most ${tenant.max_running} running`);
  if (tenant.max_waiting != null) found.push(`at most ${tenant.max_waiting} waiting`);
  if (tenant.tokens_per_minute != null) found.push(`${count(tenant.tokens_per_minute)} tokens a minute`);
  if (tenant.kv_share < 1) found.push(`at most ${percent(tenant.kv_share)} of the blocks`);
  return found;
}

/** For every tenant that waits: for what, and behind whom. */
function sentences(tenants, policy) {
  const waiting = tenants.filter((tenant) => total(tenant.waiting) > 0);
  if (!waiting.length) return ["Nobody waits."];
  return waiting.map((tenant) => {
    const why = waitWords(tenant.waiting).join(", ");
    const others = tenants.filter((other) => other.running > 0).map((other) => {
      const owed = policy === "fair" && other !== tenant && other.lead < tenant.lead ? ", owed first" : "";
      return `${other === tenant ? "itself" : nameOf(other)} (${count(other.running)} running${owed})`;
    });
    return `${nameOf(tenant)} waits for ${why}; behind ${others.join(", ") || "nobody: it is about to start"}`;
  });
}
