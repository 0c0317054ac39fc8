// Elements and numbers. Text becomes text nodes only, never markup.

export const $ = (id) => document.getElementById(id);

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const button = (text, label, onclick, props = {}) =>
  h("button", { type: "button", title: label, "aria-label": label, onclick, ...props }, text);

export const count = (n) => Math.round(n).toLocaleString("en");

export const rate = (n = 0) => `${n < 20 ? n.toFixed(1) : count(n)} t/s`;

export function bytes(n) {
  const mib = n / 2 ** 20;
  return mib < 1024 ? `${mib.toFixed(mib < 10 ? 1 : 0)} MiB` : `${(mib / 1024).toFixed(1)} GiB`;
}

export function seconds(s) {
  if (s < 60) return `${Math.ceil(s)} s`;
  return s < 3600 ? `${Math.floor(s / 60)} min ${Math.round(s % 60)} s` : `${(s / 3600).toFixed(1)} h`;
}

/** Put text on the clipboard, which browsers offer to pages of this machine and of https only. */
export function copy(text) {
  if (navigator.clipboard) navigator.clipboard.writeText(text);
  else notice("This browser lets pages copy over https or on localhost only. Select the text and copy it.");
}

/** Say something to those who listen instead of looking. */
export const announce = (text) => { $("status").textContent = text; };

/** Show a line above the composer, with the way out as a button, or take it away. */
export function notice(text = "", label = "", act = null) {
  const box = $("notice");
  box.replaceChildren(text);
  if (act) box.append(button(label, label, () => { notice(); act(); }));
  if (text) box.append(button("\u00d7", "Dismiss", () => notice(), { className: "icon" }));
  box.hidden = !text;
}
