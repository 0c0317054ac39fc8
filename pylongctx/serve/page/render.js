// Markdown, formulas and code of answers: the server makes the HTML, and this shows the blocks that changed.

import { post } from "./api.js";
import { button, copy, h } from "./dom.js";

const PAUSE = 80; // ms between two requests, at least; as long as the last one took, if that was longer
const REMEMBERED = 200; // texts
const pending = new Map(); // elements and the texts that they wait for
const known = new Map(); // texts and their blocks
let working = false;

/** Show a text in an element, which is busy until then. */
export function render(element, text) {
  if (element.wanted === text) return;
  element.wanted = text;
  const blocks = known.get(text);
  if (blocks) {
    pending.delete(element);
    element.ariaBusy = null;
    show(element, blocks);
    return;
  }
  if (!element.hasChildNodes()) showPlain(element, text);
  element.ariaBusy = "true";
  pending.set(element, text);
  work();
}

/** Ask for one text after the other, those that were wanted last first. */
async function work() {
  if (working) return;
  working = true;
  try {
    while (pending.size) await next();
  } finally {
    working = false;
  }
}

async function next() {
  const [element, text] = [...pending].at(-1);
  const began = performance.now();
  const blocks = await ask(text);
  if (!pending.has(element)) return; // a later text was known and is shown
  const isLast = pending.get(element) === text;
  if (isLast) pending.delete(element);
  if (blocks) show(element, blocks);
  else if (isLast) showPlain(element, text);
  if (isLast) element.ariaBusy = null;
  else await new Promise((resume) => { setTimeout(resume, Math.max(PAUSE, performance.now() - began)); });
}

async function ask(text) {
  try {
    const { blocks } = await post("render", { text });
    known.set(text, blocks);
    if (known.size > REMEMBERED) known.delete(known.keys().next().value);
    return blocks;
  } catch {
    return null; // the text is shown as it is
  }
}

function show(element, blocks) {
  if (element.firstElementChild?.source === undefined) element.replaceChildren();
  let old = element.firstElementChild;
  for (const source of blocks) {
    const next = old?.nextElementSibling;
    if (old?.source !== source) {
      const block = toElement(source);
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

const showPlain = (element, text) => element.replaceChildren(...(text ? [h("p", { className: "plain" }, text)] : []));

function toElement(source) {
  const template = document.createElement("template");
  template.innerHTML = source;
  const element = template.content.firstElementChild;
  element.source = source;
  for (const figure of template.content.querySelectorAll("figure.code")) {
    const code = figure.querySelector("code");
    figure.firstElementChild.append(button("Copy", "Copy this code", () => copy(code.textContent)));
  }
  return element;
}
