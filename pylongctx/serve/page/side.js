// The list of conversations: search, and what can be done with each.

import * as store from "./store.js";
import { $, button, h, notice } from "./dom.js";
import { exportAll, exportOne, importFile } from "./transfer.js";

const PAUSE = 150; // ms without a key before texts are searched
let actions = {}; // choose, isCurrent, isRunning, renamed, discard
let found = null; // ids of the conversations that a search has found
let timer = 0;
let shown = ""; // what the list shows now

export const listen = (given) => { actions = given; };

export function showList() {
  const entries = store.list().filter(({ id }) => !found || found.has(id));
  const { isCurrent, isRunning } = actions;
  const next = JSON.stringify(entries.map(({ id, title }) => [id, title, isCurrent(id), isRunning(id)]));
  if (next === shown) return; // the focus stays where it is
  shown = next;
  $("conversations").replaceChildren(...entries.map(item));
  $("nothing").hidden = !found || entries.length > 0;
}

function item({ id, title }) {
  const current = actions.isCurrent(id) ? { "aria-current": "true" } : {};
  const name = actions.isRunning(id) ? `${title} (is being answered)` : title;
  const go = h("button", { type: "button", "aria-label": name, onclick: () => actions.choose(id), ...current }, title);
  go.classList.toggle("busy", actions.isRunning(id));
  const more = button("\u22ef", `Rename, export or delete ${title}`, () => openMenu(id, title), { className: "icon" });
  return h("li", {}, go, more);
}

// ---- search ----

$("search").oninput = () => {
  clearTimeout(timer);
  timer = setTimeout(search, PAUSE);
};

async function search() {
  const text = $("search").value.trim();
  const result = text ? await store.search(text) : null;
  if (text !== $("search").value.trim()) return;
  found = result;
  showList();
}

// ---- one conversation ----

function openMenu(id, title) {
  const close = (work) => () => { $("conversation").close(); work(); };
  $("title").value = title;
  $("rename").onclick = close(() => rename(id, $("title").value.trim()));
  $("export-json").onclick = close(() => exportOne(id, "json"));
  $("export-markdown").onclick = close(() => exportOne(id, "md"));
  $("delete").onclick = close(() => actions.discard(id, title));
  $("title").onkeydown = (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    $("rename").click();
  };
  $("conversation").showModal();
}

async function rename(id, title) {
  if (!title) return;
  const conversation = await store.open(id);
  Object.assign(conversation, { title, named: true });
  actions.renamed(conversation);
}

$("close-conversation").onclick = () => $("conversation").close();

// ---- all of them ----

$("export-all").onclick = () => {
  if (store.list().length) exportAll();
  else notice("There is no conversation to export.");
};
$("import").onclick = () => $("import-file").click();
$("import-file").onchange = async () => {
  const [file] = $("import-file").files;
  $("import-file").value = "";
  notice(await importFile(file));
  showList();
};
