// What is written next: the text, the files, and whether they fit into the context.

import { countTokens } from "./api.js";
import { fileChip } from "./chat.js";
import { $, button, bytes, count, h, notice } from "./dom.js";
import { newId } from "./tree.js";

const LONG_PASTE = 5000; // characters; more than that becomes a file
const LONGEST_TOKEN = 64; // bytes; no text has tokens that are longer on average
const PAUSE = 300; // ms without a key before the text is counted

const field = $("text");
const counting = new Set();
const context = { used: 0, n_ctx: 0, evicts: false };
const DRAFTS = "pylongctx:drafts";
let files = [];
let typed = 0; // tokens of the text in the field
let timer = 0;
let place = ""; // the conversation whose message is being written
const waiting = new Map(); // files of other conversations' drafts

/** Tell how much of the context the conversation takes already, and whether its turns leave for new ones. */
export function setContext(used, n_ctx, evicts) {
  Object.assign(context, { used, n_ctx, evicts });
  showRoom();
}

/** Show the draft of a conversation, and keep that of the one before. */
export function draftOf(id) {
  if (place === id) return;
  keepDraft();
  waiting.set(place, files);
  place = id;
  files = waiting.get(id) ?? [];
  field.value = drafts()[id] ?? "";
  typed = 0;
  showFiles();
  changed();
}

function drafts() {
  try {
    return JSON.parse(localStorage.getItem(DRAFTS)) ?? {};
  } catch {
    return {};
  }
}

function keepDraft() {
  const { [place]: old, ...rest } = drafts();
  if ((old ?? "") === field.value) return;
  try {
    localStorage.setItem(DRAFTS, JSON.stringify(field.value ? { ...rest, [place]: field.value } : rest));
  } catch { /* it lasts as long as the page */ }
}

addEventListener("pagehide", keepDraft);

/** Return what is to be sent and forget it; null when there is nothing or it does not fit. */
export async function take() {
  await Promise.all(counting);
  const content = field.value;
  if (!(content.trim() || files.length) || !fits()) return null;
  const taken = { role: "user", content, files };
  files = [];
  field.value = "";
  changed();
  keepDraft();
  showFiles();
  return taken;
}

export async function addFile(file) {
  if (context.n_ctx && file.size > context.n_ctx * LONGEST_TOKEN) {
    const most = `far more than the ${count(context.n_ctx)} tokens of the context can hold`;
    notice(`${file.name} has ${bytes(file.size)}: ${most}. Add a part of it.`);
    return;
  }
  const text = decode(await file.arrayBuffer());
  if (text === null) notice(`${file.name} is not a text file. Save it as plain text, then add it.`);
  else if (!text.trim()) notice(`${file.name} is empty.`);
  else await addText(file.name, text);
}

function decode(buffer) {
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(buffer);
  } catch {
    text = new TextDecoder("windows-1252").decode(buffer);
  }
  return text.includes("\0") ? null : text;
}

async function addText(name, text) {
  const file = { id: newId(), name, text, length: text.length };
  files.push(file);
  showFiles();
  try {
    file.tokens = await tracked(countTokens(text));
  } catch (error) {
    files = files.filter((other) => other !== file);
    notice(error.words);
  }
  showFiles();
  field.focus();
}

function tracked(promise) {
  const settled = promise.catch(() => {}).finally(() => counting.delete(settled));
  counting.add(settled);
  return promise;
}

function showFiles() {
  const drop = (file) => () => { files = files.filter((other) => other !== file); showFiles(); };
  const chip = (file) => fileChip(file, button("\u00d7", `Remove ${file.name}`, drop(file), { className: "icon" }));
  $("files").replaceChildren(...files.map(chip));
  showRoom();
}

const added = () => files.reduce((sum, { tokens = 0 }) => sum + tokens, typed);

const fits = () => !context.n_ctx || (context.evicts ? 0 : context.used) + added() < context.n_ctx;

function showRoom() {
  const { used, n_ctx } = context;
  const total = used + added();
  const gauge = $("gauge");
  gauge.hidden = !n_ctx;
  gauge.classList.toggle("over", !fits());
  $("used").ariaValueMax = n_ctx;
  $("used").ariaValueNow = total;
  [used, added()].forEach((n, i) => { $("used").children[i].style.width = `${Math.min((100 * n) / n_ctx, 100)}%`; });
  $("room").textContent = roomWords(used, total, n_ctx);
  $("send").disabled = !fits();
}

function roomWords(used, total, n_ctx) {
  if (!fits()) {
    const way = used ? "Start a new conversation, shorten this one" : "Send less";
    const enough = 1024 * Math.ceil((total + 512) / 1024);
    const sizes = `${count(total)} tokens, the context has ${count(n_ctx)}`;
    const forgets = used ? ", or with --overflow evict_middle, which forgets the middle" : "";
    return `Does not fit: ${sizes}. ${way}, or start the server with --ctx-size ${enough}${forgets}.`;
  }
  if (files.some(({ tokens }) => tokens === undefined)) return "Counting tokens\u2026";
  const parts = used && total > used ? `${count(used)} + ${count(total - used)}` : count(total);
  return `${parts} of ${count(n_ctx)} tokens`;
}

function grow() {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

function changed() {
  grow();
  clearTimeout(timer);
  if (!field.value) typed = 0;
  timer = setTimeout(() => { keepDraft(); if (field.value) countTyped(); }, PAUSE);
  showRoom();
}

async function countTyped() {
  const text = field.value;
  const tokens = await tracked(countTokens(text)).catch(() => 0);
  if (text !== field.value) return;
  typed = tokens;
  showRoom();
}

/** Listen to keys, pastes, drops and the file chooser; `send` is called to send. */
export function listen(send) {
  field.oninput = changed;
  field.onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  field.onpaste = (event) => {
    const text = event.clipboardData.getData("text/plain");
    if (text.length < LONG_PASTE) return;
    event.preventDefault();
    addText("pasted text", text);
  };
  $("composer").onsubmit = (event) => { event.preventDefault(); send(); };
  $("attach").onclick = () => $("file").click();
  $("file").onchange = () => { addAll($("file").files); $("file").value = ""; };
  document.ondragover = (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    $("drop").hidden = false;
  };
  document.ondragleave = (event) => { if (!event.relatedTarget) $("drop").hidden = true; };
  document.ondrop = (event) => {
    $("drop").hidden = true;
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    addAll(event.dataTransfer.files);
  };
}

const addAll = (list) => { notice(); for (const file of list) addFile(file); };
