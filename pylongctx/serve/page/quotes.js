// The sentences of attached files that an answer rests on; the server finds them when they are asked for.

import { post, ServerError } from "./api.js";
import { count, h } from "./dom.js";
import { server } from "./server.js";
import { textOf } from "./store.js";

/** Return the quotes of an answer, hidden while there is no answer about files; `asked` says about which. */
export function quotesView(message, asked) {
  const list = h("ol");
  const element = h("details", { className: "quotes", hidden: true }, h("summary", {}, "Quotes"), list);
  let shown = null; // the answer that the list belongs to
  element.ontoggle = async () => {
    if (!element.open || shown === message.content) return;
    shown = message.content;
    list.replaceChildren(...(await entries(asked(), message.content)));
  };
  const update = () => {
    element.hidden = Boolean(message.running) || !message.content || !asked().files.length;
    if (shown !== message.content) element.open = false;
  };
  return { element, update };
}

async function entries({ question, files }, answer) {
  const texts = await Promise.all(files.map(textOf));
  const named = files.map(({ name }, i) => ({ name, text: texts[i] })).filter(({ text }) => text !== null);
  if (!named.length) return [h("li", {}, "This browser could not keep the text of the files.")];
  try {
    const body = { files: named, question, answer, model: server.info?.model ?? "" };
    const { quotes } = await post("v1/longctx/quotes", body);
    return quotes.length ? quotes.map(entry) : [h("li", {}, "No sentence shares a word with the answer.")];
  } catch (error) {
    if (error instanceof ServerError) return [h("li", {}, error.words)];
    throw error;
  }
}

const entry = ({ file, line, text }) => h("li", {}, h("b", {}, `${file}, line ${count(line)}`), h("blockquote", {}, text));
