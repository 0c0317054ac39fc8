// The messages of a conversation.

import { chunkMap } from "./map.js";
import { $, button, bytes, copy, count, h, rate, seconds } from "./dom.js";
import { render } from "./render.js";

const views = new Map();
let follows = true; // whether the end stays in sight when an answer grows
const growing = new ResizeObserver(() => { if (follows) toEnd(); });
$("log").addEventListener("scroll", () => { follows = isAtEnd(); });
$("log").addEventListener("toggle", () => { follows = false; }, true);

/** Show the messages; `act` has what their buttons do: edit, again, settings. */
export function show(messages, act) {
  views.clear();
  $("log").replaceChildren(...messages.map((message) => add(message, act)));
  foldMaps(-1);
  toEnd();
}

/** Fold the maps up to the n-th, all without one. */
function foldMaps(n) {
  for (const map of [...$("log").querySelectorAll(".map")].slice(0, n)) map.open = false;
}

function add(message, act) {
  const view = message.role === "user" ? userView(message, act) : answerView(message, act);
  views.set(message, view);
  growing.observe(view.element);
  view.update?.();
  view.addMap?.();
  return view.element;
}

export function append(message, act) {
  foldMaps();
  $("log").append(add(message, act));
  toEnd();
}

/** Show what has come since, once a frame at most. */
export function update(message) {
  const view = views.get(message);
  if (!view || view.due) return;
  view.due = requestAnimationFrame(() => {
    view.due = 0;
    view.update();
    view.addMap?.();
  });
}

const isAtEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 40;

function toEnd() {
  $("log").scrollTop = $("log").scrollHeight;
  follows = true;
}

export const fileChip = (file, ...more) => h("li", { className: "chip" }, h("b", {}, file.name),
  ` ${count(file.length)} characters`, file.tokens === undefined ? "" : `, ${count(file.tokens)} tokens`, ...more);

const copyButton = (message) => button("Copy", "Copy this message", () => copy(message.content));

function userView(message, act) {
  const change = button("Edit", "Edit this message and send it again", () => edit());
  const buttons = h("footer", {}, change, copyButton(message));
  const files = h("ul", { className: "files" }, ...message.files.map((file) => fileChip(file)));
  const text = h("div", { className: "text" }, message.content);
  const element = h("article", { className: "user", "aria-label": "You" });
  const plain = () => element.replaceChildren(files, ...(message.content ? [text] : []), buttons);
  const edit = () => {
    const field = h("textarea", { value: message.content, rows: 3, "aria-label": "Edited message" });
    const send = () => act.edit(message, field.value);
    field.onkeydown = (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
      if (event.key === "Escape") { event.stopPropagation(); plain(); }
    };
    const cancel = button("Cancel", "Leave it as it was", plain);
    element.replaceChildren(files, field, h("footer", {}, button("Send", "Send the edited message", send), cancel));
    field.focus();
  };
  plain();
  return { element };
}

function answerView(message, act) {
  const summary = h("summary");
  const thoughts = h("div", { className: "text" });
  const thought = h("details", { className: "thought" }, summary, thoughts);
  const text = h("div", { className: "text" });
  const progress = h("progress", { "aria-label": "Reading of the prompt" });
  const reading = h("span");
  const wait = h("div", { className: "progress" }, progress, reading);
  const trouble = h("div", { className: "trouble", role: "alert" });
  const stats = h("p", { className: "stats" });
  const again = button("Again", "Answer again", () => act.again(message));
  const buttons = h("footer", {}, again, copyButton(message));
  const element = h("article", { className: "answer", "aria-label": "Answer" });
  element.append(thought, text, wait, trouble, stats, buttons);
  let map = null;
  const update = () => {
    element.classList.toggle("running", Boolean(message.running));
    thought.hidden = !message.reasoning;
    summary.textContent = message.running && !message.content ? "Thinking\u2026" : "Thoughts";
    if (message.reasoning) render(thoughts, message.reasoning);
    render(text, message.content);
    wait.hidden = !message.running || Boolean(message.content || message.reasoning);
    if (!wait.hidden) showProgress(progress, reading, message.progress);
    showTrouble(trouble, message, act);
    stats.replaceChildren(...statistics(message));
    buttons.hidden = Boolean(message.running);
  };
  const addMap = () => {
    if (!message.map || map) return;
    follows = false; // the answer is to be read first
    element.append((map = chunkMap(message.map)));
  };
  return { element, update, addMap };
}

function showProgress(bar, label, { total, cache = 0, processed = 0, time_ms = 0 } = {}) {
  if (!total) {
    bar.removeAttribute("value");
    label.textContent = "Waiting for the server";
    return;
  }
  bar.max = total;
  bar.value = processed;
  const done = processed - cache;
  const speed = done > 0 && time_ms > 0 ? (1000 * done) / time_ms : 0;
  const pace = speed ? ` \u00b7 ${rate(speed)} \u00b7 ${seconds((total - processed) / speed)} left` : "";
  label.textContent = `Reading ${count(processed)} of ${count(total)} tokens${pace}`;
}

function showTrouble(box, { trouble, running }, act) {
  box.hidden = !trouble || Boolean(running);
  if (box.hidden || box.firstChild?.textContent === trouble.text) return;
  const way = trouble.key ? [button("Settings", "Open the settings", act.settings)] : [];
  box.replaceChildren(h("p", {}, trouble.text), ...way);
}

function statistics({ running, stopped, length, stats = {} }) {
  const { prompt_n: read, cache_n: cached, predicted_n: written, used, n_ctx, kv } = stats;
  const pace = (name, n, speed) => `${name} ${count(n)} at ${rate(speed)}`;
  const parts = [
    [stopped && !running, () => "stopped", "By you"],
    [length, () => "cut at the limit", "The longest answer of the settings, or the end of the context"],
    [read, () => pace("prompt", read, stats.prompt_per_second), "Tokens of the prompt that were read now"],
    [cached, () => `${count(cached)} cached`, "Tokens that were still known from before"],
    [written, () => pace("answer", written, stats.predicted_per_second), "Tokens of the answer"],
    [used, () => `context ${count(used)} / ${count(n_ctx)}`, "Tokens of this conversation, and how many fit"],
    [kv, () => `KV ${bytes(kv.bytes)}, full ${bytes(kv.full_bytes)}`, "Memory of keys and values, and with full attention"],
  ];
  return parts.filter(([known]) => known).map(([, words, title]) => h("span", { title }, words()));
}
