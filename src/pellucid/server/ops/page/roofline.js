// Panel 4: the machine's two ceilings, and under them the steps of the last minute.

import { byId, colours, count, element, percent, say, scaled, surface } from "./draw.js";

const SECONDS = 60;
let points = []; // {at, intensity, rate, share, decode, tokens}
let machine = null;

export function start(hello) {
  machine = hello.machine;
  byId("roof").hidden = byId("marks").hidden = !machine;
  byId("no-roof").hidden = Boolean(machine);
  if (!machine) {
    say(byId("no-roof"), `The machine's ceilings are not known: ${hello.advice}`);
    return;
  }
  say(byId("machine"), `${machine.machine}, measured ${machine.measured_at.slice(0, 10)}`);
}

/** Remember a tick's steps, shown or not. */
export function take(tick) {
  if (!machine) return;
  for (const [flops, bytes, seconds, tokens, sequences, decode] of tick.steps.points) {
    const [intensity, rate] = [flops / bytes, flops / seconds];
    points.push({ at: tick.at, intensity, rate, share: rate / ceiling(intensity), decode, tokens, sequences });
  }
  points = points.filter((point) => tick.at - point.at < SECONDS);
}

const ceiling = (intensity) => Math.min(machine.flops, intensity * machine.bandwidth);

export function show() {
  if (!machine) return;
  showMarks();
  draw();
  showNote();
}

function showMarks() {
  const list = byId("marks");
  if (list.dataset.theme === colours.green) return;
  list.dataset.theme = colours.green;
  list.replaceChildren(...[[true, "steps that only decode"], [false, "steps with prompt chunks"]].map(([decode, words]) => {
    const swatch = element("canvas", { width: 28, height: 28 });
    const context = swatch.getContext("2d");
    context.scale(2, 2);
    mark(context, 7, 7, 4.5, decode);
    return element("li", {}, swatch, words);
  }));
}

/** A circle for a decode step, a triangle for a mixed one. */
function mark(context, x, y, radius, decode) {
  context.strokeStyle = context.fillStyle = decode ? colours.green : colours.blue;
  context.beginPath();
  if (decode) {
    context.arc(x, y, radius, 0, 2 * Math.PI);
  } else {
    context.moveTo(x, y - radius * 1.2);
    context.lineTo(x + radius * 1.1, y + radius * 0.8);
    context.lineTo(x - radius * 1.1, y + radius * 0.8);
    context.closePath();
  }
  context.globalAlpha = 0.25;
  context.fill();
  context.globalAlpha = 0.9;
  context.stroke();
  context.globalAlpha = 1;
}

function draw() {
  const drawn = surface(byId("roof"));
  if (!drawn) return;
  const { context, width, height } = drawn;
  const [left, right, top, bottom] = [44, 10, 22, 34];
  const ridge = machine.flops / machine.bandwidth;
  const low = Math.min(0.5, ...points.map((point) => point.intensity)), high = Math.max(10 * ridge, 1000);
  const ceil = machine.flops * 2;
  const floor = Math.min(ceiling(low), ...points.map((point) => point.rate)) / 2;
  const log = (value, from, to) => Math.log(value / from) / Math.log(to / from);
  const x = (value) => left + log(value, low, high) * (width - left - right);
  const y = (value) => height - bottom - log(value, floor, ceil) * (height - top - bottom);
  context.font = "11px system-ui, sans-serif";
  frame(context, { x, y, low, high, floor, ceil, left, right, top, bottom, width, height });
  context.strokeStyle = colours.text;
  context.lineWidth = 2;
  context.beginPath();
  context.moveTo(x(low), y(ceiling(low)));
  context.lineTo(x(ridge), y(machine.flops));
  context.lineTo(x(high), y(machine.flops));
  context.stroke();
  context.lineWidth = 1;
  context.fillStyle = colours.text;
  context.textAlign = "right";
  context.textBaseline = "top";
  context.fillText(`${scaled(machine.flops)}FLOP/s, ${machine.format}`, width - right - 2, y(machine.flops) + 5);
  const middle = Math.sqrt(low * ridge);
  context.save();
  context.translate(x(middle), y(ceiling(middle)));
  context.rotate(Math.atan2(y(machine.flops) - y(ceiling(low)), x(ridge) - x(low)));
  context.textAlign = "center";
  context.textBaseline = "bottom";
  context.fillText(`memory, ${scaled(machine.bandwidth)}B/s`, 0, -4);
  context.restore();
  for (const point of points) mark(context, x(point.intensity), y(point.rate), 3.5, point.decode);
}

function frame(context, { x, y, low, high, floor, ceil, left, right, top, bottom, width, height }) {
  context.strokeStyle = colours.hair;
  context.fillStyle = colours.faint;
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (let power = Math.ceil(Math.log10(floor)); 10 ** power <= ceil; power++) {
    line(context, left, y(10 ** power), width - right, y(10 ** power));
    context.fillText(scaled(10 ** power), left - 5, y(10 ** power));
  }
  context.textAlign = "center";
  context.textBaseline = "top";
  for (let power = Math.ceil(Math.log10(low)); 10 ** power <= high; power++) {
    line(context, x(10 ** power), top, x(10 ** power), height - bottom);
    context.fillText(String(10 ** power), x(10 ** power), height - bottom + 4);
  }
  context.fillText("FLOP per byte moved", (left + width - right) / 2, height - 14);
  context.textAlign = "left";
  context.fillText("FLOP/s", 4, 2);
}

function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

function showNote() {
  const texts = [];
  for (const [decode, words] of [[true, "steps that only decode"], [false, "steps with prompt chunks"]]) {
    const these = points.filter((point) => point.decode === decode);
    if (!these.length) continue;
    const middle = (values) => values.sort((a, b) => a - b)[values.length >> 1];
    const sequences = middle(these.map((point) => point.sequences));
    texts.push(`${words} reach ${percent(middle(these.map((point) => point.share)))} of their ceiling `
      + `(median; ${count(sequences)} sequences)`);
  }
  const text = texts.length ? `Last minute: ${texts.join("; ")}.` : "No step in the last minute.";
  say(byId("roof-note"), text);
  byId("roof").setAttribute("aria-label", `Roofline. ${text}`);
}
