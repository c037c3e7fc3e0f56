// A pool of blocks as a grid on a canvas, a cell a block or a few. Every kind of block has a shape of its own beside its
// colour, for eyes that do not tell the colours.

import { colours, count, percent, say, surface } from "./draw.js";

const HELD = 1, IN_TREE = 2, SHARED = 4, MOVING = 8;

/** [kind, words, colour] of blocks, when they are coloured by state. */
export const KINDS = [
  ["free", "free", "free"],
  ["cached", "cached", "sky"],
  ["active", "in use", "green"],
  ["shared", "in use by several", "orange"],
  ["moving", "being copied", "pink"],
];

const TENANT_COLOURS = ["blue", "orange", "green", "pink", "sky", "red", "yellow"];

/** A tenant's colour, by its place in the list. */
export const tenantColour = (index) => TENANT_COLOURS[index % TENANT_COLOURS.length];

function kindOf(flags) {
  if (flags & MOVING) return "moving";
  if (flags & SHARED) return "shared";
  if (flags & HELD) return "active";
  return flags & IN_TREE ? "cached" : "free";
}

const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

export class Grid {
  /** `note` is where a block that is pointed at is described; `prefix` begins such a description. */
  constructor(canvas, note, prefix = "") {
    Object.assign(this, { canvas, note, prefix, cells: 0, columns: 1, size: 8, cursor: -1, byTenant: false });
    canvas.addEventListener("pointermove", (event) => {
      const index = Math.floor(event.offsetY / this.size) * this.columns + Math.floor(event.offsetX / this.size);
      if (index >= 0 && index < this.cells) this.describe(index);
    });
    canvas.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      this.cursor = Math.min(this.cells - 1, Math.max(0, this.cursor + by));
      this.draw();
      this.describe(this.cursor);
    });
  }

  show(blocks, tenants, byTenant, mostHeight) {
    Object.assign(this, { blocks, tenants, byTenant, mostHeight });
    this.flags = bytes(blocks.flags);
    this.owners = bytes(blocks.owners);
    this.cells = this.flags.length;
    this.draw();
  }

  /** How many cells there are of each kind, or of each tenant (1 + its place; 0: nobody's; -1: free). */
  counts() {
    const counted = new Map();
    for (let i = 0; i < this.cells; i++) {
      const kind = kindOf(this.flags[i]);
      const key = !this.byTenant ? kind : kind === "free" ? -1 : this.owners[i];
      counted.set(key, (counted.get(key) ?? 0) + 1);
    }
    return counted;
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width || !this.cells) return;
    this.size = Math.max(4, Math.min(14, Math.floor(Math.sqrt((width * this.mostHeight) / this.cells))));
    this.columns = Math.max(1, Math.floor(width / this.size));
    const height = Math.ceil(this.cells / this.columns) * this.size;
    this.canvas.style.height = `${height}px`;
    const { context } = surface(this.canvas, height);
    for (let i = 0; i < this.cells; i++) {
      const kind = kindOf(this.flags[i]);
      const [x, y] = this.place(i);
      cell(context, x, y, this.size - 1, kind, colours[this.colour(i, kind)]);
    }
    if (this.cursor >= 0 && document.activeElement === this.canvas) {
      context.strokeStyle = colours.text;
      context.lineWidth = 2;
      context.strokeRect(...this.place(this.cursor), this.size - 1, this.size - 1);
    }
  }

  place(index) {
    return [(index % this.columns) * this.size, Math.floor(index / this.columns) * this.size];
  }

  colour(index, kind) {
    if (!this.byTenant || kind === "free") return KINDS.find(([name]) => name === kind)[2];
    return this.owners[index] ? tenantColour(this.owners[index] - 1) : "grey";
  }

  describe(index) {
    const first = index * this.blocks.per_cell;
    const last = Math.min(first + this.blocks.per_cell, this.blocks.total) - 1;
    const flags = this.flags[index];
    const parts = [KINDS.find(([name]) => name === kindOf(flags))[1]];
    if (flags & HELD && flags & IN_TREE) parts.push("in the prefix tree");
    const owner = flags ? this.owners[index] : 0;
    if (owner) parts.push(`tenant ${this.tenants[owner - 1]?.name || "default"}`);
    const which = last > first ? `blocks ${first} to ${last}, mostly` : `block ${first}`;
    const text = `${this.prefix}${which}: ${parts.join(", ")}`;
    say(this.note, text[0].toUpperCase() + text.slice(1));
  }
}

/** One block's picture: nothing but ground when free, small when cached, full in use, holed when shared, cut when moving. */
export function cell(context, x, y, size, kind, colour) {
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

/** "5,825 blocks, 2 a cell, 12 % in use" */
export function sizeWords(blocks) {
  const cells = blocks.per_cell > 1 ? `, ${blocks.per_cell} a cell` : "";
  return `${count(blocks.total)} blocks${cells}, ${percent(1 - blocks.free / blocks.total)} of them filled`;
}
