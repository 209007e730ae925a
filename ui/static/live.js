// Keeping the page current: the server says that something changed, the page asks
// for itself again and takes over the parts that are marked live.

import { morph } from "./dom.js";
import { showTimes } from "./time.js";

const quiet = 150; // milliseconds between an event and the request it causes
const gap = 800; // milliseconds between two requests that events cause
const listeners = [];

// onUpdate calls fn after each update of the page.
export function onUpdate(fn) {
  listeners.push(fn);
}

let running = false;
let again = false;

// refresh fetches the page at its present address. Calls during a fetch cause one
// more, not one each.
export async function refresh() {
  if (running) {
    again = true;
    return;
  }
  running = true;
  try {
    do {
      again = false;
      await load();
    } while (again);
    say("fetch", "");
  } catch {
    say("fetch", "The server cannot be reached. What you see may be old; trying again.");
    setTimeout(refresh, 3000);
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
  if (!response.ok) throw new Error(String(response.status));
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  if (location.href !== address) {
    again = true; // the viewer has gone on to another filter meanwhile
    return;
  }
  for (const part of document.querySelectorAll("[data-live]")) {
    const fresh = page.getElementById(part.id);
    if (fresh) morph(part, fresh);
  }
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
  }, Math.max(quiet, last + gap - Date.now()));
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

const sources = new Map();

function listen(url) {
  let retry = 1000;
  let lost = 0;
  const open = () => {
    const source = new EventSource(url);
    sources.set(url, source);
    source.addEventListener("open", () => {
      clearTimeout(lost);
      retry = 1000;
      say("stream", "");
      soon(); // whatever happened while it was away
    });
    for (const name of ["backfill", "site", "queue", "message"]) source.addEventListener(name, soon);
    source.addEventListener("end", () => {
      source.close();
      sources.delete(url);
      soon();
    });
    source.addEventListener("error", () => {
      // A stream that ends and comes back at once is no news.
      clearTimeout(lost);
      lost = setTimeout(() => say("stream", "Live updates are away. What you see may be old; connecting again."), 1500);
      if (source.readyState !== EventSource.CLOSED) return;
      // The browser gives up when the answer is not a stream; we do not.
      setTimeout(() => sources.get(url) === source && open(), retry);
      retry = Math.min(retry * 2, 30000);
    });
  };
  open();
}

// start listens to what the page names. A hidden page lets go of its streams, since
// browsers allow few connections to one server, and catches up when it is shown.
export function start() {
  const { events = "", refresh: every = "" } = document.body.dataset;
  const urls = events.split(" ").filter(Boolean);
  const connect = () => urls.forEach((url) => sources.has(url) || listen(url));
  const disconnect = () => {
    for (const source of sources.values()) source.close();
    sources.clear();
  };
  if (!document.hidden) connect();
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return disconnect();
    connect();
    soon();
  });
  addEventListener("pagehide", disconnect);
  addEventListener("pageshow", (e) => e.persisted && connect());
  if (every) setInterval(() => document.hidden || soon(), Number(every) * 1000);
}
