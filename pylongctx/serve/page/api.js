// Requests to the server that this page came from, and its refusals in words.

import { count } from "./dom.js";
import { settings } from "./settings.js";

export class ServerError extends Error {
  constructor(status, error = {}) {
    super(error.message ?? "");
    this.status = status;
    this.error = error;
  }

  /** What happened and the way out. */
  get words() {
    const { type, code, n_prompt_tokens: wanted, n_ctx: limit } = this.error;
    if (this.status === 0) return "The server does not answer. See whether pylongctx serve still runs, then try again.";
    if (this.status === 401) return "The server asks for an API key. Enter it in the settings, then try again.";
    if (type === "exceed_context_size_error" || code === "context_length_exceeded") {
      const size = wanted && limit ? ` (${count(wanted)} tokens, the context has ${count(limit)})` : "";
      return `This is too long for the context${size}. Edit an earlier message, start a new conversation, ` +
        "or start the server with a larger --ctx-size, or with --overflow evict_middle, which forgets the middle.";
    }
    if (this.status === 503) return `${this.message || "The server is busy."} Try again in a moment.`;
    return this.message || `The server refused with status ${this.status}.`;
  }
}

async function request(path, body, signal, { method = body ? "POST" : "GET", headers = {} } = {}) {
  if (body) headers["Content-Type"] = "application/json";
  if (settings.key) headers.Authorization = `Bearer ${settings.key}`;
  let response;
  try {
    response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal });
  } catch (reason) {
    throw reason.name === "AbortError" ? reason : new ServerError(0);
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  throw new ServerError(response.status, answer.error);
}

export const get = async (path) => (await request(path)).json();

export const post = async (path, body, signal) => (await request(path, body, signal)).json();

export const chosen = { model: "" }; // of several, the one that requests are for

export async function countTokens(content) {
  return (await post("tokenize", { content, model: chosen.model })).tokens.length;
}

// ---- streamed answers ----

const NAME = "X-Conversation-Id"; // by which the server keeps an answer when the page is gone

/** Begin an answer that is kept by the id of its message. */
export const ask = (message, body, signal) =>
  request("v1/chat/completions", body, signal, { headers: { [NAME]: message.id } });

// message.at: the bytes of the answer that were read
const place = (message) => new URLSearchParams({ conv_id: message.id, model: chosen.model, from: message.at ?? 0 });

/** Return the rest of an answer that the server still writes or keeps. */
export const askAgain = (message, signal) => request(`v1/stream?${place(message)}`, undefined, signal);

/** Let the server stop an answer; it does not matter whether it was there. */
export const forget = (message) =>
  request(`v1/stream?${place(message)}`, undefined, undefined, { method: "DELETE" }).catch(() => {});

/** Yield the chunks of a streamed answer, each with the bytes since the one before, which are ASCII. */
export async function* chunksOf(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let [rest, n] = ["", 0]; ;) {
    const { value, done } = await reader.read().catch((reason) => {
      throw signal.aborted ? reason : new ServerError(0);
    });
    if (done) throw new ServerError(0);
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      n += line.length + 1;
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(response.status, chunk.error);
      yield [chunk, n];
      n = 0;
    }
  }
}
