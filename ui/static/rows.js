// The list of staged rows. Pages come from the API as one scrolls; of all rows only
// those near the window are in the document, and pages far away are forgotten and
// read again by their cursor. So the list costs the same at 200 rows and at 200,000.

import { get } from "./api.js";
import { count, el } from "./dom.js";
import { onUpdate, refresh } from "./live.js";

const pageRows = 200;
const keepPages = 30; // pages whose rows stay in memory
const ahead = 1500; // pixels before the end at which the next page is asked for
const slack = 12; // rows kept above and below the window
const inlineText = 160; // characters of a value in the list
const panelText = 4000; // characters of a value in the panel, until all is wanted

const words = { insert: "Insert", overwrite: "Overwrite", identical: "Identical", unknown: "Unknown" };

export function startRows() {
  const root = document.getElementById("rows");
  if (!root) return;
  const panel = new Panel(document.getElementById("panel"));
  const list = new List(root, panel);
  panel.onclose = () => list.focusActive();

  // The figures above the list are its filter.
  document.addEventListener("click", (e) => {
    const figure = e.target.closest("a[data-effect]");
    if (!figure || e.metaKey || e.ctrlKey || e.shiftKey) return;
    e.preventDefault();
    history.replaceState(null, "", figure.href);
    root.dataset.effect = figure.dataset.effect;
    list.restart();
    refresh();
  });
  onUpdate(() => list.sync());
}

class List {
  constructor(root, panel) {
    this.root = root;
    this.panel = panel;
    this.nodes = new Map(); // index → element
    this.active = 0; // the row that Tab reaches
    this.wanted = -1; // a row to focus once it is there
    this.build();
    this.restart();
    const frame = () => {
      this.frame ??= requestAnimationFrame(() => {
        this.frame = null;
        this.render();
      });
    };
    addEventListener("scroll", frame, { passive: true });
    addEventListener("resize", frame);
    new IntersectionObserver((seen) => seen.some((s) => s.isIntersecting) && this.more(), { rootMargin: `0px 0px ${ahead}px` }).observe(this.tail);
  }

  // build lays the list out for the columns there are; they come with the first row.
  build() {
    const { columns, inline, key, label } = this.root.dataset;
    this.layout = columns + inline;
    this.columns = JSON.parse(columns) ?? [];
    this.inline = JSON.parse(inline) ?? [];
    this.key = new Set(JSON.parse(key) ?? []);
    this.head = el("div", { class: "r heads", role: "row", "aria-rowindex": "1" },
      el("span", { class: "n", role: "columnheader" }, "#"),
      ...this.inline.map((name) => el("span", { class: "value" + (this.key.has(name) ? " key" : ""), role: "columnheader", title: this.key.has(name) ? `${name}, key` : name }, name)),
      el("span", { class: "effect", role: "columnheader" }, "Effect"));
    this.window = el("div", { class: "window", role: "rowgroup" });
    this.grid = el("div", { class: "rowgrid", role: "grid", "aria-label": label, "aria-readonly": "true", "aria-colcount": String(this.inline.length + 2) },
      el("div", { class: "headgroup", role: "rowgroup" }, this.head), this.window);
    this.grid.style.setProperty("--cols", Math.max(this.inline.length, 1));
    const tail = el("div", { class: "tail", role: "status" });
    this.root.replaceChildren(this.grid, this.tail ?? tail);
    this.tail ??= tail;
    this.window.addEventListener("pointerover", (e) => e.pointerType !== "touch" && this.hover(e));
    this.window.addEventListener("pointerleave", () => this.settle());
    this.window.addEventListener("focusin", (e) => this.focused(e));
    this.window.addEventListener("click", (e) => this.click(e));
    this.grid.addEventListener("keydown", (e) => this.keydown(e));
  }

  // restart reads the list from its beginning.
  restart() {
    this.run = (this.run ?? 0) + 1; // answers of earlier runs are dropped
    this.abort?.abort();
    this.abort = new AbortController();
    this.pages = [];
    this.effect = this.root.dataset.effect;
    this.version = this.root.dataset.version;
    this.judged = this.root.dataset.judged;
    this.loading = false;
    this.failed = "";
    this.active = 0;
    this.shown = this.pinned = undefined;
    for (const node of this.nodes.values()) node.remove();
    this.nodes.clear();
    this.panel.clear();
    this.render();
    this.more();
  }

  // sync takes over what an update of the page has changed about the list.
  sync() {
    const { columns, inline, effect, version, judged, growing } = this.root.dataset;
    if (columns + inline !== this.layout) {
      this.build();
      return this.restart();
    }
    if (effect !== this.effect) return this.restart();
    // Pages that may have changed are read again when they are in view.
    if (version !== this.version) for (const page of this.pages) page.stale = true;
    if (judged !== this.judged) for (const page of this.pages) page.stale ||= page.rows?.some((row) => row.effect === "unknown");
    if (growing === "true" || judged !== this.judged) {
      const last = this.pages.at(-1);
      if (!last) this.more();
      else if (!last.next) this.read(this.pages.length - 1);
    }
    this.version = version;
    this.judged = judged;
    this.render();
  }

  get length() {
    return (this.pages.length && this.pages.at(-1).start + this.pages.at(-1).count) || 0;
  }

  get finished() {
    const last = this.pages.at(-1);
    return last !== undefined && !last.fresh && !last.next;
  }

  pageOf(index) {
    let low = 0;
    let high = this.pages.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.pages[middle].start <= index) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  row(index) {
    const page = this.pages[this.pageOf(index)];
    return page?.rows?.[index - page.start];
  }

  // more asks for the page after the last one.
  more() {
    if (this.loading || this.finished) return;
    const cursor = this.pages.at(-1)?.next ?? "";
    this.pages.push({ cursor, start: this.length, count: 0, rows: null, next: "", fresh: true });
    this.read(this.pages.length - 1);
  }

  async read(i) {
    const page = this.pages[i];
    if (page.reading) return;
    page.reading = true;
    const run = this.run;
    const first = page.fresh;
    if (first) this.loading = true;
    const query = new URLSearchParams({ limit: pageRows });
    if (this.effect) query.set("effect", this.effect);
    if (page.cursor) query.set("cursor", page.cursor);
    try {
      const answer = await get(`${this.root.dataset.url}?${query}`, this.abort.signal);
      if (run !== this.run) return;
      page.rows = answer.data;
      page.next = answer.next_cursor ?? "";
      page.fresh = page.stale = false;
      this.failed = "";
      const after = this.pages[i + 1];
      if (after && (after.cursor !== page.next || page.count !== answer.data.length)) this.pages.length = i + 1; // the list has moved under it
      page.count = answer.data.length;
    } catch (err) {
      if (run !== this.run || err.name === "AbortError") return;
      this.failed = err.message;
      if (first) this.pages.pop();
    } finally {
      page.reading = false;
      if (run === this.run) {
        if (first) this.loading = false;
        this.render(true);
      }
    }
  }

  // render puts the rows near the window into the document.
  render(changed) {
    const length = this.length;
    const height = this.rowHeight();
    this.window.style.height = `${length * height}px`;
    const top = -this.window.getBoundingClientRect().top;
    const from = Math.max(0, Math.floor(top / height) - slack);
    const to = Math.min(length, Math.ceil((top + innerHeight) / height) + slack);
    for (const [index, node] of this.nodes) {
      // The focused row stays, or the keyboard would lose its place.
      if ((index < from || index >= to) && !(node === document.activeElement && index < length)) {
        node.remove();
        this.nodes.delete(index);
      }
    }
    for (let index = from; index < to; index++) {
      const row = this.row(index);
      const old = this.nodes.get(index);
      if (old && old.row === row) continue;
      this.place(index, row, old, height);
    }
    if (to > from) {
      for (let i = this.pageOf(from); i <= this.pageOf(to - 1); i++) {
        const page = this.pages[i];
        if ((!page.rows || page.stale) && !page.fresh) this.read(i);
      }
      this.forget(this.pageOf(from), this.pageOf(to - 1));
    }
    this.grid.setAttribute("aria-rowcount", this.finished ? String(length + 1) : "-1");
    this.say(length);
    if (changed && this.wanted >= 0) this.goTo(this.wanted);
    if (changed) {
      // The first row stands for all until one is chosen.
      const row = this.row((this.shown ??= 0));
      if (row && row !== this.panel.row) this.panel.show(row, this);
    }
    // The observer tells of changes only; the end may have stayed in view.
    const box = this.tail.getBoundingClientRect();
    if (!this.failed && box.top < innerHeight + ahead) this.more();
  }

  rowHeight() {
    return this.head.isConnected ? parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--row")) : 34;
  }

  place(index, row, old, height) {
    const node = this.element(index, row);
    node.row = row;
    node.style.translate = `0 ${index * height}px`;
    node.tabIndex = index === this.active ? 0 : -1;
    if (old) {
      const focused = old === document.activeElement;
      old.replaceWith(node);
      if (focused) node.focus({ preventScroll: true });
    } else {
      // Reading order is document order, whichever way one scrolls.
      let next = null;
      for (const [i, other] of this.nodes) if (i > index && (next === null || i < next.index)) next = other;
      this.window.insertBefore(node, next);
    }
    node.index = index;
    this.nodes.set(index, node);
  }

  element(index, row) {
    const attributes = { class: "r", role: "row", "aria-rowindex": String(index + 2), "aria-selected": index === this.pinned ? "true" : "false" };
    if (!row) {
      attributes.class += " loading";
      return el("div", attributes, el("span", { class: "n" }), ...this.inline.map(() => el("span", { class: "value" })));
    }
    if (row.superseded) attributes.class += " superseded";
    return el("div", attributes,
      el("span", { class: "n", role: "rowheader" }, count.format(row.n)),
      ...this.inline.map((name) => el("span", { class: "value" + (this.key.has(name) ? " key" : ""), role: "gridcell" }, value(own(row.row, name), inlineText))),
      el("span", { class: "effect", role: "gridcell" }, el("i", { class: `swatch fill-${row.effect}` }), row.superseded ? "Superseded" : words[row.effect] ?? row.effect));
  }

  forget(from, to) {
    const held = this.pages.map((page, i) => [page, i < from ? from - i : i > to ? i - to : 0]).filter(([page]) => page.rows);
    if (held.length <= keepPages) return;
    held.sort((a, b) => b[1] - a[1]);
    for (const [page, distance] of held.slice(0, held.length - keepPages)) if (distance > 0) page.rows = null;
  }

  say(length) {
    const total = Number(this.root.dataset.total);
    let text = "";
    if (this.failed) text = `The rows could not be read: ${this.failed}`;
    else if (this.loading && length === 0) text = "Reading the staged rows…";
    else if (this.finished && length === 0) text = this.effect ? `No row would ${verb(this.effect)}.` : this.root.dataset.growing === "true" ? "No rows staged so far." : "No rows were staged.";
    else if (this.finished) text = length === 1 ? "1 row" : `All ${count.format(length)} rows`;
    else text = `${count.format(length)} of ${count.format(Math.max(total, length))} rows; more come as you scroll`;
    if (this.tail.dataset.text === text) return;
    this.tail.dataset.text = text;
    this.tail.replaceChildren(text, this.failed ? " " : "", this.failed ? el("button", { class: "btn", click: () => { this.failed = ""; this.more(); this.render(); } }, "Try again") : "");
  }

  // Pointer, focus and touch show a row; what was chosen by key or press stays.

  at(e) {
    return e.target.closest(".r");
  }

  hover(e) {
    const node = this.at(e);
    if (!node?.row || e.buttons) return;
    clearTimeout(this.delay);
    this.delay = setTimeout(() => this.reveal(node.index), 40);
  }

  settle() {
    clearTimeout(this.delay);
    if (this.pinned !== undefined) this.delay = setTimeout(() => this.reveal(this.pinned), 120);
  }

  focused(e) {
    const node = this.at(e);
    if (!node) return;
    this.activate(node.index);
    this.pin(node.index);
  }

  click(e) {
    const node = this.at(e);
    if (!node?.row) return;
    if (!getSelection().isCollapsed) return; // somebody is selecting text
    node.focus({ preventScroll: true });
    this.pin(node.index);
    this.panel.open();
  }

  pin(index) {
    if (this.pinned !== undefined) this.nodes.get(this.pinned)?.setAttribute("aria-selected", "false");
    this.pinned = index;
    this.nodes.get(index)?.setAttribute("aria-selected", "true");
    this.reveal(index);
  }

  reveal(index) {
    const row = this.row(index);
    if (!row) return;
    this.shown = index;
    this.panel.show(row, this);
  }

  activate(index) {
    const old = this.nodes.get(this.active);
    if (old) old.tabIndex = -1;
    this.active = index;
    const now = this.nodes.get(index);
    if (now) now.tabIndex = 0;
  }

  keydown(e) {
    if (e.altKey || e.ctrlKey || e.metaKey) return;
    const screen = Math.max(1, Math.floor(innerHeight / this.rowHeight()) - 4);
    const to = { ArrowDown: this.active + 1, ArrowUp: this.active - 1, PageDown: this.active + screen, PageUp: this.active - screen, Home: 0, End: this.length - 1 }[e.key];
    if (to !== undefined) {
      e.preventDefault();
      this.goTo(Math.max(0, to));
    } else if (e.key === "Enter" || e.key === " ") {
      e.preventDefault();
      this.panel.open();
      this.panel.focus();
    } else if (e.key === "Escape") {
      this.panel.close();
    }
  }

  // goTo focuses a row, reading on when it is not there yet.
  goTo(index) {
    if (index >= this.length && !this.finished) {
      this.wanted = index;
      return this.more();
    }
    this.wanted = -1;
    index = Math.min(index, this.length - 1);
    if (index < 0) return;
    const height = this.rowHeight();
    const top = this.window.getBoundingClientRect().top + index * height;
    const upper = this.head.getBoundingClientRect().bottom;
    const lower = (document.querySelector(".decide")?.getBoundingClientRect().top ?? innerHeight) - height - 4;
    if (top < upper) scrollBy(0, top - upper);
    else if (top > lower) scrollBy(0, top - lower);
    this.activate(index);
    this.render();
    this.nodes.get(index)?.focus({ preventScroll: true });
  }

  focusActive() {
    this.goTo(this.active);
  }
}

function verb(effect) {
  return { insert: "be inserted", overwrite: "be overwritten", identical: "stay identical" }[effect] ?? "have an unknown effect";
}

// own reads a column whatever it is called.
function own(row, name) {
  return row && Object.hasOwn(row, name) ? row[name] : undefined;
}

function value(text, longest) {
  if (text === null || text === undefined) return el("span", { class: "null" }, text === null ? "NULL" : "");
  if (text === "") return el("span", { class: "empty" }, "empty");
  return text.length > longest ? `${text.slice(0, longest)}…` : text;
}

// Panel shows one row whole: beside the list, or as a sheet on a narrow screen.
class Panel {
  constructor(root) {
    this.root = root;
    this.title = el("h3", { tabindex: "-1" });
    this.verdict = el("p", { class: "verdict" });
    this.body = el("div", {});
    this.inner = el("div", { class: "inner", tabindex: "-1" },
      el("div", { class: "bar-top" }, this.title, el("button", { class: "btn plain close", "aria-label": "Close the row", click: () => this.close() }, "Close")),
      this.verdict, this.body);
    root.replaceChildren(this.inner);
    root.addEventListener("keydown", (e) => e.key === "Escape" && this.close());
    this.clear();
  }

  clear() {
    this.row = null;
    this.title.textContent = "Whole row";
    this.verdict.textContent = "A row shows here when you point at it, tap it or move to it with Tab and the arrow keys.";
    this.body.replaceChildren();
    this.root.classList.remove("shown");
  }

  open() {
    this.root.classList.add("shown");
  }

  close() {
    this.root.classList.remove("shown");
    this.onclose?.();
  }

  focus() {
    this.title.focus();
  }

  show(row, list) {
    if (this.row === row) return;
    this.row = row;
    const { from, to } = list.root.dataset;
    const changed = new Set(row.changed);
    this.title.replaceChildren(`Row ${count.format(row.n)}: `, el("span", { class: "mono" }, value(row.key.join(", "), inlineText)));
    this.verdict.replaceChildren(
      row.superseded ? el("strong", { class: "warn" }, "Superseded: a newer change of this key overtook it, so it is not sent. ") : "",
      {
        insert: `${to} lacks this row: releasing it inserts it.`,
        overwrite: `${to} holds other values: releasing it overwrites ${changed.size === 1 ? "1 column" : `${changed.size} columns`}.`,
        identical: `${to} holds exactly this row.`,
      }[row.effect] ?? `The agent of ${to} has not compared this row yet.`);
    const beside = row.effect === "overwrite" && row.receiver;
    const line = (name) => {
      const differs = changed.has(name);
      return el("tr", { class: differs ? "changed" : null },
        el("th", { scope: "row" }, differs ? el("span", { class: "mark", "aria-hidden": "true" }, "≠") : null, name, differs ? el("span", { class: "sr" }, ", changed") : null),
        beside && differs ? el("td", { class: "before" }, whole(own(row.receiver, name))) : null,
        el("td", beside ? (differs ? { class: "after" } : { colspan: "2" }) : {}, whole(own(row.row, name))));
    };
    const columns = list.columns;
    const rest = beside ? columns.filter((c) => !changed.has(c)) : columns;
    const table = el("table", { class: "whole" },
      el("caption", { class: "sr" }, `All columns of row ${row.n}`),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Column"),
        beside ? el("th", { scope: "col" }, `${to} now`) : null, el("th", { scope: "col" }, beside ? `staged from ${from}` : "Value"))),
      el("tbody", {},
        ...(beside ? columns.filter((c) => changed.has(c)).map(line) : []),
        beside && rest.length ? el("tr", { class: "group" }, el("th", { colspan: "3", scope: "colgroup" }, "Unchanged")) : null,
        ...rest.map(line)));
    this.body.replaceChildren(table);
    this.inner.scrollTop = 0;
  }
}

// whole is a value in full; a very long one at first only its beginning.
function whole(text) {
  if (typeof text !== "string" || text.length <= panelText) return value(text, Infinity);
  const box = el("span", {}, text.slice(0, panelText) + "…");
  const all = el("button", { class: "all", click: () => { box.textContent = text; all.remove(); } }, `Show all ${count.format(text.length)} characters`);
  return el("span", {}, box, all);
}
