// The list of staged rows. A row's place among those of the filter is known, so any
// page can be read at once: of all rows only those near the window are in the
// document, pages far away are forgotten, and the end is where it is. It costs the
// same at 200 rows and at 2,000,000.

import { get } from "./api.js";
import { count, el } from "./dom.js";
import { onUpdate, refresh } from "./live.js";
import { ago } from "./time.js";

const pageRows = 200;
const keepPages = 30; // pages whose rows stay in memory
const slack = 12; // rows kept above and below the window
const tallest = 4_000_000; // pixels: what is longer scrolls in proportion
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
    list.restart(figure.dataset.effect, Number(figure.dataset.rows));
    refresh();
  });
  document.addEventListener("submit", (e) => {
    if (e.target.id !== "find-key") return; // it comes with the first row
    e.preventDefault();
    list.find(e.target.elements.key.value);
  });
  onUpdate(() => list.sync());
}

class List {
  constructor(root, panel) {
    this.root = root;
    this.panel = panel;
    this.nodes = new Map(); // index → element
    this.build();
    this.restart(root.dataset.effect, Number(root.dataset.total));
    const frame = () => {
      this.frame ??= requestAnimationFrame(() => {
        this.frame = null;
        this.render();
      });
    };
    addEventListener("scroll", () => {
      frame();
      clearTimeout(this.still);
      this.still = setTimeout(() => this.settleScroll(), 200);
    }, { passive: true });
    addEventListener("resize", frame);
  }

  // build lays the list out for the columns there are; they come with the first row.
  build() {
    const { columns, inline, key, label } = this.root.dataset;
    this.layout = columns + inline;
    this.columns = JSON.parse(columns) ?? [];
    this.inline = JSON.parse(inline) ?? [];
    this.keyColumns = JSON.parse(key) ?? [];
    this.key = new Set(this.keyColumns);
    this.head = el("div", { class: "r heads", role: "row", "aria-rowindex": "1" },
      el("span", { class: "n", role: "columnheader" }, "#"),
      ...this.inline.map((name) => el("span", { class: "value" + (this.key.has(name) ? " key" : ""), role: "columnheader", title: this.key.has(name) ? `${name}, key` : name }, name)),
      el("span", { class: "effect", role: "columnheader" }, "Effect"));
    this.window = el("div", { class: "window", role: "rowgroup" });
    this.grid = el("div", { class: "rowgrid", role: "grid", "aria-label": label, "aria-readonly": "true", "aria-colcount": String(this.inline.length + 2) },
      el("div", { class: "headgroup", role: "rowgroup" }, this.head), this.window);
    this.grid.style.setProperty("--cols", Math.max(this.inline.length, 1));
    this.tail ??= el("div", { class: "tail", role: "status" });
    this.root.replaceChildren(this.grid, this.tail);
    this.window.addEventListener("pointerover", (e) => e.pointerType !== "touch" && this.hover(e));
    this.window.addEventListener("pointerleave", () => this.settle());
    this.window.addEventListener("focusin", (e) => this.focused(e));
    this.window.addEventListener("click", (e) => this.click(e));
    this.grid.addEventListener("keydown", (e) => this.keydown(e));
  }

  // restart shows the rows of an effect from their beginning.
  restart(effect, total) {
    this.abort?.abort();
    this.abort = new AbortController(); // of reads that are for another list
    this.pages = new Map(); // number → { rows, stale, reading }
    this.effect = effect;
    this.told = total; // how many rows the page says there are
    this.end = Infinity; // where reading has come to an end
    this.version = this.root.dataset.version;
    this.judged = this.root.dataset.judged;
    this.decided = this.root.dataset.decided;
    this.failed = "";
    this.active = 0; // the row that Tab reaches
    this.shown = 0; // the row in the panel; the first stands for all until one is chosen
    this.pinned = undefined;
    this.offset = this.last = 0;
    for (const node of this.nodes.values()) node.remove();
    this.nodes.clear();
    this.panel.clear();
    this.render();
  }

  // sync takes over what an update of the page has changed about the list.
  sync() {
    const { columns, inline, effect, total, version, judged, decided } = this.root.dataset;
    if (columns + inline !== this.layout) {
      this.build();
      return this.restart(effect, Number(total));
    }
    if (effect !== this.effect) return this.restart(effect, Number(total));
    this.decided = decided;
    const moved = Number(total) !== this.told || judged !== this.judged;
    for (const page of this.pages.values()) {
      // Among the rows of one effect, and of a page not full, places move.
      page.stale ||= version !== this.version || (moved && (this.effect !== "" || page.rows?.length < pageRows || page.rows?.some((row) => row.effect === "unknown")));
    }
    if (moved || version !== this.version) this.end = Infinity;
    this.told = Number(total);
    this.version = version;
    this.judged = judged;
    this.render();
  }

  get total() {
    return Math.min(this.told, this.end);
  }

  get full() {
    return this.total * this.rowHeight();
  }

  get height() {
    return Math.min(this.full, tallest);
  }

  row(index) {
    return this.pages.get(Math.floor(index / pageRows))?.rows?.[index % pageRows];
  }

  async read(number) {
    const page = this.pages.get(number) ?? {};
    this.pages.set(number, page);
    if (page.reading) return;
    page.reading = true;
    page.stale = false; // what changes from now on makes it so again
    const abort = this.abort;
    const query = new URLSearchParams({ limit: pageRows, position: number * pageRows });
    if (this.effect) query.set("effect", this.effect);
    try {
      const answer = await get(`${this.root.dataset.url}?${query}`, abort.signal);
      if (abort !== this.abort) return;
      page.rows = answer.data;
      if (answer.data.length < pageRows) this.end = Math.min(this.end, number * pageRows + answer.data.length);
      this.failed = "";
    } catch (err) {
      if (abort !== this.abort || err.name === "AbortError") return;
      page.stale = true;
      this.failed = err.message;
    } finally {
      page.reading = false;
      if (abort === this.abort) this.render();
    }
  }

  // top is how many pixels of the whole list are above the window. A list that is
  // too tall for a document stands in a shorter one: small steps move it as far as
  // the document, large ones in proportion.
  top() {
    const at = -this.window.getBoundingClientRect().top;
    const over = this.full - this.height;
    if (over <= 0) {
      this.offset = 0;
    } else if (at <= 0) {
      this.offset = 0;
    } else if (at >= this.height - innerHeight) {
      this.offset = over;
    } else if (Math.abs(at - this.last) > 2 * innerHeight) {
      this.offset = this.proportion(at);
    }
    this.last = at;
    return at + this.offset;
  }

  proportion(at) {
    return Math.min(1, Math.max(0, at / (this.height - innerHeight))) * (this.full - this.height);
  }

  // settleScroll moves the document to where the list stands in proportion, without
  // moving what is seen, so that neither end comes too early.
  settleScroll() {
    if (this.full <= this.height) return;
    const top = this.top();
    const reach = (this.full - innerHeight) / (this.height - innerHeight);
    const wanted = top / reach;
    if (this.last <= 0 || top >= this.full - innerHeight || Math.abs(wanted - this.last) < 50) return;
    this.moveTo(top);
  }

  // moveTo brings a place of the whole list to the window's upper edge.
  moveTo(top) {
    if (this.full <= this.height) return scrollBy(0, top - this.top());
    const at = Math.round(top / ((this.full - innerHeight) / (this.height - innerHeight)));
    scrollBy(0, at + this.window.getBoundingClientRect().top);
    this.last = -this.window.getBoundingClientRect().top;
    this.offset = Math.max(0, Math.min(top - this.last, this.full - this.height));
    this.render();
  }

  // render puts the rows near the window into the document.
  render() {
    const height = this.rowHeight();
    this.window.style.height = `${this.height}px`;
    const top = this.top();
    const from = Math.max(0, Math.floor(top / height) - slack);
    const to = Math.min(this.total, Math.ceil((top + innerHeight) / height) + slack);
    for (const [index, node] of this.nodes) {
      // The focused row stays, or the keyboard would lose its place.
      if ((index < from || index >= to) && !(node === document.activeElement && index < this.total)) {
        node.remove();
        this.nodes.delete(index);
      }
    }
    for (let index = from; index < to; index++) {
      const row = this.row(index);
      const old = this.nodes.get(index);
      if (old && old.row === row) old.style.translate = `0 ${index * height - this.offset}px`;
      else this.place(index, row, old, height);
    }
    if (to > from && !this.failed) {
      const first = Math.floor(from / pageRows);
      const last = Math.floor((to - 1) / pageRows);
      for (let i = first; i <= last; i++) {
        const page = this.pages.get(i);
        if (!page?.rows || page.stale) this.read(i);
      }
      this.forget(first, last);
    }
    this.grid.setAttribute("aria-rowcount", String(this.total + 1));
    this.say(Math.max(0, Math.ceil(top / height)), Math.min(this.total, Math.floor((top + innerHeight) / height)));
    const row = this.row(this.shown);
    if (row) this.panel.show(row, this);
  }

  rowHeight() {
    return this.head.isConnected ? parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--row")) : 34;
  }

  place(index, row, old, height) {
    const node = this.element(index, row);
    node.row = row;
    node.index = index; // before it may take the focus over
    node.style.translate = `0 ${index * height - this.offset}px`;
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
    this.nodes.set(index, node);
  }

  element(index, row) {
    const attributes = { class: "r", role: "row", "aria-rowindex": String(index + 2), "aria-selected": index === this.pinned ? "true" : "false" };
    if (!row) {
      attributes.class += " loading";
      return el("div", attributes, el("span", { class: "n" }), ...this.inline.map(() => el("span", { class: "value" })));
    }
    if (row.superseded) attributes.class += " superseded";
    if (row.superseded_by) attributes.title = `Superseded by ${row.superseded_by.op} ${row.superseded_by.seq}`;
    return el("div", attributes,
      el("span", { class: "n", role: "rowheader" }, count.format(row.n)),
      ...this.inline.map((name) => el("span", { class: "value" + (this.key.has(name) ? " key" : ""), role: "gridcell" }, value(own(row.row, name), inlineText))),
      el("span", { class: "effect", role: "gridcell" }, el("i", { class: `swatch fill-${row.effect}` }), row.superseded ? overtaken(row, "Superseded") : words[row.effect] ?? row.effect));
  }

  forget(from, to) {
    const held = [...this.pages].map(([i, page]) => [i, i < from ? from - i : i > to ? i - to : 0, page]);
    if (held.length <= keepPages) return;
    held.sort((a, b) => b[1] - a[1]);
    for (const [i, distance, page] of held.slice(0, held.length - keepPages)) if (distance > 0 && !page.reading) this.pages.delete(i);
  }

  say(from, to) {
    const total = this.total;
    let text = "";
    if (this.failed) text = `The rows could not be read: ${this.failed}`;
    else if (total === 0) text = this.effect ? `No row ${verb(this.effect)}.` : this.root.dataset.growing === "true" ? "No rows staged so far." : "No rows were staged.";
    else text = total === 1 ? "1 row" : `All ${count.format(total)} rows`;
    const place = document.getElementById("place");
    if (place) place.textContent = total > 1 && to > from ? `Rows ${count.format(from + 1)} to ${count.format(to)} of ${count.format(total)}` : "";
    if (this.tail.dataset.text === text) return;
    this.tail.dataset.text = text;
    this.tail.replaceChildren(text, this.failed ? " " : "", this.failed ? el("button", { class: "btn", click: () => { this.failed = ""; this.render(); } }, "Try again") : "");
  }

  // find goes to where a key stands, as PostgreSQL orders keys.
  async find(typed) {
    const box = document.getElementById("find-problem");
    const say = (text) => {
      box.textContent = text;
      document.getElementById("find").setAttribute("aria-invalid", text ? "true" : "false");
    };
    say("");
    const key = this.typedKey(typed);
    if (key.length !== this.keyColumns.length) {
      return say(typed.trim() === "" ? "Type a key first." : `The key is (${this.keyColumns.join(", ")}): give ${this.keyColumns.length} values separated by commas.`);
    }
    const query = new URLSearchParams({ limit: 1 });
    if (this.effect) query.set("effect", this.effect);
    for (const part of key) query.append("from_key", part);
    try {
      const answer = await get(`${this.root.dataset.url}?${query}`, this.abort.signal);
      const found = answer.data[0];
      if (!found) say("No row of this list stands at or after that key: this is its end.");
      else if (found.key.some((part, i) => part !== key[i])) say(`No row has just this key: the next is ${found.key.join(", ")}.`);
      this.goTo(found ? answer.position : this.total - 1);
    } catch (err) {
      if (err.name !== "AbortError") say(err.message);
    }
  }

  // typedKey reads a key as people type it: values separated by commas, or JSON.
  typedKey(typed) {
    const text = typed.trim();
    if (text === "") return [];
    if (text.startsWith("[")) {
      try {
        return JSON.parse(text).map(String);
      } catch {
        // a value that begins like this
      }
    }
    return this.keyColumns.length === 1 ? [text] : text.split(",").map((part) => part.trim());
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
    this.shown = index;
    const row = this.row(index);
    if (row) this.panel.show(row, this);
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
    const to = { ArrowDown: this.active + 1, ArrowUp: this.active - 1, PageDown: this.active + screen, PageUp: this.active - screen, Home: 0, End: this.total - 1 }[e.key];
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

  // goTo focuses a row, wherever it is; its values come when they are read.
  goTo(index) {
    index = Math.min(index, this.total - 1);
    if (index < 0) return;
    const height = this.rowHeight();
    const upper = this.head.getBoundingClientRect().bottom;
    const lower = (document.querySelector(".decide")?.getBoundingClientRect().top ?? innerHeight) - height - 4;
    const y = index * height - this.top(); // below the window's upper edge
    if (Math.abs(y) > 2 * innerHeight) this.moveTo(index * height - (upper + lower) / 2);
    else if (y < upper) scrollBy(0, y - upper);
    else if (y > lower) scrollBy(0, y - lower);
    this.activate(index);
    this.render();
    this.nodes.get(index)?.focus({ preventScroll: true });
  }

  focusActive() {
    this.goTo(this.active);
  }
}

function verb(effect) {
  return { insert: "would be inserted", overwrite: "would be overwritten", identical: "is identical", superseded: "was superseded" }[effect] ?? "is of unknown effect";
}

// overtaken names the change that a row gave way to, while history has it.
function overtaken(row, otherwise) {
  return row.superseded_by ? `${row.superseded_by.op} ${row.superseded_by.seq}` : otherwise;
}

const arrived = { waiting: "still on its way", held: "held at the receiver", quarantined: "quarantined", skipped: "skipped", dropped: "dropped: not sent", applied: "applied" };

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
    this.said = "";
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
    const { from, to, decided } = list.root.dataset;
    if (row === this.row && decided === this.decided) return;
    const another = row.n !== this.row?.n;
    const said = JSON.stringify([row, decided]);
    this.row = row;
    this.decided = decided;
    if (said === this.said) return; // read again, and the same: what was scrolled, opened and selected stays
    this.said = said;
    const changed = new Set(row.changed);
    this.title.replaceChildren(`Row ${count.format(row.n)}: `, el("span", { class: "mono" }, value(row.key.join(", "), inlineText)));
    this.verdict.replaceChildren(
      row.superseded ? el("strong", { class: "warn" }, "Superseded: a newer change of this key overtook it, so it is not sent. ") : "",
      row.superseded_by ? `That was ${row.superseded_by.op} ${row.superseded_by.seq}, ${ago(Date.parse(row.superseded_by.at))}, ${arrived[row.superseded_by.state] ?? row.superseded_by.state}. ` : "",
      (list.root.dataset.decided === "true" ? {
        insert: `When it was judged, ${to} lacked this row.`,
        overwrite: `When it was judged, ${to} held other values in ${columnsOf(changed)}.`,
        identical: `When it was judged, ${to} held exactly this row.`,
      } : {
        insert: `${to} lacks this row: releasing it inserts it.`,
        overwrite: `${to} holds other values: releasing it overwrites ${columnsOf(changed)}.`,
        identical: `${to} holds exactly this row.`,
      })[row.effect] ?? `The agent of ${to} has not compared this row.`,
      list.root.dataset.life ? " " : "",
      list.root.dataset.life ? el("a", { href: `${list.root.dataset.life}&key=${encodeURIComponent(JSON.stringify(row.key))}` }, "All that happened to this row") : "");
    if (row.problem) this.verdict.prepend(el("strong", { class: "warn" }, `The mapping makes nothing of this row: ${row.problem}. `));
    // With a mapping, what it makes stands before what was read.
    const sent = row.result ?? row.row;
    const beside = row.effect === "overwrite" && row.receiver;
    const line = (name) => {
      const differs = changed.has(name);
      return el("tr", { class: differs ? "changed" : null },
        el("th", { scope: "row" }, differs ? el("span", { class: "mark", "aria-hidden": "true" }, "≠") : null, name, differs ? el("span", { class: "sr" }, ", changed") : null),
        beside && differs ? el("td", { class: "before" }, whole(own(row.receiver, name))) : null,
        el("td", beside ? (differs ? { class: "after" } : { colspan: "2" }) : {}, whole(own(sent, name))));
    };
    const columns = row.result ? Object.keys(row.result) : list.columns;
    const rest = beside ? columns.filter((c) => !changed.has(c)) : columns;
    const table = el("table", { class: "whole" },
      el("caption", { class: "sr" }, `All columns of row ${row.n}`),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Column"),
        beside ? el("th", { scope: "col" }, `${to} ${list.root.dataset.decided === "true" ? "then" : "now"}`) : null, el("th", { scope: "col" }, row.result ? "what the mapping makes" : beside ? `staged from ${from}` : "Value"))),
      el("tbody", {},
        ...(beside ? columns.filter((c) => changed.has(c)).map(line) : []),
        beside && rest.length ? el("tr", { class: "group" }, el("th", { colspan: "3", scope: "colgroup" }, "Unchanged")) : null,
        ...rest.map(line)));
    const source = row.result ? el("table", { class: "whole" },
      el("caption", {}, `Read on ${from}`),
      el("tbody", {}, ...list.columns.map((name) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, whole(own(row.row, name))))))) : null;
    this.body.replaceChildren(...[table, source].filter(Boolean));
    if (another) this.inner.scrollTop = 0;
  }
}

const columnsOf = (changed) => (changed.size === 1 ? "1 column" : `${changed.size} columns`);

// whole is a value in full; a very long one at first only its beginning.
function whole(text) {
  if (typeof text !== "string" || text.length <= panelText) return value(text, Infinity);
  const box = el("span", {}, text.slice(0, panelText) + "…");
  const all = el("button", { class: "all", click: () => { box.textContent = text; all.remove(); } }, `Show all ${count.format(text.length)} characters`);
  return el("span", {}, box, all);
}
