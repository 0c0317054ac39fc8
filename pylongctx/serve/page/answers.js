// Answers that are being written: each has its request, and is kept while it grows.

import * as store from "./store.js";
import { ask, askAgain, chunksOf, forget, get, ServerError } from "./api.js";
import { announce, notice } from "./dom.js";
import { isLoop } from "./loops.js";
import { tells } from "./map.js";
import { server } from "./server.js";
import { asked, settings } from "./settings.js";

const MOST = 4; // answers at once; browsers let a page have six connections
const NO_ROOM = {
  files: "This browser has no room for the files of this conversation: they are lost with the page.",
  all: "This browser has no room for this conversation: it is lost with the page. Export it, or delete others.",
};
const PAUSE = 500; // ms between two times that a growing answer is kept

const running = new Map(); // by the id of the conversation: {conversation, message, controller}
let leaving = false; // the page is being left, which ends the requests but not the answers
let changed = () => {};

addEventListener("pagehide", () => {
  leaving = true;
  for (const { conversation, message } of running.values()) store.save(conversation, message);
});
addEventListener("pageshow", () => { leaving = false; });

/** Call a function when an answer has begun, has read or written something, or has ended. */
export const listen = (callback) => { changed = callback; };

export const of = (conversation) => running.get(conversation.id);

export function stop(conversation) {
  const current = of(conversation);
  if (!current) return;
  current.controller.abort();
  forget(current.message);
}

/** Return why no answer can follow some messages of a conversation, "" when one can. */
export async function obstacle(conversation, before) {
  const writes = conversation.path.at(-1)?.running;
  if (of(conversation)) return "This conversation is being answered. Stop the answer (Esc), or wait for its end.";
  if (writes) return "Another tab writes an answer in this conversation. Wait for its end.";
  if (running.size >= MOST) return `${MOST} answers are being written. Stop one, or wait for the end of one.`;
  const lost = await withoutText(before);
  return lost ? `${lost.name} was too large to be kept in this browser. Start a new conversation with it.` : "";
}

/** Let the model write a message if nothing prevents it; a message with text is continued. */
export async function write(conversation, message) {
  const before = conversation.path.slice(0, conversation.path.indexOf(message));
  const body = request(before, message);
  message.at = 0;
  await run(conversation, message, before.slice(-1), (signal) => ask(message, body, signal));
}

/** Go on with the last answer of a conversation if the page was left while it was written, and the server has it. */
export async function rejoin(conversation) {
  const message = conversation.path.at(-1);
  if (!message?.lost || of(conversation)) return;
  const gone = () => { throw new DOMException("the server does not have it any more", "AbortError"); };
  await run(conversation, message, [], (signal) => askAgain(message, signal).catch(gone));
}

async function run(conversation, message, others, begin) {
  const controller = new AbortController();
  running.set(conversation.id, { conversation, message, controller });
  Object.assign(message, { running: true, stopped: false, length: false, loop: false, trouble: null, progress: null });
  const crowded = running.size > (server.info.sequences?.length ?? 1);
  Object.assign(message, { lost: false, tab: store.tab, pieces: [], crowded });
  changed(conversation, message);
  await keep(conversation, ...others, message);
  announce("Waiting for the answer.");
  try {
    await receive(conversation, message, await begin(controller.signal), controller);
    announce(message.loop ? "The answer repeats itself and was stopped." : "The answer is complete.");
  } catch (error) {
    note(error, message);
  } finally {
    message.running = false;
    running.delete(conversation.id);
    if (!leaving) await keep(conversation, message);
    changed(conversation, message);
  }
}

/** Return a file whose text is not there any more. */
async function withoutText(messages) {
  const files = messages.flatMap(({ files: found = [] }) => found);
  const texts = await Promise.all(files.map(store.textOf));
  return files.find((_, i) => texts[i] === null);
}

async function receive(conversation, message, response, controller) {
  let kept = performance.now();
  for await (const [chunk, n] of chunksOf(response, controller.signal)) {
    message.at += n; // with the text: both are kept together
    take(chunk, message);
    if (isLoop(message.pieces)) {
      message.loop = true;
      stop(conversation);
      break;
    }
    changed(conversation, message);
    if (performance.now() - kept > PAUSE) {
      message.touched = Date.now();
      store.save(conversation, message);
      kept = performance.now();
    }
  }
  await addNumbers(conversation, message);
}

function note(error, message) {
  message.lost = leaving;
  if (error.name === "AbortError" || leaving) message.stopped = !message.loop;
  else if (error instanceof ServerError) message.trouble = { text: error.words, key: error.status === 401 };
  else throw error;
}

/** Keep a message in this browser, and say what has no room. */
export async function keep(conversation, ...messages) {
  const now = Date.now();
  for (const message of messages) if (message.running) message.touched = now;
  const missing = await store.save(conversation, ...messages);
  if (missing) notice(NO_ROOM[missing]);
}

// ---- the request ----

function request(before, message) {
  const { model, parts } = server.info;
  const body = { model, messages: [], stream: true, stream_options: { include_usage: true }, return_progress: true };
  body.longctx = { trace: parts.some(([name]) => name === "longheads") };
  Object.assign(body, asked());
  if (settings.system) body.messages.push({ role: "system", content: settings.system });
  const goesOn = Boolean(message.content);
  for (const { role, content, files = [], reasoning } of goesOn ? [...before, message] : before) {
    const text = [...files.map(fileText), content].filter(Boolean).join("\n\n");
    if (text) body.messages.push({ role, content: text, ...(reasoning ? { reasoning_content: reasoning } : {}) });
  }
  if (goesOn) body.continue_final_message = true;
  return body;
}

const fileText = ({ name, text }) => `${name}:\n\n${text}`;

function take({ id, prompt_progress: progress, choices, usage, timings }, message) {
  message.answer = id;
  if (progress) message.progress = progress;
  if (choices?.length) {
    const [{ delta, finish_reason: reason }] = choices;
    const [thought, text] = [delta?.reasoning_content ?? "", delta?.content ?? ""];
    message.reasoning += thought;
    message.content += text;
    if (thought || text) message.pieces.push(thought + text);
    if (reason === "length") message.length = true;
  }
  if (timings) Object.assign(message.stats, timings);
  if (usage) Object.assign(message.stats, { used: usage.total_tokens, n_ctx: server.info?.n_ctx ?? 0 });
}

/** Ask for the memory and the chunk map, which is that of another answer when that was traced since. */
async function addNumbers(conversation, message) {
  const query = new URLSearchParams({ id: message.answer, model: server.info.model });
  const { kv, chunk_map: map } = await get(`v1/longctx?${query}`).catch(() => ({})); // the answer is complete anyway
  message.stats.kv = kv;
  if (!map || !tells(map)) return;
  message.map = map;
  message.mapped = await store.keepPart(conversation, { id: store.mapId(message), map });
}
