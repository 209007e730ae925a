// Building and updating elements. Text goes in by textContent alone, so what is
// stored in rows, notes and names stays text whatever it looks like.

// el makes an element: properties that are functions become listeners, null and
// false leave an attribute out.
export function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

export const count = new Intl.NumberFormat("en-US");

// announce says something to people who listen rather than look.
export function announce(text) {
  const region = document.getElementById("announce");
  if (region) region.textContent = text;
}

// What the viewer has opened or typed, and what scripts fill, is theirs: an update
// from the server leaves it alone.
const wrong = ["aria-invalid", "aria-describedby"];
const own = { BUTTON: ["aria-busy"], DETAILS: ["open"], DIALOG: ["open"], INPUT: wrong, SELECT: wrong, TEXTAREA: wrong, TIME: ["data-shown", "title"] };

// Parts that come and go, and their neighbours, have ids: without one an element is
// taken for whatever stands in its place.
//
// morph makes `from` equal to `to` while keeping the nodes that are there: focus,
// selection, scroll positions, open dialogs and running transitions survive.
//
// data-keep: a script fills it, so its children stay; data-keep="all": and its
// attributes; data-keep="open": all of it while it is open. data-put: a script put it
// there, so it stays where it is, and nothing takes its place.
export function morph(from, to) {
  if (from.dataset?.keep === "all" || (from.dataset?.keep === "open" && from.open)) return;
  const kept = own[from.tagName] ?? [];
  for (const { name } of [...from.attributes]) {
    if (!to.hasAttribute(name) && !kept.includes(name)) from.removeAttribute(name);
  }
  for (const { name, value } of to.attributes) {
    if (from.getAttribute(name) !== value && !kept.includes(name)) from.setAttribute(name, value);
  }
  if (from.hasAttribute("data-keep") && from.dataset.keep !== "open") return;
  // A time is shown relative to now; the same instant needs no new words.
  if (from.tagName === "TIME") {
    if (from.dataset.shown !== from.dateTime) from.textContent = to.textContent;
    return;
  }
  morphChildren(from, to);
}

// keepFocus calls a function that changes the page. When what has the focus goes with
// it, the focus goes on to what is next to it: in its row or list, the next row, the
// one before, the part of the page they are in.
export function keepFocus(change) {
  const had = document.activeElement;
  if (!had || had === document.body || had.closest("dialog")) return change();
  const near = [];
  const row = had.closest("tr[id], li[id]");
  for (let r = row; r; r = r.nextElementSibling) near.push(r);
  for (let r = row?.previousElementSibling; r; r = r.previousElementSibling) near.push(r);
  for (let part = (row ?? had).parentElement?.closest("[id]"); part; part = part.parentElement?.closest("[id]")) near.push(part);
  change();
  if (document.activeElement === had) return;
  if (had.isConnected && !had.matches(":disabled") && had.checkVisibility()) return had.focus({ preventScroll: true }); // it was moved
  for (const part of near) {
    if (!part.isConnected) continue;
    const next = part.matches("main") ? part : [...part.querySelectorAll("a[href], button, input, select, textarea, summary")].find((e) => !e.disabled && e.checkVisibility());
    if (next) return next.focus();
  }
}

function morphChildren(from, to) {
  const byID = new Map();
  for (const child of from.children) if (child.id) byID.set(child.id, child);
  // What goes is taken out first, so that what stands behind it need not move: what moves
  // loses the focus, and a dialog its modality.
  const wanted = new Set([...to.children].map((child) => child.id));
  for (const [id, gone] of byID) {
    if (wanted.has(id) || "put" in gone.dataset) continue;
    if (gone.nextSibling?.nodeType === Node.TEXT_NODE) gone.nextSibling.remove();
    gone.remove();
  }
  let at = given(from.firstChild);
  for (const want of [...to.childNodes]) {
    const found = (want.id && byID.get(want.id)) || (at && alike(at, want) ? at : null);
    if (!found) {
      from.insertBefore(document.importNode(want, true), at);
      continue;
    }
    if (found === at) at = given(at.nextSibling);
    else from.insertBefore(found, at);
    if (found.nodeType === Node.ELEMENT_NODE) morph(found, want);
    else if (found.data !== want.data) found.data = want.data;
  }
  while (at) {
    const next = given(at.nextSibling);
    at.remove();
    at = next;
  }
}

// given is the next node that no script has put there.
function given(node) {
  while (node?.dataset && "put" in node.dataset) node = node.nextSibling;
  return node;
}

function alike(a, b) {
  return a.nodeType === b.nodeType && a.nodeName === b.nodeName && (a.id ?? "") === (b.id ?? "");
}
