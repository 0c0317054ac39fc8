// Conversations that an earlier version kept in localStorage move to IndexedDB.

import { restore } from "./store.js";

const PREFIX = "pylongctx:";

export async function migrate() {
  const list = read("list");
  if (!Array.isArray(list)) return;
  const now = Date.now();
  const failed = [];
  for (const [i, entry] of list.entries()) {
    const old = read(entry.id);
    if (!old || (await restore(records(entry, old, now - i * 1000)))) localStorage.removeItem(PREFIX + entry.id);
    else failed.push(entry);
  }
  if (failed.length) localStorage.setItem(`${PREFIX}list`, JSON.stringify(failed));
  else localStorage.removeItem(`${PREFIX}list`);
}

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + key));
  } catch {
    return null;
  }
}

/** Return the records of a list of messages; ids are made of places, so that two tabs make the same ones. */
function records({ id, title }, { messages }, time) {
  const parts = [];
  const moved = messages.map(({ id: answer, files = [], ...message }, i) => {
    const kept = files.map(({ text, ...file }, n) => {
      if (text !== null) parts.push({ id: `${id}-${i}-${n}`, conversation: id, text });
      return { ...file, id: `${id}-${i}-${n}`, kept: true };
    });
    const place = { id: `${id}-${i}`, conversation: id, parent: i ? `${id}-${i - 1}` : null, time: time - 999 + i };
    return { ...message, ...place, answer, files: kept };
  });
  return { entry: { id, title, named: false, time, leaf: moved.at(-1)?.id ?? null }, messages: moved, parts };
}
