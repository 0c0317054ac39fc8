// Conversations and settings in this browser's localStorage.

const PREFIX = "pylongctx:";
const read = (key) => JSON.parse(localStorage.getItem(PREFIX + key));
const write = (key, value) => localStorage.setItem(PREFIX + key, JSON.stringify(value, lasting));
const FLEETING = ["running", "progress", "map"];
const lasting = (key, value) => (FLEETING.includes(key) ? undefined : value);

const EMPTY = { temperature: "", top_p: "", max_tokens: "", system: "", key: "", model: "" };

export const settings = { ...EMPTY, ...read("settings") };

export function saveSettings(values) {
  Object.assign(settings, values);
  write("settings", settings);
}

export const create = () => ({ id: crypto.getRandomValues(new Uint32Array(2)).join(""), messages: [] });

/** Return [{id, title}], the one used last first. */
export const list = () => read("list") ?? [];

export const load = (id) => read(id) ?? { id, messages: [] };

function title({ messages: [first] }) {
  const text = first.content.trim() || first.files[0]?.name || "";
  return text.length > 60 ? `${text.slice(0, 59)}\u2026` : text;
}

/** Keep a conversation; false when there is no room for its files, which are then kept by name. */
export function save(conversation) {
  const entry = { id: conversation.id, title: title(conversation) };
  write("list", [entry, ...list().filter(({ id }) => id !== conversation.id)]);
  try {
    write(conversation.id, conversation);
    return true;
  } catch {
    write(conversation.id, withoutFiles(conversation));
    return false;
  }
}

const withoutFiles = ({ id, messages }) => ({
  id,
  messages: messages.map((m) => (m.files ? { ...m, files: m.files.map((file) => ({ ...file, text: null })) } : m)),
});

export function remove(id) {
  write("list", list().filter((entry) => entry.id !== id));
  localStorage.removeItem(PREFIX + id);
}
