// Compression of the text of a conversation: a dialog with its costs, the request, and what came of it.

import { get, post, ServerError } from "./api.js";
import { $, announce, bytes, notice, seconds } from "./dom.js";
import { server } from "./server.js";

const LOST = "The server no longer holds this conversation. Send a message, then compress.";

/** Return whether the text that ends with an answer can be compressed. */
export const canCompress = (message) => Boolean(server.info?.compresses && message.answer && message.stats?.used);

/** Ask how much of the text that ends with an answer is kept, and compress it; `done` is called after it. */
export function open(message, done) {
  $("compression").onclose = () => {
    if ($("compression").returnValue === "compress") compress(message, $("kept").valueAsNumber / 100, done);
  };
  $("kept").oninput = () => { $("cost").textContent = cost(message, $("kept").valueAsNumber / 100); };
  $("kept").oninput();
  $("compression").returnValue = "";
  $("compression").showModal();
}

function cost({ stats: { used, prompt_per_second: speed, kv } }, ratio) {
  const took = seconds((server.info.compression_prefills * used) / speed);
  const time = speed ? `This takes about ${took}, while other answers wait.` : "";
  const freed = kv && ratio ? ` About ${bytes((1 - ratio) * kv.bytes)} of the KV cache are freed.` : "";
  return time + freed;
}

async function compress(message, ratio, done) {
  const controller = new AbortController();
  notice("Compressing the text\u2026", "Stop", () => controller.abort());
  try {
    const query = `model=${encodeURIComponent(server.info.model)}`;
    const { id_slot: slot } = await get(`v1/longctx?id=${encodeURIComponent(message.answer)}&${query}`);
    if (slot === null) return notice(LOST);
    const body = { ratio, answer: message.answer };
    const report = await post(`slots/${slot}?action=compress&${query}`, body, controller.signal);
    Object.assign(message.stats.kv ?? {}, { bytes: report.bytes_after });
    notice(words(report));
    announce("The text is compressed.");
    done();
  } catch (error) {
    if (error.name === "AbortError") notice("The compression was stopped. The text is as it was.");
    else if (error instanceof ServerError) notice(error.words);
    else throw error;
  }
}

function words({ bytes_before: before, bytes_after: after, seconds: took, drifts, divergence }) {
  const sizes = `The KV cache went from ${bytes(before)} to ${bytes(after)} in ${seconds(took)}.`;
  if (!drifts) return sizes;
  const change = divergence === null ? "" : ` by ${divergence.toFixed(2)} nats`;
  return `${sizes} The model's predictions changed${change} where it repeats the text, so answers may be wrong. ` +
    "Answer a message again to evaluate the whole text, and keep more.";
}

$("cancel-compression").onclick = () => $("compression").close();
