// Conversations as files: JSON, which can be imported again, and Markdown.

import * as store from "./store.js";
import { bytes, h } from "./dom.js";

const FORMAT = "pylongctx-conversations";
const VERSION = 1;
const MOST = 512 << 20; // bytes of a file
const NO_ROOM = "this browser has no room for more";
const ROLES = ["user", "assistant"];

export async function exportOne(id, kind) {
  const { entry, ...records } = await store.whole(id);
  const text = kind === "md" ? await asMarkdown(id) : asJson([{ ...entry, ...records }]);
  download(`${fileName(entry.title)}.${kind}`, text, kind === "md" ? "text/markdown" : "application/json");
}

export async function exportAll() {
  const found = [];
  for (const { id } of store.list()) {
    const { entry, ...records } = await store.whole(id);
    found.push({ ...entry, ...records });
  }
  download("conversations.json", asJson(found), "application/json");
}

const asJson = (conversations) => JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);

/** Return the branch that is shown as Markdown. */
async function asMarkdown(id) {
  const { entry, path } = await store.open(id);
  const lines = [`# ${entry.title}`];
  for (const { role, content, files = [] } of path) {
    lines.push(`## ${role === "user" ? "You" : "Answer"}`);
    for (const file of files) lines.push(`*${file.name}, ${file.length} characters*`);
    if (content) lines.push(content);
  }
  return `${lines.join("\n\n")}\n`;
}

const fileName = (title) => title.match(/[\p{L}\p{N}]+/gu)?.join("-").slice(0, 60) ?? "conversation";

function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = h("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

// ---- import ----

/** Add the conversations of a file; returns what happened in words. */
export async function importFile(file) {
  const most = bytes(MOST);
  if (file.size > MOST) return `${file.name} has ${bytes(file.size)}, more than the ${most} that can be imported.`;
  let records;
  try {
    records = check(JSON.parse(await file.text()));
  } catch (error) {
    return `${file.name} cannot be imported: ${error instanceof SyntaxError ? "it is not JSON" : error.message}.`;
  }
  let n = 0;
  for (const one of records) {
    if (!(await store.restore(one))) return `${n} of ${records.length} conversations were imported: ${NO_ROOM}.`;
    n++;
  }
  return `${n} ${n === 1 ? "conversation was" : "conversations were"} imported.`;
}

/** Return the records of all conversations; an Error says what is wrong. */
function check(data) {
  if (data?.format !== FORMAT) throw new Error(`it is not an export of this page (format ${FORMAT})`);
  const { version, conversations } = data;
  if (version !== VERSION) throw new Error(`it has version ${version}, and this page reads version ${VERSION}`);
  if (!Array.isArray(conversations)) throw new Error("it has no list of conversations");
  return conversations.map(conversation);
}

function conversation(one, i) {
  const place = `conversation ${i + 1}`;
  const id = text(one?.id, `${place}: id`);
  const messages = list(one.messages, `${place}: messages`)
    .map((each, n) => message(each, id, `${place}, message ${n + 1}`));
  const known = new Set(messages.map((each) => each.id));
  const stray = messages.find(({ parent }) => parent !== null && !known.has(parent));
  if (stray) throw new Error(`${place}: a message follows ${stray.parent}, which is not there`);
  if (isCyclic(messages)) throw new Error(`${place}: messages follow each other in a circle`);
  const leaf = known.has(one.leaf) ? one.leaf : messages.at(-1)?.id ?? null;
  const [title, time] = [text(one.title, `${place}: title`), number(one.time, `${place}: time`)];
  const parts = list(one.parts ?? [], `${place}: parts`).map((part) => {
    const kept = { id: text(part?.id, `${place}: id of a part`), conversation: id };
    return typeof part.text === "string" ? { ...kept, text: part.text } : { ...kept, map: part.map };
  });
  return { entry: { id, title, named: one.named === true, time, leaf }, messages, parts };
}

function message(one, id, place) {
  if (!ROLES.includes(one?.role)) throw new Error(`${place}: role is user or assistant`);
  const flags = ["length", "stopped", "loop", "mapped"].map((name) => [name, one[name] === true]);
  return {
    id: text(one.id, `${place}: id`),
    conversation: id,
    parent: one.parent === null ? null : text(one.parent, `${place}: parent`),
    role: one.role,
    time: number(one.time, `${place}: time`),
    content: text(one.content, `${place}: content`, true),
    reasoning: text(one.reasoning ?? "", `${place}: reasoning`, true),
    files: list(one.files ?? [], `${place}: files`).map((file) => ({
      id: text(file?.id, `${place}: id of a file`),
      name: text(file.name, `${place}: name of a file`),
      length: number(file.length, `${place}: length of a file`),
      tokens: number(file.tokens ?? 0, `${place}: tokens of a file`),
      kept: true,
    })),
    stats: numbers(one.stats),
    ...Object.fromEntries(flags),
  };
}

/** Return the statistics of an answer, without those that are not numbers. */
function numbers(stats) {
  const all = Object.entries(stats ?? {}).filter(([, value]) => Number.isFinite(value));
  const { bytes: own, full_bytes } = stats?.kv ?? {};
  const kv = Number.isFinite(own) && Number.isFinite(full_bytes) ? { kv: { bytes: own, full_bytes } } : {};
  return { ...Object.fromEntries(all), ...kv };
}

function isCyclic(messages) {
  const parents = new Map(messages.map(({ id, parent }) => [id, parent]));
  const ended = new Set([null]);
  for (const { id } of messages) {
    const seen = new Set();
    let at = id;
    while (!ended.has(at)) {
      if (seen.has(at)) return true;
      seen.add(at);
      at = parents.get(at);
    }
    for (const one of seen) ended.add(one);
  }
  return false;
}

function text(value, place, mayBeEmpty = false) {
  if (typeof value !== "string" || !(value || mayBeEmpty)) throw new Error(`${place} is a text`);
  return value;
}

function number(value, place) {
  if (!Number.isFinite(value)) throw new Error(`${place} is a number`);
  return value;
}

function list(value, place) {
  if (!Array.isArray(value)) throw new Error(`${place} is a list`);
  return value;
}
