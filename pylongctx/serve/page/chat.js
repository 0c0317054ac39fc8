// The messages of a conversation.

import { $, button, copy, count, h } from "./dom.js";
import { chunkMap } from "./map.js";
import { quotesView } from "./quotes.js";
import { render } from "./render.js";
import { remark, showProgress, statistics } from "./stats.js";
import { mapId, part } from "./store.js";

const views = new WeakMap(); // messages and what shows them
let act = {}; // what the buttons do: edit, again, resume, settings, turn; what a message has: versions, isLast, asked
let follows = true; // whether the end stays in sight when an answer grows
const growing = new ResizeObserver(() => { if (follows) toEnd(); });
$("log").addEventListener("scroll", () => { follows = isAtEnd(); });
$("log").addEventListener("toggle", () => { follows = false; }, true);

export const listen = (actions) => { act = actions; };

/** Show messages; those that are shown already stay where they are. */
export function show(messages, toTheEnd = false) {
  let at = $("log").firstElementChild;
  for (const message of messages) {
    const { element } = view(message);
    if (element === at) at = at.nextElementSibling;
    else $("log").insertBefore(element, at);
  }
  while (at) {
    const next = at.nextElementSibling;
    at.remove();
    at = next;
  }
  for (const message of messages) view(message).update();
  if (toTheEnd) toEnd();
}

function view(message) {
  if (!views.has(message)) {
    const made = message.role === "user" ? userView(message) : answerView(message);
    growing.observe(made.element);
    views.set(message, made);
  }
  return views.get(message);
}

/** Fold the maps, as when an answer begins. */
export function foldMaps() {
  for (const map of $("log").querySelectorAll(".map")) map.open = false;
}

/** Show what has come since, once a frame at most. */
export function update(message) {
  const shown = views.get(message);
  if (!shown || shown.due) return;
  shown.due = requestAnimationFrame(() => {
    shown.due = 0;
    shown.update();
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

/** Return arrows between the versions of a message, hidden while there is one. */
function versionsView(message) {
  const place = h("span");
  const turn = (step) => () => act.turn(message, step);
  const element = h("span", { className: "versions" }, button("\u2039", "Previous version", turn(-1)), place,
    button("\u203a", "Next version", turn(1)));
  const update = () => {
    const { at, n } = act.versions(message);
    element.hidden = n < 2;
    place.textContent = `${at + 1}/${n}`;
    element.firstElementChild.disabled = at === 0;
    element.lastElementChild.disabled = at === n - 1;
  };
  return { element, update };
}

function userView(message) {
  const versions = versionsView(message);
  const change = button("Edit", "Edit this message and send it again", () => edit());
  const buttons = h("footer", {}, versions.element, change, copyButton(message));
  const files = h("ul", { className: "files" }, ...(message.files ?? []).map((file) => fileChip(file)));
  const text = h("div", { className: "text" }, message.content);
  const element = h("article", { className: "user", "aria-label": "You" });
  const plain = () => element.replaceChildren(files, ...(message.content ? [text] : []), buttons);
  const edit = () => {
    const field = h("textarea", { value: message.content, rows: 3, "aria-label": "Edited message" });
    const send = async () => { if (await act.edit(message, field.value)) plain(); };
    field.onkeydown = (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
      if (event.key === "Escape") { event.stopPropagation(); plain(); }
    };
    const cancel = button("Cancel", "Cancel, and leave it as it was", plain);
    element.replaceChildren(files, field, h("footer", {}, button("Send", "Send the edited message", send), cancel));
    field.focus();
  };
  plain();
  return { element, update: versions.update };
}

function answerView(message) {
  const summary = h("summary");
  const thoughts = h("div", { className: "text" });
  const thought = h("details", { className: "thought" }, summary, thoughts);
  const text = h("div", { className: "text" });
  const wait = h("div", { className: "progress" }, h("progress", { "aria-label": "Reading of the prompt" }), h("span"));
  const trouble = h("div", { className: "trouble", role: "alert" });
  const stats = h("p", { className: "stats" });
  const versions = versionsView(message);
  const again = button("Again", "Answer again; this version stays", () => act.again(message));
  const resume = button("Continue", "Continue this answer", () => act.resume(message));
  const compress = button("Compress", "Compress the text up to this answer", () => act.compress(message));
  const buttons = h("footer", {}, versions.element, again, resume, copyButton(message), compress);
  const element = h("article", { className: "answer", "aria-label": "Answer" });
  const quotes = quotesView(message, () => act.asked(message));
  element.append(thought, text, wait, trouble, quotes.element, stats, buttons);
  const showThoughts = () => { if (thought.open) render(thoughts, message.reasoning); };
  thought.ontoggle = showThoughts;
  let map = null;
  const update = () => {
    element.classList.toggle("running", Boolean(message.running));
    thought.hidden = !message.reasoning;
    summary.textContent = message.running && !message.content ? "Thinking\u2026" : "Thoughts";
    showThoughts();
    render(text, message.content);
    wait.hidden = !message.running || Boolean(message.content || message.reasoning);
    if (!wait.hidden) showProgress(wait, message);
    showTrouble(trouble, message);
    stats.replaceChildren(...statistics(message));
    buttons.hidden = Boolean(message.running);
    resume.hidden = !(message.content && act.isLast(message) && (message.length || message.stopped || message.trouble));
    compress.hidden = !(act.isLast(message) && act.canCompress(message));
    versions.update();
    quotes.update();
    showMap();
  };
  const showMap = async () => {
    if (map || message.running || !(message.map || message.mapped)) return;
    map = "on its way";
    const data = message.map ?? (await part(mapId(message)))?.map;
    if (!data) return;
    follows = false; // the answer is to be read first
    element.append((map = chunkMap(data, Boolean(message.map))));
  };
  return { element, update };
}

function showTrouble(box, message) {
  const { text, key } = message.trouble ?? remark(message) ?? {};
  box.hidden = !text || Boolean(message.running);
  box.classList.toggle("remark", !message.trouble);
  if (box.hidden || box.firstChild?.textContent === text) return;
  const way = key ? [button("Settings", "Open the settings", () => act.settings())] : [];
  box.replaceChildren(h("p", {}, text), ...way);
}
