// The page of pylongctx serve: conversations, requests and settings, put together.

import * as chat from "./chat.js";
import * as composer from "./composer.js";
import * as store from "./store.js";
import { chosen, get, ServerError, stream } from "./api.js";
import { $, announce, button, count, h, notice } from "./dom.js";

let server = null; // what the server said about itself, with the model that was chosen
let models = []; // the names of all its models
let conversation = store.create();
let running = null; // the answer that is being written: {conversation, message, controller}
const opened = new Map(); // conversations by id: what is open stays one object

// ---- the server ----

async function askServer() {
  try {
    const { data } = await get("v1/models");
    const named = data.find(({ id }) => id === store.settings.model);
    const { id: model } = named ?? data.find(({ status }) => status?.value === "loaded") ?? data[0];
    [chosen.model, models] = [model, data.map(({ id }) => id)];
    showModels();
    const longctx = await get(`v1/longctx?model=${encodeURIComponent(model)}`);
    server = { ...longctx, model, parts: methodParts(longctx.method ?? "llama.cpp's own") };
    notice();
  } catch (error) {
    server = null;
    if (error.status === 401) notice(error.words, "Settings", openSettings);
    else notice(error.words, "Try again", askServer);
  }
  showServer();
  return server;
}

/** Return [name, choice, ...] of each part of a method such as "longheads,window=256+corm,window=128". */
const methodParts = (method) => method.split("+").map((part) => part.split(","));

function showServer() {
  showModels();
  $("method").hidden = !server;
  if (server) {
    $("method").firstElementChild.textContent = server.parts.map(([name]) => name).join(" + ");
    const rows = server.parts.flatMap(([, ...choices]) => choices).map((choice) => choice.split("="));
    const entry = ([name, value]) => [h("dt", {}, name), h("dd", {}, value)];
    $("method").lastElementChild.replaceChildren(...rows.flatMap(entry));
    const times = (server.n_ctx / server.n_ctx_train).toFixed(1).replace(".0", "");
    $("sizes").textContent = `context ${count(server.n_ctx)}, ${times} \u00d7 the trained ${count(server.n_ctx_train)}`;
  }
  showContext();
}

/** Show the model's name, or where there are several a choice. */
function showModels() {
  const several = models.length > 1;
  $("model").textContent = several ? "" : server?.model ?? "";
  $("models").hidden = !several;
  $("models").replaceChildren(...models.map((name) => h("option", { value: name }, name)));
  $("models").value = chosen.model;
}

$("models").onchange = () => {
  store.saveSettings({ model: $("models").value });
  server = null; // what is sent waits until the model is loaded
  askServer();
};

// ---- the conversation ----

function open(next) {
  conversation = next;
  opened.set(next.id, next);
  chat.show(conversation.messages, act);
  showSide(false);
  showContext();
  showList();
  $("text").focus();
}

function showContext() {
  const used = conversation.messages.findLast(({ stats }) => stats?.used)?.stats.used ?? 0;
  composer.setContext(used, server?.n_ctx ?? 0, server?.overflow === "evict_middle");
}

function showSide(shown) {
  $("menu").ariaExpanded = String(shown);
  document.body.classList.toggle("side-open", shown);
}

const recall = (id) => opened.get(id) ?? store.load(id);

function showList() {
  const entries = store.list().map(({ id, title }) => {
    const current = id === conversation.id ? { "aria-current": "true" } : {};
    const choose = () => { if (id !== conversation.id) open(recall(id)); };
    const go = h("button", { type: "button", onclick: choose, ...current }, title);
    return h("li", {}, go, button("\u00d7", `Delete ${title}`, () => discard(id, title), { className: "icon" }));
  });
  $("conversations").replaceChildren(...entries);
}

function discard(id, title) {
  if (running?.conversation.id === id) return notice("Stop the answer first.");
  const kept = recall(id);
  store.remove(id);
  if (id === conversation.id) open(store.create());
  else showList();
  notice(`Deleted \u201c${title}\u201d.`, "Undo", () => { store.save(kept); open(kept); });
}

function keep(kept) {
  const fits = store.save(kept);
  if (!fits) notice("This browser has no room for the files of this conversation: they are lost with the page.");
  showList();
}

// ---- answers ----

async function send() {
  if (running) return;
  const message = (server || (await askServer())) && (await composer.take());
  if (!message) return;
  conversation.messages.push(message);
  chat.append(message, act);
  await answer();
}

const act = {
  again: (message) => answerFrom(message, () => {}),
  edit: (message, content) => answerFrom(message, () => conversation.messages.push({ ...message, content })),
  settings: () => openSettings(),
};

/** Forget a message and what came after it, and answer again. */
async function answerFrom(message, change) {
  if (running) return notice("Stop the answer first.");
  if (!(server || (await askServer()))) return;
  conversation.messages.splice(conversation.messages.indexOf(message));
  change();
  chat.show(conversation.messages, act);
  await answer();
}

async function answer() {
  const { messages } = conversation;
  const lost = messages.flatMap(({ files = [] }) => files).find(({ text }) => text === null);
  if (lost) {
    return notice(`${lost.name} was too large to be kept in this browser. Start a new conversation with it.`);
  }
  const message = { role: "assistant", content: "", reasoning: "", stats: {}, running: true };
  const body = request(messages);
  const current = { conversation, message, controller: new AbortController() };
  messages.push(message);
  setRunning(current);
  notice();
  chat.append(message, act);
  keep(conversation);
  announce("Waiting for the answer.");
  try {
    for await (const chunk of stream(body, current.controller.signal)) {
      read(chunk, message);
      chat.update(message);
    }
    await addNumbers(message);
    announce("The answer is complete.");
  } catch (error) {
    if (error.name === "AbortError") message.stopped = true;
    else if (error instanceof ServerError) message.trouble = { text: error.words, key: error.status === 401 };
    else throw error;
  } finally {
    message.running = false;
    chat.update(message);
    setRunning(null);
    keep(current.conversation);
    showContext();
  }
}

function request(messages) {
  const body = { model: server.model, messages: [], stream: true, stream_options: { include_usage: true } };
  body.return_progress = true;
  body.longctx = { trace: server.parts.some(([name]) => name === "longheads") };
  for (const name of ["temperature", "top_p", "max_tokens"]) {
    if (store.settings[name] !== "") body[name] = Number(store.settings[name]);
  }
  if (store.settings.system) body.messages.push({ role: "system", content: store.settings.system });
  for (const { role, content, files = [], reasoning } of messages) {
    const text = [...files.map(fileText), content].filter(Boolean).join("\n\n");
    if (text) body.messages.push({ role, content: text, ...(reasoning ? { reasoning_content: reasoning } : {}) });
  }
  return body;
}

const fileText = ({ name, text }) => `${name}:\n\n${text}`;

function read({ id, prompt_progress: progress, choices, usage, timings }, message) {
  message.id = id;
  if (progress) message.progress = progress;
  if (choices?.length) {
    const [{ delta, finish_reason: reason }] = choices;
    message.reasoning += delta?.reasoning_content ?? "";
    message.content += delta?.content ?? "";
    if (reason === "length") message.length = true;
  }
  if (timings) Object.assign(message.stats, timings);
  if (usage) Object.assign(message.stats, { used: usage.total_tokens, n_ctx: server.n_ctx });
}

async function addNumbers(message) {
  const query = new URLSearchParams({ id: message.id, model: server.model });
  const { kv, chunk_map: map } = await get(`v1/longctx?${query}`);
  message.stats.kv = kv;
  if (map) message.map = map; // else another answer was traced since
}

function setRunning(current) {
  running = current;
  $("send").hidden = Boolean(current);
  $("stop").hidden = !current;
}

const stop = () => running?.controller.abort();

// ---- settings ----

function openSettings() {
  const form = $("settings").querySelector("form");
  for (const field of form.elements) if (field.name) field.value = store.settings[field.name];
  $("key-field").hidden = Boolean(server) && !store.settings.key;
  $("settings").showModal();
}

$("settings").onclose = () => {
  const key = store.settings.key;
  store.saveSettings(Object.fromEntries(new FormData($("settings").querySelector("form"))));
  if (!server || key !== store.settings.key) askServer();
};

// ---- begin ----

composer.listen(send);
$("open-settings").onclick = openSettings;
$("new").onclick = () => open(store.create());
$("menu").onclick = () => showSide($("menu").ariaExpanded === "false");
$("stop").onclick = stop;
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !$("settings").open) stop(); });
addEventListener("pagehide", () => {
  if (!running) return;
  running.message.stopped = true;
  store.save(running.conversation);
});
const [last] = store.list();
open(last ? store.load(last.id) : conversation);
askServer();
