// A subset of Markdown as elements: what models write. Everything else stays the text that it is.

import { button, copy, h } from "./dom.js";

const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|\*(\S(?:.*?\S)??)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/s;
const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,3})[.)])\s+(.*)/;
const ROW = /^\s*\|.*\|\s*$/;

/** Show text in an element; blocks that have not changed since the last call stay as they are. */
export function render(element, text) {
  const sources = split(text);
  sources.forEach((source, i) => {
    const old = element.children[i];
    if (old?.source === source) return;
    const block = Object.assign(toBlock(source), { source });
    if (old) old.replaceWith(block);
    else element.append(block);
  });
  while (element.children.length > sources.length) element.lastChild.remove();
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

function toBlock(source) {
  const lines = source.split("\n");
  const heading = /^(#{1,6}) (.*)/.exec(source);
  if (FENCE.test(lines[0])) return code(lines);
  if (heading) return h(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(heading[2]));
  if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(source)) return h("hr");
  if (lines.every((line) => line.startsWith(">"))) {
    const quote = h("blockquote");
    render(quote, lines.map((line) => line.replace(/^> ?/, "")).join("\n"));
    return quote;
  }
  if (lines.length > 1 && lines.every((line) => ROW.test(line)) && /^[\s|:-]+$/.test(lines[1])) return table(lines);
  if (ITEM.test(lines[0])) return items(lines);
  const first = lines.findIndex((line) => ITEM.test(line));
  if (first > 0) return h("div", {}, h("p", {}, ...inline(lines.slice(0, first).join("\n"))), items(lines.slice(first)));
  return h("p", {}, ...inline(source));
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
  const row = (tag, texts) => h("tr", {}, ...texts.map((text) => h(tag, {}, ...inline(text.trim()))));
  const body = h("table", {}, row("th", cells[0]), ...cells.slice(2).map((texts) => row("td", texts)));
  return h("div", { className: "wide" }, body);
}

function items(lines) {
  const [, indent, number] = ITEM.exec(lines[0]);
  const result = number ? h("ol", { start: Number(number) }) : h("ul");
  for (let i = 0; i < lines.length;) {
    const text = [ITEM.exec(lines[i])?.[3] ?? lines[i]];
    const deeper = [];
    for (i++; i < lines.length; i++) {
      const next = ITEM.exec(lines[i]);
      if (next && next[1].length <= indent.length) break;
      if (next || deeper.length) deeper.push(lines[i]);
      else text.push(lines[i].trim());
    }
    result.append(h("li", {}, ...inline(text.join("\n")), ...(deeper.length ? [items(deeper)] : [])));
  }
  return result;
}

function inline(text) {
  const nodes = [];
  for (let found; (found = INLINE.exec(text)); text = text.slice(found.index + found[0].length)) {
    const [, , verbatim, strong, emphasis, label, href] = found;
    nodes.push(
      text.slice(0, found.index),
      verbatim ? h("code", {}, verbatim.trim())
      : strong ? h("strong", {}, ...inline(strong))
      : emphasis ? h("em", {}, ...inline(emphasis))
      : h("a", { href, target: "_blank", rel: "noopener noreferrer" }, label),
    );
  }
  return [...nodes, text];
}
