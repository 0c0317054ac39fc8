// A conversation is a tree of messages: another answer or an edited question is a branch, and none is lost.

export const newId = () => crypto.getRandomValues(new Uint32Array(2)).join("");

const LONGEST_TITLE = 60;

export class Conversation {
  constructor({ id = newId(), title = "", named = false, time = 0, leaf = null } = {}) {
    Object.assign(this, { id, title, named, time, leaf });
    this.messages = new Map();
  }

  /** The stored fields, without the messages. */
  get entry() {
    const { id, named, time, leaf } = this;
    return { id, named, time, leaf, title: named ? this.title : this.begin() };
  }

  begin() {
    const [first] = this.path;
    const text = first?.content.trim() || first?.files?.[0]?.name || this.title;
    return text.length > LONGEST_TITLE ? `${text.slice(0, LONGEST_TITLE - 1)}\u2026` : text;
  }

  /** The messages that are shown, the first one first. */
  get path() {
    const found = new Set(); // an imported message may follow itself
    for (let at = this.messages.get(this.leaf); at && !found.has(at); at = this.messages.get(at.parent)) found.add(at);
    return [...found].reverse();
  }

  /** Add a message after another one, and show it. */
  add(message, parent = this.leaf) {
    const added = { id: newId(), conversation: this.id, parent, time: this.touch(), stats: {}, ...message };
    this.messages.set(added.id, added);
    this.leaf = added.id;
    return added;
  }

  /** Return a time that is later than all times of this conversation. */
  touch() {
    this.time = Math.max(Date.now(), this.time + 1);
    return this.time;
  }

  children(parent) {
    return [...this.messages.values()].filter((one) => one.parent === parent).sort((a, b) => a.time - b.time);
  }

  /** The versions of a message, itself among them. */
  versions({ parent, role }) {
    return this.children(parent).filter((one) => one.role === role);
  }

  /** Show another version of a message, with what followed it last. */
  choose(message) {
    const found = new Set();
    for (let at = message; at && !found.has(at); at = this.children(at.id).at(-1)) found.add(at);
    this.leaf = [...found].at(-1).id;
  }

  /** Show the end that was written last; a leaf that is not there any more is no way to the others. */
  repair() {
    if (this.messages.has(this.leaf)) return;
    const last = [...this.messages.values()].sort((a, b) => a.time - b.time).at(-1);
    this.leaf = last?.id ?? null;
  }
}
