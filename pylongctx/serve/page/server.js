// What the server says about itself, and the header that shows it.

import { chosen, get } from "./api.js";
import { $, count, h, notice } from "./dom.js";
import { saveSettings, settings } from "./settings.js";

let models = []; // the names of all its models
export const server = { info: null, openSettings: null, changed: () => {} };

/** Ask which model there is and how it reads; null when there is no answer. */
export async function askServer() {
  try {
    const { data } = await get("v1/models");
    const named = data.find(({ id }) => id === settings.model);
    const { id: model } = named ?? data.find(({ status }) => status?.value === "loaded") ?? data[0];
    [chosen.model, models] = [model, data.map(({ id }) => id)];
    showModels();
    const longctx = await get(`v1/longctx?model=${encodeURIComponent(model)}`);
    server.info = { ...longctx, model, parts: methodParts(longctx.method ?? "llama.cpp's own") };
    notice();
  } catch (error) {
    server.info = null;
    if (error.status === 401) notice(error.words, "Settings", server.openSettings);
    else notice(error.words ?? String(error), "Try again", askServer);
  }
  show();
  return server.info;
}

/** Return [name, choice, ...] of each part of a method such as "longheads,window=256+corm,window=128". */
const methodParts = (method) => method.split("+").map((part) => part.split(","));

function show() {
  const { info } = server;
  showModels();
  $("method").hidden = !info;
  if (info) {
    $("method").firstElementChild.textContent = info.parts.map(([name]) => name).join(" + ");
    const rows = info.parts.flatMap(([, ...choices]) => choices).map((choice) => choice.split("="));
    const entry = ([name, value]) => [h("dt", {}, name), h("dd", {}, value)];
    $("method").lastElementChild.replaceChildren(...rows.flatMap(entry));
    const times = (info.n_ctx / info.n_ctx_train).toFixed(1).replace(".0", "");
    $("sizes").textContent = `context ${count(info.n_ctx)}, ${times} \u00d7 the trained ${count(info.n_ctx_train)}`;
  }
  server.changed();
}

/** Show the model's name, or where there are several a choice. */
function showModels() {
  const several = models.length > 1;
  $("model").textContent = several ? "" : server.info?.model ?? "";
  $("models").hidden = !several;
  $("models").replaceChildren(...models.map((name) => h("option", { value: name }, name)));
  $("models").value = chosen.model;
}

$("models").onchange = () => {
  saveSettings({ model: $("models").value });
  server.info = null; // what is sent waits until the model is loaded
  askServer();
};
