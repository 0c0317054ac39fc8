// A subset of Markdown as elements: what models write. Everything else stays the text that it is.
// The time is linear in the text, whatever it is: no mark is searched for twice in the same place.

import { button, copy, h } from "./dom.js";

const DEEPEST = 12; // lists in lists, quotes in quotes; what is deeper is text
const LONGEST = 8; // backticks around code
const MARK = /`+|\*\*?|\[/g;
const TARGET = /\]\((https?:\/\/[^\s)[\]<>"]+)\)/y; // not over the next bracket, so that the time is linear
const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,3})[.)])\s+(.*)/;
const ROW = /^\s*\|.*\|\s*$/;

/** Show text in an element; blocks that have not changed since the last call stay as they are. */
export function render(element, text, depth = 0) {
  let old = element.firstElementChild; // by an index, every block would be counted again after every change
  for (const source of split(text)) {
    const next = old?.nextElementSibling;
    if (old?.source !== source) {
      const block = Object.assign(toBlock(source, depth), { source });
      if (old) old.replaceWith(block);
      else element.append(block);
    }
    old = next;
  }
  while (old) {
    const next = old.nextElementSibling;
    old.remove();
    old = next;
  }
}

/** Return the blocks of a text: fenced code whole, the rest cut at empty lines, headings apart. */
function split(text) {
  const blocks = [];
  let lines = [];
  let fence = null;
  const end = () => { if (lines.length) blocks.push(lines.join("\n")); lines = []; };
  for (const line of text.split("\n")) {
    if (fence) {
      lines.push(line);
      if (line.trim().startsWith(fence)) { fence = null; end(); }
    } else if (FENCE.test(line)) {
      end();
      fence = FENCE.exec(line)[1];
      lines.push(line);
    } else if (/^#{1,6} /.test(line)) {
      end();
      blocks.push(line);
    } else if (line.trim()) lines.push(line);
    else end();
  }
  end();
  return blocks;
}

function toBlock(source, depth) {
  const lines = source.split("\n");
  const heading = /^(#{1,6}) (.*)/.exec(source);
  if (FENCE.test(lines[0])) return code(lines);
  if (heading) return h(`h${Math.min(heading[1].length + 2, 6)}`, {}, inline(heading[2]));
  if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(source)) return h("hr");
  if (depth < DEEPEST && lines.every((line) => line.startsWith(">"))) {
    const quote = h("blockquote");
    render(quote, lines.map((line) => line.replace(/^> ?/, "")).join("\n"), depth + 1);
    return quote;
  }
  if (lines.length > 1 && lines.every((line) => ROW.test(line)) && /^[\s|:-]+$/.test(lines[1])) return table(lines);
  if (ITEM.test(lines[0])) return items(lines);
  const first = lines.findIndex((line) => ITEM.test(line));
  if (first > 0) return h("div", {}, h("p", {}, inline(lines.slice(0, first).join("\n"))), items(lines.slice(first)));
  return h("p", {}, inline(source));
}

function code(lines) {
  const closed = lines.length > 1 && FENCE.test(lines.at(-1));
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  const copying = button("copy", "Copy this code", () => copy(text));
  const language = FENCE.exec(lines[0])[2];
  const caption = h("figcaption", {}, language, copying);
  return h("figure", { className: "code" }, caption, h("pre", { tabIndex: 0 }, h("code", {}, text)));
}

function table(lines) {
  const cells = lines.map((line) => line.trim().slice(1, -1).split("|"));
  const row = (tag, texts) => h("tr", {}, all(texts.map((text) => h(tag, {}, inline(text.trim())))));
  const body = h("table", {}, row("th", cells[0]), all(cells.slice(2).map((texts) => row("td", texts))));
  return h("div", { className: "wide" }, body);
}

function items(lines, depth = 0) {
  const [, indent, number] = ITEM.exec(lines[0]);
  const result = number ? h("ol", { start: Number(number) }) : h("ul");
  for (let i = 0; i < lines.length;) {
    const text = [ITEM.exec(lines[i])?.[3] ?? lines[i]];
    const deeper = [];
    for (i++; i < lines.length; i++) {
      const next = ITEM.exec(lines[i]);
      if (next && next[1].length <= indent.length) break;
      if (depth < DEEPEST && (next || deeper.length)) deeper.push(lines[i]);
      else text.push(lines[i].trim());
    }
    result.append(h("li", {}, inline(text.join("\n")), ...(deeper.length ? [items(deeper, depth + 1)] : [])));
  }
  return result;
}

/** Return nodes as one: a call takes no number of arguments that a text may choose. */
function all(nodes) {
  const fragment = document.createDocumentFragment();
  for (const node of nodes) fragment.append(node);
  return fragment;
}

function inline(text) {
  const nodes = [];
  const find = finder(text);
  let shown = 0; // characters that are in the nodes
  MARK.lastIndex = 0;
  for (let mark; (mark = MARK.exec(text));) {
    const [start, here] = [mark.index, MARK.lastIndex];
    const found = find[mark[0][0]](start, mark[0].length);
    MARK.lastIndex = here;
    if (!found) continue;
    const [element, end] = found;
    nodes.push(text.slice(shown, start), element);
    MARK.lastIndex = shown = end;
  }
  nodes.push(text.slice(shown));
  return all(nodes);
}

/** Return functions that read what begins with a mark, [element, end], or null when nothing closes it. */
function finder(text) {
  const missing = new Set(); // closing marks that do not come any more
  let bracket = -1; // the last "]" that was found
  let dead = -1; // a "]" behind which there is no address
  const next = (mark, from) => {
    if (missing.has(mark)) return -1;
    const end = text.indexOf(mark, from);
    if (end < 0) missing.add(mark);
    return end;
  };
  return {
    "`": (start, n) => {
      const mark = text.slice(start, start + n);
      const end = n > LONGEST ? -1 : next(mark, start + n + 1);
      return end < 0 ? null : [h("code", {}, text.slice(start + n, end).trim()), end + n];
    },
    "*": (start, n) => {
      const end = n === 2 ? next("**", start + 3) : -1;
      if (end >= 0) return [h("strong", {}, inline(text.slice(start + 2, end))), end + 2];
      return emphasis(start);
    },
    "[": (start) => {
      if (bracket <= start) bracket = next("]", start + 1);
      if (bracket <= start + 1 || bracket === dead) return null;
      TARGET.lastIndex = bracket;
      const target = TARGET.exec(text);
      if (!target) dead = bracket;
      const props = target && { href: target[1], target: "_blank", rel: "noopener noreferrer" };
      return target && [h("a", props, text.slice(start + 1, bracket)), bracket + target[0].length];
    },
  };

  function emphasis(start) {
    if (missing.has("*") || !/\S/.test(text[start + 1] ?? " ")) return null;
    let end = text.indexOf("*", start + 2);
    while (end >= 0 && /\s/.test(text[end - 1])) end = text.indexOf("*", end + 1);
    if (end < 0) missing.add("*");
    return end < 0 ? null : [h("em", {}, inline(text.slice(start + 1, end))), end + 1];
  }
}
