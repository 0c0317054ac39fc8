// Which chunks of the text the heads read while they answered: a bar of sums over a map of layers and heads.

import { button, count, h } from "./dom.js";

const BARS = 48;
const GAP = 5;
const TALLEST = 224;
const N_MOST_READ = 5;
const percent = (share) => `${Math.round(100 * share)} %`;

/** Return the map of an answer as an element; `data` is chunk_map of /v1/longctx. */
export function chunkMap(data, open) {
  const view = new ChunkMap(data, open);
  return view.element;
}

/** Return whether a map says anything: some head did not read some chunk that it could choose. */
export function tells(data) {
  const n = data.positions.length;
  return chosen(data).some((chunk) => data.counts.some((row) => row[chunk] < n));
}

/** Return the chunks that heads choose among; the first and the last ones are read by all, always. */
function chosen({ positions, chunk_size, n_recent, n_chunk }) {
  const end = Math.min(Math.floor(positions[0] / chunk_size) - n_recent, n_chunk);
  return Array.from({ length: Math.max(end - 1, 0) }, (_, i) => i + 1);
}

class ChunkMap {
  constructor(data, open) {
    this.data = data;
    this.n_row = data.counts.length;
    this.n_query = data.positions.length;
    this.sums = data.counts[0].map((_, chunk) => data.counts.reduce((sum, row) => sum + row[chunk], 0) / this.n_query);
    this.canvas = h("canvas", { height: 1 });
    this.cursor = h("div", { className: "cursor" });
    this.frame = h("div", { className: "frame", tabIndex: 0, role: "slider", "aria-label": "Chunk of the text" });
    this.frame.append(this.canvas, this.cursor);
    this.where = h("p", { className: "where" });
    this.text = h("blockquote");
    this.list = h("ol", { className: "most" }, ...this.mostRead().map((chunk) => this.entry(chunk)));
    const caption = h("p", { className: "caption" }, "Chosen most, besides the beginning and the end");
    this.element = h("details", { className: "map", open },
      h("summary", {}, "What this answer read"),
      h("p", { className: "hint" }, `${count(data.n_chunk)} chunks of ${data.chunk_size} tokens from left to right, ` +
        `${data.n_layer} layers of ${data.n_head} heads from top to bottom. ` +
        "Color: for how many tokens of the answer a head read a chunk. Bars: how many heads read it."),
      this.frame, this.where, this.text,
      ...(this.list.children.length ? [caption, this.list] : []));
    this.listen();
    this.mark(this.mostRead()[0] ?? 0);
  }

  /** The chunks that heads chose most. */
  mostRead() {
    const chunks = chosen(this.data).filter((chunk) => this.sums[chunk] > 0);
    return chunks.sort((a, b) => this.sums[b] - this.sums[a]).slice(0, N_MOST_READ);
  }

  entry(chunk) {
    const label = `#${chunk} \u00b7 ${this.sums[chunk].toFixed(1)} heads`;
    const text = h("span", {}, this.data.texts[chunk]);
    return h("li", {}, h("button", { type: "button", onclick: () => this.mark(chunk) }, h("b", {}, label), text));
  }

  listen() {
    new ResizeObserver(() => this.draw()).observe(this.frame);
    addEventListener("theme", () => this.draw());
    this.frame.onpointermove = this.frame.onpointerdown = (event) => {
      const { left, top, width, height } = this.frame.getBoundingClientRect();
      const column = Math.floor(((event.clientX - left) / width) * this.columns);
      const row = Math.floor(((event.clientY - top - BARS - GAP) / (height - BARS - GAP)) * this.n_row);
      const chunk = this.busiest(Math.min(Math.max(column, 0), this.columns - 1));
      this.mark(chunk, row >= 0 && row < this.n_row ? row : null);
    };
    this.frame.onkeydown = (event) => {
      const last = this.data.n_chunk - 1;
      const to = { ArrowLeft: this.chunk - 1, ArrowRight: this.chunk + 1, Home: 0, End: last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.mark(Math.min(Math.max(to, 0), last));
    };
  }

  /** The chunks that share a column of pixels. */
  span(column) {
    const first = Math.floor((column * this.data.n_chunk) / this.columns);
    return [first, Math.max(Math.floor(((column + 1) * this.data.n_chunk) / this.columns), first + 1)];
  }

  busiest(column) {
    const [first, end] = this.span(column);
    let best = first;
    for (let chunk = first; chunk < end; chunk++) if (this.sums[chunk] > this.sums[best]) best = chunk;
    return best;
  }

  mark(chunk, row = null) {
    const { chunk_size, n_chunk, n_head, texts, counts } = this.data;
    this.chunk = chunk;
    const heads = `read by ${this.sums[chunk].toFixed(1)} of ${this.n_row} heads per token`;
    const head = row === null ? "" : `, by head ${row % n_head} of layer ${Math.floor(row / n_head)} ` +
      `for ${percent(counts[row][chunk] / this.n_query)} of the tokens`;
    const tokens = `tokens ${count(chunk * chunk_size)} to ${count((chunk + 1) * chunk_size - 1)}`;
    this.where.textContent = `Chunk ${chunk}, ${tokens}: ${heads}${head}`;
    this.text.textContent = texts[chunk];
    this.frame.ariaValueMin = 0;
    this.frame.ariaValueMax = n_chunk - 1;
    this.frame.ariaValueNow = chunk;
    this.frame.ariaValueText = `${this.where.textContent}. ${texts[chunk]}`;
    this.place();
  }

  place() {
    this.cursor.style.left = `${(100 * this.chunk) / this.data.n_chunk}%`;
    this.cursor.style.width = `max(2px, ${100 / this.data.n_chunk}%)`;
  }

  draw() {
    const width = Math.round(this.frame.clientWidth * devicePixelRatio);
    if (!width) return;
    const rows = Math.min(this.n_row, TALLEST);
    const tall = rows * Math.max(1, Math.min(10, Math.floor(TALLEST / rows)));
    this.columns = Math.min(this.data.n_chunk, width);
    const colors = ["--sunken", "--accent"].map((name) => rgb(getComputedStyle(this.frame).getPropertyValue(name)));
    this.canvas.width = width;
    this.canvas.height = (BARS + GAP + tall) * devicePixelRatio;
    this.canvas.style.height = `${BARS + GAP + tall}px`;
    const context = this.canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    const top = (BARS + GAP) * devicePixelRatio;
    context.drawImage(this.cells(rows, colors), 0, top, width, this.canvas.height - top);
    context.fillStyle = `rgb(${colors[1]})`;
    for (let column = 0; column < this.columns; column++) {
      const tallness = (this.sums[this.busiest(column)] / this.n_row) * BARS * devicePixelRatio;
      const x = Math.floor((column * width) / this.columns);
      const next = Math.floor(((column + 1) * width) / this.columns);
      context.fillRect(x, BARS * devicePixelRatio - tallness, Math.max(next - x - (next - x > 3 ? 1 : 0), 1), tallness);
    }
  }

  /** Paint a pixel per column and row: of all cells that share it, the one read most. */
  cells(rows, [low, high]) {
    const image = new ImageData(this.columns, rows);
    for (let column = 0; column < this.columns; column++) {
      const [first, end] = this.span(column);
      const most = new Float64Array(rows);
      this.data.counts.forEach((row, i) => {
        const at = Math.floor((i * rows) / this.n_row);
        for (let chunk = first; chunk < end; chunk++) most[at] = Math.max(most[at], row[chunk]);
      });
      most.forEach((n, row) => {
        const share = Math.sqrt(n / this.n_query);
        const color = low.map((from, i) => from + (high[i] - from) * share);
        image.data.set([...color, 255], 4 * (row * this.columns + column));
      });
    }
    const canvas = h("canvas", { width: this.columns, height: rows });
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }
}

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.trim().slice(at, at + 2), 16));
