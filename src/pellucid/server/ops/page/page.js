// Pellucid's ops page: reads the live stream and hands every tick to the panels. No library, no build step, and nothing is
// fetched from anywhere but the server that the page came from.

import { byId, colours, readColours, say } from "./draw.js";
import * as lanes from "./lanes.js";
import * as memory from "./memory.js";
import * as now from "./now.js";
import * as playground from "./playground.js";
import * as roofline from "./roofline.js";
import { follow } from "./stream.js";
import * as tenants from "./tenants.js";

const PANELS = [now, lanes, memory, roofline, tenants];
let hello = null, latest = null, paused = false;

function draw() {
  if (latest && hello && !document.hidden) for (const panel of PANELS) panel.show(latest, hello);
}

function setState(state, text) {
  byId("state").dataset.state = state;
  say(byId("state"), text);
}

const STATES = { ready: "live", starting: "the engine is starting", dead: "the engine has stopped" };

follow({
  hello(document) {
    const first = hello === null;
    hello = document;
    say(byId("model"), `${hello.model} · Pellucid ${hello.version}`);
    roofline.start(hello);
    if (first) memory.start(hello);
  },
  tick(tick) {
    for (const panel of PANELS) panel.take?.(tick);
    if (!paused) {
      setState(tick.state, STATES[tick.state] + (tick.reason ? `: ${tick.reason}` : ""));
      latest = tick;
      draw();
    }
  },
  lost(reason) {
    setState("lost", `${reason}; trying again`);
  },
});
lanes.start();
playground.start();

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", paused);
  say(byId("pause"), paused ? "Go on" : "Pause");
  if (paused) setState("paused", "paused");
});

const THEMES = ["system", "light", "dark"];
function showTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  say(byId("theme"), `Theme: ${theme}`);
  repaint();
}

function repaint() {
  readColours();
  document.documentElement.dataset.painted = colours.panel; // what was drawn in other colours is drawn again
  draw();
}
byId("theme").addEventListener("click", () => {
  const theme = THEMES[(THEMES.indexOf(localStorage.getItem("pellucid-theme") ?? "system") + 1) % THEMES.length];
  localStorage.setItem("pellucid-theme", theme);
  showTheme(theme);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
addEventListener("resize", draw);
document.addEventListener("visibilitychange", draw);
showTheme(localStorage.getItem("pellucid-theme") ?? "system");
