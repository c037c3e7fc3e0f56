// Panel 1: what the server does at this moment.

import { waitWords } from "./causes.js";
import { byId, colours, count, duration, durationText, element, say, sparkline } from "./draw.js";

const MOST = 60;
const history = { output: [], prompt: [], cached: [], step: [] };

function keep(series, value) {
  series.push(value);
  if (series.length > MOST) series.shift();
}

export function take(tick) {
  keep(history.output, tick.rates.output);
  keep(history.prompt, tick.rates.prompt);
  keep(history.cached, tick.rates.cached);
  keep(history.step, tick.steps.median);
}

export function show(tick, hello) {
  const { rates, inside } = tick;
  say(byId("output-rate"), count(rates.output));
  say(byId("prompt-rate"), count(rates.prompt + rates.cached));
  say(byId("cached-rate"), `${count(rates.cached)} from the cache (dashed)`);
  say(byId("finished-rate"), `${count(rates.finished)} requests/s ended`);
  say(byId("running"), count(tick.running));
  say(byId("waiting"), count(tick.waiting));
  say(byId("swapped"), inside ? count(inside.swapped) : "–");
  showReasons(inside?.waiting ?? {});
  showPercentiles("ttft", tick.ttft, "first tokens");
  showPercentiles("itl", tick.itl, "tokens");
  showSteps(tick.steps, tick.late, hello.step_target);
  const sum = history.prompt.map((value, i) => value + history.cached[i]);
  sparkline(byId("output-line"), history.output, colours.green);
  sparkline(byId("prompt-line"), sum, colours.blue, { below: history.cached });
  sparkline(byId("step-line"), history.step, colours.orange, { target: hello.step_target });
}

function showReasons(waiting) {
  const texts = waitWords(waiting).slice(0, 4);
  const list = byId("reasons");
  if (list.dataset.shown === texts.join()) return;
  list.dataset.shown = texts.join();
  list.replaceChildren(...texts.map((text) => element("li", { textContent: text })));
}

function showPercentiles(id, values, what) {
  const seconds = values.p99 >= 0.9995; // one unit for all three
  const parts = ["p50", "p90", "p99"].map((name) => {
    const [number] = seconds ? [values[name].toFixed(values[name] < 9.95 ? 2 : 1)] : duration(values[name]);
    const unit = values.count ? (seconds ? ", s" : ", ms") : "";
    return element("div", {}, element("dd", {}, number), element("dt", { textContent: name + unit }));
  });
  byId(id).replaceChildren(...parts);
  say(byId(`${id}-count`), values.count ? `of ${count(values.count)} ${what}` : "none in the last minute");
}

function showSteps(steps, late, target) {
  const figure = byId("step-median");
  if (late) {
    say(figure, `${late.toFixed(1)} s`);
    say(byId("step-note"), "in one step, and not done yet");
  } else if (!steps.count) {
    say(figure, "idle");
    say(byId("step-note"), target ? `target ${durationText(target)}` : "");
  } else {
    const [number, unit] = duration(steps.median);
    figure.replaceChildren(number, element("small", { textContent: ` ${unit} median` }));
    const aim = target ? `, target ${durationText(target)}` : "";
    const expected = steps.predicted === null ? "" : `expected ${durationText(steps.predicted)}, `;
    say(byId("step-note"), `${expected}longest ${durationText(steps.longest)}${aim}`);
  }
}
