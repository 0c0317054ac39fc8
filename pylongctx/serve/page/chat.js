// The messages of a conversation.

import { chunkMap } from "./map.js";
import { $, button, bytes, copy, count, h, rate, seconds } from "./dom.js";
import { render } from "./markdown.js";

const views = new Map();

/** Show the messages; `act` has what their buttons do: edit, again, settings. */
export function show(messages, act) {
  views.clear();
  $("log").replaceChildren(...messages.map((message) => add(message, act)));
  toEnd(true);
}

function add(message, act) {
  const view = message.role === "user" ? userView(message, act) : answerView(message, act);
  views.set(message, view);
  view.update?.();
  view.addMap?.();
  return view.element;
}

export function append(message, act) {
  for (const map of $("log").querySelectorAll(".map")) map.open = false;
  $("log").append(add(message, act));
  toEnd(true);
}

/** Show what has come since, once a frame at most. */
export function update(message) {
  const view = views.get(message);
  if (!view || view.due) return;
  view.due = requestAnimationFrame(() => {
    view.due = 0;
    const follows = isAtEnd();
    view.update();
    toEnd(follows);
    view.addMap?.();
  });
}

const isAtEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 40;

function toEnd(follows) {
  if (follows) $("log").scrollTop = $("log").scrollHeight;
}

export const fileChip = (file, ...more) => h("li", { className: "chip" }, h("b", {}, file.name),
  ` ${count(file.length)} characters`, file.tokens === undefined ? "" : `, ${count(file.tokens)} tokens`, ...more);

const copyButton = (message) => button("Copy", "Copy this message", () => copy(message.content));

function userView(message, act) {
  const buttons = h("footer", {}, button("Edit", "Edit this message and send it again", () => edit()), copyButton(message));
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
    const choices = h("footer", {}, button("Send", "Send the edited message", send), button("Cancel", "Leave it as it was", plain));
    element.replaceChildren(files, field, choices);
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
  const buttons = h("footer", {}, button("Again", "Answer again", () => act.again(message)), copyButton(message));
  const element = h("article", { className: "answer", "aria-label": "Answer" }, thought, text, wait, trouble, stats, buttons);
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
    if (message.map && !map) element.append((map = chunkMap(message.map)));
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

function statistics({ running, stopped, length, stats }) {
  const parts = [];
  const part = (title, ...words) => parts.push(h("span", { title }, ...words));
  if (stopped && !running) part("By you", "stopped");
  if (length) part("The longest answer of the settings, or the end of the context", "cut at the limit");
  if (stats?.prompt_n) part("Tokens of the prompt that were read now", `prompt ${count(stats.prompt_n)} at ${rate(stats.prompt_per_second)}`);
  if (stats?.cache_n) part("Tokens that were still known from before", `${count(stats.cache_n)} cached`);
  if (stats?.predicted_n) part("Tokens of the answer", `answer ${count(stats.predicted_n)} at ${rate(stats.predicted_per_second)}`);
  if (stats?.used) part("Tokens of this conversation, and how many fit", `context ${count(stats.used)} / ${count(stats.n_ctx)}`);
  if (stats?.kv) part("Memory of keys and values, and what full attention needs", `KV ${bytes(stats.kv.bytes)}, full ${bytes(stats.kv.full_bytes)}`);
  return parts;
}
