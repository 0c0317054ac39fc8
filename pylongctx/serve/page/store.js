// What this browser keeps, for all tabs: each message is written by itself, so that no tab loses those of another.

import * as db from "./db.js";
import { Conversation, newId } from "./tree.js";

const TAB = "pylongctx:tab";
const SILENT = 5000; // ms after which a tab that was writing an answer has ended
const ALL = ["conversations", "messages", "parts"];

const entries = new Map(); // of all conversations
const opened = new Map(); // conversations that were read; an open one stays one object
const others = new BroadcastChannel("pylongctx");
export const tab = ownName();

function ownName() {
  const name = sessionStorage.getItem(TAB) ?? newId(); // a reload is the same tab
  sessionStorage.setItem(TAB, name);
  return name;
}

/** Read the list of conversations; false when this browser keeps nothing. */
export async function begin() {
  try {
    for (const entry of await db.all("conversations")) entries.set(entry.id, entry);
    return true;
  } catch {
    return false;
  }
}

/** Return the entries of the list, the conversation used last first. */
export const list = () => [...entries.values()].sort((a, b) => b.time - a.time);

export async function open(id) {
  if (!opened.has(id)) {
    const conversation = new Conversation(entries.get(id) ?? { id });
    opened.set(id, conversation);
    await refresh(conversation);
  }
  return opened.get(id);
}

export function create() {
  const conversation = new Conversation();
  opened.set(conversation.id, conversation);
  return conversation;
}

/** Read what other tabs have written. */
async function refresh(conversation) {
  const found = await db.of("messages", conversation.id).catch(() => []);
  for (const message of found) take(conversation, message);
  conversation.repair();
}

function take(conversation, message) {
  const own = conversation.messages.get(message.id);
  if (own?.running && own.tab === tab) return; // it is written here
  const isSilent = message.tab === tab || Date.now() - message.touched > SILENT;
  if (message.running && isSilent) Object.assign(message, { running: false, stopped: true, lost: true });
  else if (message.running) lookAgain(conversation.id);
  const files = message.files?.map((file) => own?.files.find(({ id }) => id === file.id) ?? file);
  conversation.messages.set(message.id, Object.assign(own ?? {}, message, files && { files }));
}

const waiting = new Map(); // conversations into which another tab writes, and the timers that look after it

function lookAgain(id) {
  clearTimeout(waiting.get(id));
  waiting.set(id, setTimeout(() => hear({ data: { id } }), SILENT + 1000));
}

// ---- writing ----

const FLEETING = ["progress", "map", "pieces", "lost"];
const lasting = (message) => ({
  ...Object.fromEntries(Object.entries(message).filter(([name]) => !FLEETING.includes(name))),
  ...(message.files ? { files: message.files.map(({ text, ...file }) => file) } : {}),
});

/** Keep a conversation and some of its messages; returns what did not fit: "", "files" or "all". */
export async function save(conversation, ...messages) {
  const parts = messages.flatMap(({ files = [] }) => files).filter(({ text, kept }) => text && !kept);
  const records = parts.map(({ id, text }) => ({ id, conversation: conversation.id, text }));
  entries.set(conversation.id, conversation.entry);
  try {
    await put(conversation, messages, records);
    for (const file of parts) file.kept = true;
    return "";
  } catch (error) {
    if (!parts.length || !db.isFull(error)) return "all";
  }
  return put(conversation, messages, []).then(() => "files", () => "all");
}

async function put(conversation, messages, parts) {
  await db.write(ALL, (conversations, kept, texts) => {
    const request = conversations.get(conversation.id);
    request.onsuccess = () => conversations.put(merged(request.result, conversation.entry));
    for (const message of messages) kept.put(lasting(message));
    for (const part of parts) texts.put(part);
  });
  others.postMessage({ id: conversation.id });
}

/** A name that another tab gave stays; the rest is that of the last writer. */
const merged = (old, entry) => (old?.named && !entry.named ? { ...entry, title: old.title, named: true } : entry);

/** Keep something large of a conversation by a name; it is left out where there is no room. */
export const keepPart = (conversation, part) =>
  db.write(["parts"], (store) => store.put({ ...part, conversation: conversation.id })).then(() => true, () => false);

/** Return the name of the part that is the chunk map of an answer. */
export const mapId = (message) => `${message.id}:map`;

export const part = (id) => db.one("parts", id).catch(() => null);

/** Return the text of a file, null when this browser could not keep it. */
export async function textOf(file) {
  file.text ??= (await part(file.id))?.text ?? null;
  return file.text;
}

/** Forget a conversation; returns all that brings it back. */
export async function remove(id) {
  const kept = await whole(id);
  entries.delete(id);
  opened.delete(id);
  await db.write(ALL, (conversations, ...stores) => {
    conversations.delete(id);
    for (const store of stores) {
      const request = store.index("conversation").getAllKeys(id);
      request.onsuccess = () => { for (const key of request.result) store.delete(key); };
    }
  }).catch(() => {});
  others.postMessage({ id, removed: true });
  return kept;
}

/** Return a conversation as records: its entry, its messages and its parts. */
export async function whole(id) {
  const { entry, messages } = await open(id);
  const parts = await db.of("parts", id).catch(() => []);
  const known = new Set(parts.map((one) => one.id));
  const files = [...messages.values()].flatMap(({ files: found = [] }) => found);
  const missing = files.filter((file) => file.text && !known.has(file.id));
  parts.push(...missing.map((file) => ({ id: file.id, conversation: id, text: file.text })));
  return { entry, messages: [...messages.values()].map(lasting), parts };
}

/** Add a conversation from its records; false when there is no room. */
export async function restore({ entry, messages, parts }) {
  try {
    await db.write(ALL, (conversations, kept, texts) => {
      conversations.put(entry);
      for (const message of messages) kept.put(message);
      for (const one of parts) texts.put(one);
    });
  } catch {
    return false;
  }
  entries.set(entry.id, entry);
  opened.delete(entry.id);
  others.postMessage({ id: entry.id });
  return true;
}

/** Return the ids of the conversations whose title or messages have a text. */
export async function search(text) {
  const wanted = text.toLocaleLowerCase();
  const has = (one) => Boolean(one?.toLocaleLowerCase().includes(wanted));
  const titles = list().filter(({ title }) => has(title)).map(({ id }) => id);
  const messages = await db.all("messages").catch(() => []);
  const inside = messages.filter(({ content, files = [] }) => has(content) || files.some(({ name }) => has(name)));
  return new Set([...titles, ...inside.map(({ conversation }) => conversation)]);
}

// ---- other tabs ----

let changed = () => {};

/** Call a function with the id of each conversation that another tab has changed. */
export const listen = (callback) => { changed = callback; };

async function hear({ data: { id, removed = false } }) {
  const conversation = opened.get(id);
  if (removed && isWriting(conversation)) {
    await save(conversation, ...conversation.messages.values()); // an answer is being written into it
  } else if (removed) {
    entries.delete(id);
    opened.delete(id);
  } else {
    const entry = await db.one("conversations", id).catch(() => null);
    if (entry) entries.set(id, entry);
    if (entry?.named && conversation) Object.assign(conversation, { title: entry.title, named: true });
    if (conversation) await follow(conversation, entry);
  }
  changed(id, removed);
}

const isWriting = (conversation) =>
  Boolean(conversation) && [...conversation.messages.values()].some((one) => one.running && one.tab === tab);

/** Show what another tab has added after the end that is shown here. */
async function follow(conversation, entry) {
  const { leaf } = conversation;
  await refresh(conversation);
  const end = conversation.messages.get(entry?.leaf);
  if (!end || isWriting(conversation)) return;
  conversation.leaf = end.id;
  const isLater = leaf === null || conversation.path.some(({ id }) => id === leaf);
  if (isLater) conversation.time = Math.max(conversation.time, entry.time);
  else conversation.leaf = leaf;
}

others.onmessage = hear;
