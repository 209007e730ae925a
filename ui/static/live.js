// Keeping the page current: the server says that something changed, the page asks
// for itself again and takes over the parts that are marked live.

import { keepFocus, morph } from "./dom.js";
import { showTimes } from "./time.js";

const quiet = 150; // milliseconds between an event and the request it causes
const gap = 1000; // milliseconds between two requests that events cause
const listeners = [];

// onUpdate calls fn after each update of the page.
export function onUpdate(fn) {
  listeners.push(fn);
}

let running = false;
let again = false;
let retrying = 0;

// refresh fetches the page at its present address. Calls during a fetch cause one
// more, not one each.
export async function refresh() {
  if (running) {
    again = true;
    return;
  }
  running = true;
  clearTimeout(retrying);
  try {
    do {
      again = false;
      await load();
    } while (again);
    say("fetch", "");
  } catch (err) {
    if (err.gone) return say("fetch", "This page is not there any more, or not for you. What you see is old.");
    say("fetch", "The server cannot be reached. What you see may be old; trying again.");
    retrying = setTimeout(refresh, 3000);
  } finally {
    running = false;
  }
}

async function load() {
  const address = location.href;
  const response = await fetch(address, { headers: { "Backfill-Fragment": "1" } });
  if (response.status === 401) {
    location.reload();
    return;
  }
  if (!response.ok) throw Object.assign(new Error(String(response.status)), { gone: [403, 404, 410].includes(response.status) });
  // A page that failed at first has neither the header nor the scripts' parts of what it is now.
  if (document.querySelector("[data-failed]")) return location.reload();
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  if (location.href !== address) {
    again = true; // the viewer has gone on to another filter meanwhile
    return;
  }
  keepFocus(() => {
    for (const part of document.querySelectorAll("[data-live]")) {
      const fresh = page.getElementById(part.id);
      if (fresh) morph(part, fresh);
    }
  });
  showTimes();
  for (const fn of listeners) fn();
}

// soon refreshes at most about once a second, however many events come.
let timer = 0;
let last = 0;
function soon() {
  if (timer) return;
  timer = setTimeout(async () => {
    await refresh();
    last = Date.now();
    timer = 0;
  }, Math.max(quiet, last + gap - Date.now()) + Math.random() * quiet);
}

// The banner says which of the two ways to the server is away.
const reasons = new Map();
function say(which, text) {
  if ((reasons.get(which) ?? "") === text) return;
  reasons.set(which, text);
  const banner = document.getElementById("connection");
  const shown = reasons.get("fetch") || reasons.get("stream") || "";
  banner.textContent = shown;
  banner.classList.toggle("away", shown !== "");
  document.documentElement.dataset.connection = shown === "" ? "live" : "away";
}

// One stream tells of all that the page shows; what that is changes with the page.
let source = null;
let lost = 0;
let retry = 1000;

function listen() {
  const url = document.getElementById("main").dataset.events ?? "";
  if (source?.asked === url) return;
  source?.close();
  source = null;
  if (url === "") {
    clearTimeout(lost);
    return say("stream", "");
  }
  const mine = new EventSource(url); // it sends the id of the last event when it comes back
  mine.asked = url;
  source = mine;
  mine.addEventListener("open", () => {
    clearTimeout(lost);
    retry = 1000;
    say("stream", "");
  });
  mine.addEventListener("change", soon);
  mine.addEventListener("error", () => {
    if (source !== mine) return;
    // A stream that ends and comes back at once is no news.
    clearTimeout(lost);
    lost = setTimeout(() => say("stream", "Live updates are away. What you see may be old; connecting again."), 1500);
    if (mine.readyState !== EventSource.CLOSED) return;
    // The browser gives up when the answer is not a stream; we do not.
    setTimeout(() => {
      if (source !== mine) return;
      source = null;
      listen();
    }, retry);
    retry = Math.min(retry * 2, 30000);
  });
}

// start listens for what the page shows. A hidden page lets go of its stream, since
// browsers allow few connections to one server, and catches up when it is shown.
export function start() {
  const every = document.body.dataset.refresh ?? "";
  const disconnect = () => {
    source?.close();
    source = null;
  };
  if (!document.hidden) listen();
  onUpdate(() => document.hidden || listen());
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return disconnect();
    listen();
    soon();
  });
  addEventListener("pagehide", disconnect);
  addEventListener("pageshow", (e) => e.persisted && listen());
  if (every) setInterval(() => document.hidden || soon(), Number(every) * 1000);
}
