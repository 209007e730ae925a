// Times: how long ago in the text, exactly and in the viewer's zone on hover.

const exact = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "long" });
const short = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const relative = new Intl.RelativeTimeFormat("en", { numeric: "auto" });
const units = [["year", 31557600], ["month", 2629800], ["day", 86400], ["hour", 3600], ["minute", 60]];

export function ago(instant, now = Date.now()) {
  const seconds = (instant - now) / 1000;
  for (const [unit, size] of units) {
    if (Math.abs(seconds) >= size) return relative.format(Math.trunc(seconds / size), unit);
  }
  const s = Math.trunc(seconds);
  if (Math.abs(s) < 5) return "just now";
  return s < 0 ? `${-s} s ago` : `in ${s} s`;
}

export function showTimes(root = document) {
  const now = Date.now();
  for (const time of root.querySelectorAll("time[datetime]")) {
    const instant = Date.parse(time.dateTime);
    if (Number.isNaN(instant)) continue;
    const text = time.dataset.exact === undefined ? ago(instant, now) : short.format(instant);
    if (time.textContent !== text) time.textContent = text;
    if (time.dataset.shown !== time.dateTime) {
      time.title = exact.format(instant);
      time.dataset.shown = time.dateTime;
    }
  }
}

// Words change slowly; a hidden page need not keep up.
setInterval(() => document.hidden || showTimes(), 5000);
document.addEventListener("visibilitychange", () => document.hidden || showTimes());
