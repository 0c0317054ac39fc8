// Numbers of an answer in words: how far the prompt is read, how fast it went, what it takes.

import { bytes, count, h, rate, seconds } from "./dom.js";
import { tab } from "./store.js";

const FULL = "The context is full. Start a new conversation, shorten this one, or start the server with " +
  "--overflow evict_middle: it then forgets the middle and continues.";

/** Show how far a prompt is read, in an element of a bar and a line. */
export function showProgress({ firstElementChild: bar, lastElementChild: line }, message) {
  const { total, cache = 0, processed = 0, time_ms = 0 } = message.progress ?? {};
  if (!total) {
    bar.removeAttribute("value");
    line.textContent = waiting(message);
    return;
  }
  bar.max = total;
  bar.value = processed;
  const done = processed - cache;
  const speed = done > 0 && time_ms > 0 ? (1000 * done) / time_ms : 0;
  const pace = speed ? ` \u00b7 ${rate(speed)} \u00b7 ${seconds((total - processed) / speed)} left` : "";
  line.textContent = `Reading ${count(processed)} of ${count(total)} tokens${pace}`;
}

function waiting({ tab: writer, crowded }) {
  if (writer !== tab) return "Another tab waits for this answer";
  return crowded ? "Waiting: the server answers another message first" : "Waiting for the server";
}

/** Return why an answer ended early in words, and whether settings help; null when there is nothing to say. */
export function remark({ loop, length, stats }) {
  if (loop) return { text: "Stopped, because the answer repeats itself. A repeat penalty of 1.1 helps.", key: true };
  if (length && stats?.used >= stats?.n_ctx) {
    return { text: FULL };
  }
  return null;
}

export function statistics({ running, stopped, length, stats = {} }) {
  const { prompt_n: read, cache_n: cached, predicted_n: written, draft_n: drafted, used, n_ctx, kv } = stats;
  const pace = (name, n, speed) => `${name} ${count(n)} at ${rate(speed)}`;
  const parts = [
    [stopped && !running, () => "stopped", "Stopped by you, or by leaving the page"],
    [length, () => "cut at the limit", "The longest answer of the settings, or the end of the context"],
    [read, () => pace("prompt", read, stats.prompt_per_second), "Tokens of the prompt that were read now"],
    [cached, () => `${count(cached)} cached`, "Tokens that were still known from before"],
    [written, () => pace("answer", written, stats.predicted_per_second), "Tokens of the answer"],
    [drafted, () => `${count(stats.draft_n_accepted)} of ${count(drafted)} drafted`, "Draft tokens that were right"],
    [used, () => `context ${count(used)} / ${count(n_ctx)}`, "Tokens of this conversation, and how many fit"],
    [kv, () => memory(kv), kv && memoryTitle(kv)],
  ];
  return parts.filter(([known]) => known).map(([, words, title]) => h("span", { title }, words()));
}

const saves = ({ bytes: own, full_bytes: full }) => own < 0.95 * full;

const memory = (kv) => `KV cache ${bytes(kv.bytes)}${saves(kv) ? ` instead of ${bytes(kv.full_bytes)}` : ""}`;

function memoryTitle(kv) {
  const all = "Memory of keys and values of all conversations that the server holds";
  if (saves(kv)) return `${all}, and with full attention`;
  const more = kv.bytes - kv.full_bytes;
  return more > 0 ? `${all}: ${bytes(more)} of it are what the method chooses chunks by` : all;
}
