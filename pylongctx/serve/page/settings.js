// The settings, which localStorage keeps, and their dialog.

import { $, h, notice } from "./dom.js";

const KEY = "pylongctx:settings";

// name, label, least, most, step, hint; the names are those of /v1/chat/completions
const MAIN = [
  ["temperature", "Temperature", 0, 5, 0.05, "0 takes the likeliest token always"],
  ["top_p", "Top p", 0, 1, 0.01, "the likeliest tokens that together have this share"],
  ["max_tokens", "Longest answer, tokens", 1, null, 1, "as the context allows"],
  ["seed", "Seed", 0, 4294967295, 1, "the same seed gives the same answer"],
];
const SAMPLERS = [
  ["top_k", "Top k", 0, null, 1, "this many likeliest tokens; 0: all"],
  ["min_p", "Min p", 0, 1, 0.01, "least share of the likeliest token"],
  ["typical_p", "Typical p", 0, 1, 0.01, "1: off"],
  ["top_n_sigma", "Top n sigma", -1, null, 0.1, "-1: off"],
  ["repeat_penalty", "Repeat penalty", 0.01, null, 0.01, "1: off; 1.1 against loops"],
  ["repeat_last_n", "Penalties look back, tokens", -1, null, 1, "-1: the whole context"],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.05, "0: off"],
  ["presence_penalty", "Presence penalty", -2, 2, 0.05, "0: off"],
  ["dry_multiplier", "DRY multiplier", 0, null, 0.05, "0: off; against repeated phrases"],
  ["dry_base", "DRY base", 1, null, 0.05, ""],
  ["dry_allowed_length", "DRY allowed length", 0, null, 1, "tokens that may repeat"],
  ["dry_penalty_last_n", "DRY looks back, tokens", -1, null, 1, "-1: the whole context"],
  ["xtc_probability", "XTC probability", 0, 1, 0.01, "0: off; leaves out the likeliest tokens"],
  ["xtc_threshold", "XTC threshold", 0, 1, 0.01, "above 0.5: off"],
  ["dynatemp_range", "Dynamic temperature range", 0, null, 0.05, "0: off"],
  ["dynatemp_exponent", "Dynamic temperature exponent", 0, null, 0.05, ""],
  ["mirostat", "Mirostat", 0, 2, 1, "0: off"],
  ["mirostat_tau", "Mirostat tau", 0, null, 0.1, ""],
  ["mirostat_eta", "Mirostat eta", 0, null, 0.01, ""],
];
const NUMBERS = [...MAIN, ...SAMPLERS].map(([name]) => name);
const RANDOM = 4294967295; // the server's seed when it takes another one every time

const NAMES = [...NUMBERS, "system", "key", "thinking", "theme"];
const EMPTY = Object.fromEntries([...NAMES, "model"].map((name) => [name, ""]));

export const settings = { ...EMPTY, ...stored() };

function stored() {
  try {
    return JSON.parse(localStorage.getItem(KEY));
  } catch {
    return null; // another program's value, or a browser that keeps nothing
  }
}

export function saveSettings(values) {
  Object.assign(settings, values);
  try {
    localStorage.setItem(KEY, JSON.stringify(settings));
  } catch {
    notice("This browser keeps no settings: they are lost with the page.");
  }
  window.applyTheme?.(settings.theme);
}

/** Return the fields of a request that the settings have. */
export function asked() {
  const given = NUMBERS.filter((name) => settings[name] !== "").map((name) => [name, Number(settings[name])]);
  const more = settings.thinking ? { chat_template_kwargs: { enable_thinking: settings.thinking === "on" } } : {};
  return { ...Object.fromEntries(given), ...more };
}

// ---- the dialog ----

const form = $("settings").querySelector("form");

function field([name, label, min, max, step, hint]) {
  const input = h("input", { name, type: "number", min, max: max ?? "", step, inputMode: "decimal" });
  return h("label", {}, h("span", {}, label), input, h("small", { className: "hint" }, hint));
}

$("main-fields").append(...MAIN.map(field));
$("sampler-fields").append(...SAMPLERS.map(field));

/** Open the dialog; `props` asks the server for what it does by itself, `done` is called when something is kept. */
export async function openSettings({ props, asksKey }, done) {
  for (const name of NAMES) form.elements[name].value = settings[name];
  $("key-field").hidden = !asksKey && !settings.key;
  $("samplers").open = SAMPLERS.some(([name]) => settings[name] !== "");
  $("settings").returnValue = "";
  $("settings").onclose = () => {
    if ($("settings").returnValue !== "save") return; // Esc and Cancel leave everything as it was
    saveSettings(Object.fromEntries(NAMES.map((name) => [name, form.elements[name].value])));
    done();
  };
  $("settings").showModal();
  showDefaults(await props().catch(() => null));
}

/** Show what the server does where a field is empty. */
function showDefaults(props) {
  const known = props?.default_generation_settings?.params ?? {};
  const shown = { ...known, max_tokens: known.n_predict > 0 ? known.n_predict : "all" };
  if (known.seed === RANDOM) shown.seed = "random";
  for (const name of NUMBERS) form.elements[name].placeholder = shown[name] === undefined ? "" : round(shown[name]);
  $("thinking-field").hidden = !props?.chat_template?.includes("enable_thinking") && !settings.thinking;
}

const round = (value) => (typeof value === "number" ? String(Number(value.toPrecision(6))) : value);

$("reset-settings").onclick = () => { for (const name of [...NUMBERS, "thinking"]) form.elements[name].value = ""; };
$("cancel-settings").onclick = () => $("settings").close();
