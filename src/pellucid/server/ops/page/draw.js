// Small things that every panel needs: elements, numbers for people, sharp canvases, colours of the theme.

export const byId = (id) => document.getElementById(id);

/** An element with properties and children; strings become text, so nothing that is shown can be markup. */
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** Set a text only where it differs: a page that is read aloud should not stir every second. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** 0, 3.4, 127, 1,280 */
export function count(value) {
  return value > 0 && value < 9.95 ? value.toFixed(1).replace(/\.0$/, "") : grouped.format(value);
}

/** [number, unit] of a duration in seconds. */
export function duration(seconds) {
  if (seconds == null) return ["–", ""];
  if (seconds < 0.00995) return [(1e3 * seconds).toFixed(1), "ms"];
  if (seconds < 0.9995) return [(1e3 * seconds).toFixed(0), "ms"];
  return [seconds.toFixed(seconds < 9.95 ? 2 : 1), "s"];
}

export const durationText = (seconds) => duration(seconds).join(" ").trim();
export const percent = (share) => `${(100 * share).toFixed(share < 0.0995 && share > 0 ? 1 : 0)} %`;

/** 1.23 T, 456 G, ... */
export function scaled(value) {
  const step = Math.min(5, Math.max(0, Math.floor(Math.log10(value || 1) / 3)));
  const number = value / 1000 ** step;
  return `${number.toFixed(number < 9.95 ? 1 : 0).replace(/\.0$/, "")} ${["", "k", "M", "G", "T", "P"][step]}`;
}

/** The theme's colours, by name; read anew when the theme changes. */
export const colours = {};
export function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["text", "faint", "hair", "edge", "panel", "free", "accent", "blue", "sky", "green", "orange", "red",
    "pink", "yellow", "grey"]) {
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  }
}

/** A canvas's context with one unit a CSS pixel, cleared; null while it has no size. */
export function surface(canvas, height = canvas.clientHeight) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (!width || !height) return null;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** A line of the last `length` values (null: unknown), with a dashed line at `target` if there is one. */
export function sparkline(canvas, values, colour, { length = 60, target = null, below = null } = {}) {
  const drawn = surface(canvas);
  if (!drawn) return;
  const { context, width, height } = drawn;
  const known = [...values, ...(below ?? [])].filter((value) => value != null);
  const top = Math.max(1e-9, target ?? 0, ...known) * 1.08;
  const x = (i, n) => width - ((n - 1 - i) / (length - 1)) * width;
  const y = (value) => height - 1 - (value / top) * (height - 3);
  context.strokeStyle = colours.hair;
  context.beginPath();
  context.moveTo(0, height - 0.5);
  context.lineTo(width, height - 0.5);
  context.stroke();
  if (below) trace(context, below, x, y, colours.sky, height, [2, 2]);
  trace(context, values, x, y, colour, height, []);
  if (target != null) {
    context.setLineDash([4, 3]);
    context.strokeStyle = colours.red;
    context.beginPath();
    context.moveTo(0, y(target));
    context.lineTo(width, y(target));
    context.stroke();
    context.setLineDash([]);
  }
}

function trace(context, values, x, y, colour, height, dash) {
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = 1.5;
  context.setLineDash(dash);
  for (let start = 0, end = 0; start < values.length; start = end + 1) { // each run of known values by itself
    end = values.indexOf(null, start);
    if (end < 0) end = values.length;
    if (end === start) continue;
    context.beginPath();
    for (let i = start; i < end; i++) context.lineTo(x(i, values.length), y(values[i]));
    if (end === start + 1) context.lineTo(x(start, values.length) + 1, y(values[start]));
    context.stroke();
    if (dash.length) continue;
    context.lineTo(x(end - 1, values.length), height);
    context.lineTo(x(start, values.length), height);
    context.globalAlpha = 0.13;
    context.fill();
    context.globalAlpha = 1;
  }
  context.setLineDash([]);
  context.lineWidth = 1;
}
