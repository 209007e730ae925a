// Buttons and dialogs that ask the API for something.
//
//   data-post     where a button or form posts to
//   data-method   another method than POST
//   data-body     the part of the body that is fixed, as JSON
//   data-then     "open": go to the page of what the answer describes
//   data-said     what to say when it was taken
//   data-dialog   the dialog a button opens; its data fill the dialog's data-fill
//                 elements, and data-action becomes the form's address
//   data-values   what the dialog's fields begin with, as JSON; those that are
//                 data-fixed and have a value stay as they are
//   data-shape    what is typed is a list (by commas), pairs (a line each: name = value), or
//                 claims (a line each: name: source => target)
//   data-try      a button of a form that asks for what its opener's data-try names to be
//                 tried, and shows it in the form's data-tried
//   data-unit     what a field counts in, in units of what is sent: 3600 for hours
//   data-for      the kinds that a part of the form is for; a fieldset that is not
//                 shown is not sent
//   data-by       the field whose value is the kind, "kind" if it is not said
//   data-address  the field stands in the address alone
//   data-json     the field's value is JSON
//   data-new      what is sent must not be there yet

import { Problem, change, newKey } from "./api.js";
import { announce, capital, count, el } from "./dom.js";
import { onUpdate, refresh } from "./live.js";

// opened is what belongs to a dialog while it is open: the button's data, and the
// revision of the staged rows as they were when it was opened.
const opened = new WeakMap();

function open(button) {
  const dialog = document.getElementById(button.dataset.dialog);
  const form = dialog.querySelector("form");
  for (const slot of dialog.querySelectorAll("[data-fill]")) slot.textContent = button.dataset[slot.dataset.fill] ?? "";
  form.reset();
  fill(form, JSON.parse(button.dataset.values ?? "{}"));
  show(form, null);
  form.querySelector("[data-tried]")?.replaceChildren();
  sum(form);
  fit(form);
  for (const b of form.querySelectorAll("button")) b.disabled = false;
  for (const b of form.querySelectorAll("[aria-busy]")) b.removeAttribute("aria-busy");
  opened.set(dialog, { data: { ...button.dataset }, body: form.dataset.body, revision: form.dataset.revision, key: newKey() });
  dialog.showModal();
  if (form.querySelector("[data-fixed]:read-only")) form.elements.kind.focus();
}

function fill(form, values) {
  for (const [name, value] of Object.entries(values)) {
    const field = form.elements[name];
    field.value = field.dataset.unit ? exact(value / field.dataset.unit) : value;
  }
  for (const field of form.querySelectorAll("[data-fixed]")) field.readOnly = field.value !== "";
}

// exact drops the last digits, in which a number of another unit goes astray.
const exact = (n) => Number(n.toPrecision(12));

// numberOf is what a field's number is in the API's units, of which the small ones
// are counted whole.
function numberOf(field) {
  const unit = Number(field.dataset.unit ?? 1);
  return unit > 1 ? Math.round(field.valueAsNumber * unit) : exact(field.valueAsNumber * unit);
}

// fit shows the parts of a form that are for the kind chosen in it.
function fit(form) {
  for (const part of form.querySelectorAll("[data-for]")) {
    part.hidden = !part.dataset.for.split(" ").includes(form.elements[by(form)].value);
    if (part.tagName === "FIELDSET") part.disabled = part.hidden;
  }
}
const by = (form) => form.dataset.by ?? "kind";
document.addEventListener("change", (e) => e.target.form && e.target.name === by(e.target.form) && fit(e.target.form));

// beside says at a field what is wrong with it, "" for nothing.
function beside(field, text) {
  document.getElementById(`${field.id}-wrong`)?.remove();
  field.removeAttribute("aria-invalid");
  field.removeAttribute("aria-describedby");
  if (text === "") return;
  field.setAttribute("aria-invalid", "true");
  field.setAttribute("aria-describedby", `${field.id}-wrong`);
  field.after(el("p", { class: "wrong", id: `${field.id}-wrong`, "data-put": true }, text));
}

// show puts a problem where people who look and people who listen find it: beside the
// fields it names, the rest below the form.
function show(form, problem) {
  const box = form.querySelector(".problem");
  for (const field of form.querySelectorAll("[aria-invalid]")) beside(field, "");
  if (!problem) return box.replaceChildren();
  // A field of several values is named by what stands before its part's name.
  const names = (field, name) => name === field.name || name?.startsWith(`${field.name}.`) || name?.split(".").pop() === field.name;
  const fieldOf = (e) => [...form.elements].find((f) => f.name && names(f, e.field) && f.checkVisibility());
  const said = (e, field) => (e.field?.startsWith(`${field.name}.`) ? `${e.field.slice(field.name.length + 1)}: ${e.message}` : capital(e.message));
  if (problem.errors?.length && problem.errors.every(fieldOf)) {
    box.replaceChildren();
    for (const field of new Set(problem.errors.map(fieldOf))) {
      beside(field, problem.errors.filter((e) => fieldOf(e) === field).map((e) => said(e, field)).join("\n"));
    }
    return fieldOf(problem.errors[0]).focus();
  }
  const errors = problem.errors?.length > 1 || (problem.errors?.length === 1 && !problem.message.includes(problem.errors[0].message)) ? problem.errors : [];
  box.replaceChildren(
    problem.message,
    errors.length ? el("ul", {}, ...errors.map((e) => el("li", {}, e.field ? `${e.field}: ${e.message}` : e.message))) : null,
    problem.openPage ? el("p", {}, el("a", { href: problem.openPage }, "Go to the open request")) : null,
  );
}

function page(apiAddress) {
  return apiAddress.replace(/^\/api\/v1/, "");
}

async function send(path, body, key, method, isNew) {
  try {
    return await change(method ?? "POST", path, body, key, isNew ? { "If-None-Match": "*" } : {});
  } catch (err) {
    if (err instanceof Problem) {
      if (err.open) err.openPage = page(err.open);
      throw err;
    }
    const away = new Problem(0, { detail: "The server cannot be reached. Nothing is known to have happened; trying again is safe." });
    away.unknown = true;
    throw away;
  }
}

function taken(answer, from) {
  if (from.dataset.then === "open" && answer.links?.self) {
    location.assign(page(answer.links.self));
    return;
  }
  if (from.dataset.said) toast(from.dataset.said);
  refresh();
}

// shaped reads what was typed into a field as what the API wants.
function shaped(field) {
  const parts = (by) => field.value.split(by).map((part) => part.trim()).filter(Boolean);
  switch (field.dataset.shape) {
    case "list":
      return parts(",");
    case "claims":
      return Object.fromEntries(parts("\n").map((line) => {
        const [, name, source, target] = line.match(/^([^:]*):(.*?)=>(.*)$/) ?? ["", line, "", ""];
        return [name.trim(), { source: source.trim(), target: target.trim() }];
      }));
    case "pairs":
      return Object.fromEntries(parts("\n").map((line) => {
        const at = line.indexOf("=");
        return at < 0 ? [line, ""] : [line.slice(0, at).trim(), line.slice(at + 1).trim()];
      }));
  }
  return field.value.trim();
}

// put sets a value in a body; a name may lead into it: mapping.target.
function put(body, name, value) {
  const path = name.split(".");
  const last = path.pop();
  for (const part of path) body = body[part] ??= {};
  body[last] = value;
}

// collect is what a form sends. What is folded away is left out: whoever does not open it
// says nothing of it.
function collect(form, state) {
  const body = JSON.parse(state.body ?? "{}"); // as it was when the dialog opened: a decision is about what was read then
  for (const name of (form.dataset.fillBody ?? "").split(" ").filter(Boolean)) body[name] = state.data[name];
  for (const field of form.elements) {
    if (!field.name || "address" in field.dataset || field.closest("details:not([open])")) continue;
    if (field.type === "checkbox") body[field.name] = field.checked && !field.disabled;
    else if (field.matches(":disabled") || (field.type === "number" && field.value === "")) continue;
    else if (field.type === "number") body[field.name] = numberOf(field);
    else put(body, field.name, "json" in field.dataset ? JSON.parse(field.value) : shaped(field));
  }
  return body;
}

// attempt asks the API to try what a form says, and shows what comes of it.
async function attempt(button) {
  if (button.getAttribute("aria-busy") === "true") return;
  const form = button.form;
  const state = opened.get(form.closest("dialog"));
  const mine = () => shows(form, state);
  const box = form.querySelector("[data-tried]");
  show(form, null);
  box.replaceChildren();
  button.setAttribute("aria-busy", "true");
  try {
    const answer = await send(state.data.try, { from: state.data.from, ...collect(form, state) }, newKey());
    if (!mine()) return;
    const cells = (row) => Object.entries(row ?? {}).map(([name, value]) => `${name}: ${value ?? "NULL"}`).join("\n");
    box.replaceChildren(answer.data.length ? el("table", { class: "tried" },
      el("caption", {}, "What it makes of the first rows; nothing was changed"),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, state.data.from), el("th", { scope: "col" }, state.data.to))),
      el("tbody", {}, ...answer.data.map((r) => el("tr", {}, el("td", {}, cells(r.source)), el("td", r.problem ? { class: "bad" } : {}, r.problem ? `nothing: ${r.problem}` : cells(r.result))))))
      : el("p", { class: "small" }, "It can be used. The source has no rows to try it on."));
  } catch (problem) {
    if (mine()) show(form, problem);
  } finally {
    if (mine()) button.removeAttribute("aria-busy");
  }
}

// shows reports whether a form's dialog is still open as it was when it was sent: it may
// have been closed meanwhile, and opened again for something else.
function shows(form, state) {
  const dialog = form.closest("dialog");
  return dialog.isConnected && dialog.open && opened.get(dialog) === state;
}

async function submit(form) {
  const dialog = form.closest("dialog");
  const state = opened.get(dialog);
  if (state.sending) return;
  state.sending = true;
  const body = collect(form, state);
  const buttons = [...form.querySelectorAll("button:not([data-close])")];
  for (const b of buttons) b.disabled = true;
  show(form, null);
  try {
    const address = (state.data.action ?? form.dataset.post).replace(/{(\w+)}/, (_, name) => encodeURIComponent(form.elements[name].value.trim()));
    const answer = await send(address, body, state.key, form.dataset.method, "new" in form.dataset);
    if (shows(form, state)) dialog.close();
    taken(answer, form);
  } catch (problem) {
    // The same key again only while it is unknown whether the first call arrived.
    if (!problem.unknown) state.key = newKey();
    if (shows(form, state)) show(form, problem);
    else toast(problem.message, problem.openPage);
  } finally {
    state.sending = false;
    if (shows(form, state)) for (const b of buttons) b.disabled = state.revision !== form.dataset.revision;
  }
}

const keys = new WeakMap();

async function press(button) {
  if (button.getAttribute("aria-busy") === "true") return;
  button.setAttribute("aria-busy", "true");
  const key = keys.get(button) ?? newKey();
  keys.set(button, key);
  try {
    const answer = await send(button.dataset.post, JSON.parse(button.dataset.body ?? "{}"), key, button.dataset.method);
    keys.delete(button);
    taken(answer, button);
  } catch (problem) {
    if (!problem.unknown) keys.delete(button);
    toast(problem.message, problem.openPage);
  } finally {
    button.removeAttribute("aria-busy");
  }
}

let fading = 0;
export function toast(text, href) {
  const box = document.getElementById("toast");
  clearTimeout(fading);
  box.replaceChildren(el("p", {}, text, href ? " " : null, href ? el("a", { href }, "Go to the open request") : null),
    el("button", { class: "btn plain", click: () => box.replaceChildren() }, "Close"));
  fading = setTimeout(() => box.matches(":hover, :focus-within") || box.replaceChildren(), 9000);
}

async function copy(button) {
  const source = document.getElementById(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(source.textContent);
    announce("Copied");
    const text = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = text), 1500);
  } catch {
    // Without a secure connection scripts may not write to the clipboard.
    getSelection().selectAllChildren(source);
  }
}

document.addEventListener("click", (e) => {
  const button = e.target.closest("button");
  if (!button || button.disabled) return;
  if (button.dataset.dialog) open(button);
  else if (button.dataset.post) press(button);
  else if (button.hasAttribute("data-try")) attempt(button);
  else if (button.dataset.copy) copy(button);
  else if (button.hasAttribute("data-close")) button.closest("dialog").close();
});

// What will be sent depends on what is left out.
function sum(form) {
  const box = form.querySelector("[data-sum]");
  if (!box) return;
  const rows = Number(box.dataset.sum) - (form.elements.skip_identical.checked ? Number(box.dataset.less) : 0);
  box.textContent = rows === 1 ? "1 row" : `${count.format(rows)} rows`;
}
document.addEventListener("change", (e) => e.target.name === "skip_identical" && sum(e.target.form));

// What the browser finds wrong stands beside the field too.
document.addEventListener("invalid", (e) => {
  const field = e.target;
  if (!field.closest("dialog")) return;
  e.preventDefault();
  beside(field, field.validity.patternMismatch ? field.title : field.validationMessage);
  if (field === field.form.querySelector(":invalid:not(fieldset)")) field.focus();
}, true);
document.addEventListener("input", (e) => e.target.hasAttribute("aria-invalid") && e.target.closest("dialog") && beside(e.target, ""));

document.addEventListener("submit", (e) => {
  if (!e.target.closest("dialog")) return;
  e.preventDefault();
  submit(e.target);
});

// A decision is about rows that somebody has read. When others come while the
// dialog is open, or somebody else decides, it must not go on as if nothing was.
onUpdate(() => {
  for (const dialog of document.querySelectorAll("dialog[open]")) {
    const form = dialog.querySelector("form");
    const state = opened.get(dialog);
    sum(form);
    if (!state || state.revision === form.dataset.revision) continue;
    show(form, { message: "The staged rows have changed since you opened this. Go back and read them again." });
    for (const b of form.querySelectorAll("button:not([data-close])")) b.disabled = true;
  }
});
new MutationObserver((changes) => {
  for (const change of changes) {
    for (const gone of change.removedNodes) {
      if (gone.nodeName === "DIALOG" && gone.open && !gone.isConnected && !opened.get(gone)?.sending) toast("This request has moved on while you were deciding: it takes no decision now.");
    }
  }
}).observe(document.getElementById("main"), { childList: true });
