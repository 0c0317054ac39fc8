// Light or dark before the first picture; not a module, so that nothing is shown in the wrong colors.

(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = "";
  const show = () => {
    document.documentElement.dataset.theme = chosen || (dark.matches ? "dark" : "light");
    dispatchEvent(new Event("theme"));
  };
  window.applyTheme = (theme) => { chosen = theme; show(); };
  dark.addEventListener("change", show);
  try {
    chosen = JSON.parse(localStorage.getItem("pylongctx:settings"))?.theme ?? "";
  } catch { /* as the system wants */ }
  show();
})();
