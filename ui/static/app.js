// What every page starts.

import { announce } from "./dom.js";
import { showTimes } from "./time.js";
import { onUpdate, refresh, start } from "./live.js";
import "./actions.js";
import { startRows } from "./rows.js";

showTimes();
startRows();
start();

// The last announced progress; its words change every tenth, not every row.
let spoken = document.querySelector("[data-spoken]")?.dataset.spoken ?? "";
onUpdate(() => {
  const main = document.getElementById("main");
  if (main.dataset.title) document.title = main.dataset.title;
  const now = document.querySelector("[data-spoken]")?.dataset.spoken ?? document.querySelector("h1 + .line .pill")?.textContent ?? "";
  if (now !== spoken) announce(now);
  spoken = now;
});

// A table's row opens in place; the address says which are open, so that a reload,
// a link and the next update keep them.
document.addEventListener("click", (e) => {
  const toggle = e.target.closest("button[data-toggle]");
  if (!toggle) return;
  e.preventDefault();
  // Of the address as it is now: another row may have been opened since the page was made.
  const address = new URL(location.href);
  const change = address.searchParams.has("open", toggle.value) ? "delete" : "append";
  address.searchParams[change]("open", toggle.value);
  history.replaceState(null, "", address);
  refresh();
});
