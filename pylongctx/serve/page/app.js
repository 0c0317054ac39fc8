// The page of pylongctx serve: conversations, answers and settings, put together.

import * as answers from "./answers.js";
import * as chat from "./chat.js";
import * as composer from "./composer.js";
import * as compress from "./compress.js";
import * as side from "./side.js";
import * as store from "./store.js";
import { chosen, get } from "./api.js";
import { $, notice } from "./dom.js";
import { migrate } from "./migrate.js";
import { askServer, server } from "./server.js";
import { openSettings, settings } from "./settings.js";

const CURRENT = "pylongctx:current";
const NEW = "new"; // the draft of a conversation without messages
const EMPTY = { content: "", reasoning: "" }; // an answer at its beginning
let conversation = store.create();

// ---- the conversation ----

function open(next) {
  conversation = next;
  showDraft();
  chat.show(conversation.path, true);
  showSide(false);
  showState();
  $("text").focus();
  if (server.info) answers.rejoin(conversation);
}

/** Show what is written next, and let a reload open the same conversation. */
function showDraft() {
  const place = conversation.messages.size ? conversation.id : NEW;
  sessionStorage.setItem(CURRENT, place);
  composer.draftOf(place);
}

/** Show what depends on the answers that are being written. */
function showState() {
  const current = answers.of(conversation);
  $("send").hidden = Boolean(current);
  $("stop").hidden = !current;
  showContext();
  side.showList();
}

function showContext() {
  const path = conversation.path;
  const reading = path.at(-1)?.running && path.at(-1).progress?.processed;
  const used = reading || (path.findLast(({ stats }) => stats?.used)?.stats.used ?? 0);
  composer.setContext(used, server.info?.n_ctx ?? 0, server.info?.overflow === "evict_middle");
}

function showSide(shown) {
  $("menu").ariaExpanded = String(shown);
  document.body.classList.toggle("side-open", shown);
}

// ---- answers ----

/** Return whether an answer can follow some messages of the conversation; else say why not. */
async function isReady(before = conversation.path) {
  const reason = await answers.obstacle(conversation, before);
  if (reason) notice(reason);
  return !reason && Boolean(server.info || (await askServer()));
}

async function send() {
  const own = conversation;
  if (!(await isReady())) return;
  const message = await composer.take();
  if (!message) return;
  notice();
  ask(own, message);
}

const before = (message) => conversation.path.slice(0, conversation.path.indexOf(message));

/** Add a question after a message, and let the model answer. */
async function ask(own, question, parent = own.leaf) {
  own.add(question, parent);
  const written = answers.write(own, own.add({ role: "assistant", ...EMPTY }));
  chat.foldMaps();
  showDraft();
  refresh(own, true);
  await written;
}

const act = {
  settings: () => showSettings(),
  isLast: (message) => conversation.path.at(-1) === message,
  /** Return the question that a message answers, and all files before it. */
  asked: (message) => {
    const earlier = before(message).filter(({ role }) => role === "user");
    return { question: earlier.at(-1)?.content ?? "", files: earlier.flatMap(({ files = [] }) => files) };
  },
  versions: (message) => {
    const all = conversation.versions(message);
    return { at: all.indexOf(message), n: all.length };
  },
  turn: (message, step) => {
    const all = conversation.versions(message);
    conversation.choose(all[all.indexOf(message) + step]);
    refresh(conversation);
    answers.keep(conversation);
  },
  /** Ask another question; the former one and what followed it stay as a version. Returns whether it was sent. */
  edit: async (message, content) => {
    const { role, files = [], parent } = message;
    const isSent = await isReady([...before(message), message]);
    if (isSent) ask(conversation, { role, content, files }, parent);
    return isSent;
  },
  again: async (message) => {
    if (!(await isReady(before(message)))) return;
    const isEmpty = !message.content && !message.reasoning;
    if (isEmpty) conversation.choose(Object.assign(message, EMPTY, { stats: {} }));
    const answer = isEmpty ? message : conversation.add({ role: "assistant", ...EMPTY }, message.parent);
    const written = answers.write(conversation, answer);
    refresh(conversation, true);
    await written;
  },
  resume: async (message) => {
    if (await isReady()) await answers.write(conversation, message);
  },
  canCompress: compress.canCompress,
  compress: async (message) => {
    const own = conversation;
    if (await isReady()) compress.open(message, () => answers.keep(own, message));
  },
};

/** Show the messages of a conversation, if it is the one that is shown. */
function refresh(changed, toTheEnd = false) {
  if (changed === conversation) chat.show(conversation.path, toTheEnd);
  showState();
}

answers.listen((changed, message) => {
  const isGrowing = Boolean(message.running && (message.content || message.reasoning || message.progress));
  const begins = changed === conversation && $("stop").hidden; // also with text, when it goes on
  chat.update(message);
  if (!isGrowing || begins) refresh(changed);
  else if (changed === conversation) showContext();
});

// ---- the list ----

side.listen({
  isCurrent: (id) => id === conversation.id,
  isRunning: (id) => Boolean(answers.of({ id })),
  choose: async (id) => { if (id !== conversation.id) open(await store.open(id)); },
  renamed: async (renamed) => {
    await answers.keep(renamed);
    side.showList();
  },
  discard: async (id, title) => {
    if (answers.of({ id })) return notice("Stop the answer first.");
    const kept = await store.remove(id);
    if (id === conversation.id) open(store.create());
    else side.showList();
    notice(`Deleted \u201c${title}\u201d.`, "Undo", async () => {
      await store.restore(kept);
      open(await store.open(id));
    });
  },
});

store.listen(async (id, removed) => {
  if (id !== conversation.id) return side.showList();
  if (removed && !answers.of(conversation)) open(store.create());
  else refresh(conversation);
});

// ---- settings ----

function showSettings() {
  const { key } = settings;
  const props = () => get(`props?model=${encodeURIComponent(chosen.model)}`);
  openSettings({ props, asksKey: !server.info }, () => {
    if (!server.info || key !== settings.key) askServer();
  });
}

// ---- begin ----

async function begin() {
  const keeps = await store.begin();
  if (keeps) await migrate();
  const current = sessionStorage.getItem(CURRENT);
  const list = store.list();
  const last = list.find(({ id }) => id === current) ?? (current === NEW ? null : list[0]);
  open(last ? await store.open(last.id) : conversation);
  if (await askServer()) answers.rejoin(conversation);
  if (!keeps) notice("This browser keeps nothing for this page: conversations are lost with it.");
}

server.openSettings = showSettings;
server.changed = showContext;
chat.listen(act);
composer.listen(send);
$("open-settings").onclick = showSettings;
$("new").onclick = () => open(store.create());
$("menu").onclick = () => showSide($("menu").ariaExpanded === "false");
$("stop").onclick = () => answers.stop(conversation);
addEventListener("pageshow", ({ persisted }) => { if (persisted && server.info) answers.rejoin(conversation); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) answers.stop(conversation);
});
begin();
