// Messages as elements. What a model or a user wrote becomes text nodes, never markup.

import { compared, shares, told, work } from "./answer.js";

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** Colours of the drafters, in the order in which they are met. */
export const known = [];

export function colour(source) {
  if (source === "target") return "";
  if (!known.includes(source)) known.push(source);
  return `s${known.indexOf(source) % 6}`;
}

/** Prose and fenced code: [{ code, language, from, to }], where each lies in `text`. */
export function blocks(text) {
  const found = [];
  let open = null;
  let from = 0;
  let at = 0;
  for (const line of text.split(/(?<=\n)/)) {
    const fence = /^ {0,3}```\s*([\w+#.-]*)\s*$/.exec(line.replace(/\n$/, ""));
    if (fence && (open === null || !fence[1])) {
      if (at > from) found.push({ code: open !== null, language: open || "", from, to: at });
      open = open === null ? fence[1] : null;
      from = at + line.length;
    }
    at += line.length;
  }
  if (at > from) found.push({ code: open !== null, language: open || "", from, to: at });
  for (const block of found) { // empty lines beside code are the code's margin
    if (block.code) continue;
    while (block.from > 0 && text[block.from] === "\n" && block.from < block.to) block.from += 1;
    while (block.to < text.length && text[block.to - 1] === "\n" && block.from < block.to) block.to -= 1;
  }
  return found.filter((block) => block.code || block.from < block.to);
}

/** Characters `from` to `to` of the text, as spans by who wrote them where `written` says so. */
function spans(text, from, to, written, offset) {
  if (!written || offset < 0) return [document.createTextNode(text.slice(from, to))];
  const out = [];
  let at = -offset;
  let run = null; // neighbours of one source are one span
  for (const [piece, source] of written) {
    const a = Math.max(at, from);
    const b = Math.min(at + piece.length, to);
    at += piece.length;
    if (a < b && run && run.source === source) run.to = b;
    else if (a < b) out.push((run = { source, from: a, to: b }));
    if (at >= to) break;
  }
  const end = out.length ? out[out.length - 1].to : from;
  if (end < to) out.push({ source: "target", from: end, to });
  return out.flatMap(({ source, from: a, to: b }) => {
    const mark = colour(source);
    const piece = text.slice(a, b);
    if (!mark) return [document.createTextNode(piece)];
    const word = Math.max(piece.search(/\S/), 0); // a blank before it may end a line, and would be a mark of its own there
    const marked = element("span", { class: mark, title: `written by ${source}` }, piece.slice(word));
    return word ? [document.createTextNode(piece.slice(0, word)), marked] : [marked];
  });
}

/** The text in prose and code, into `parent`. */
function fill(parent, text, written, offset, copy) {
  parent.replaceChildren(
    ...blocks(text).map((block) => {
      const inner = spans(text, block.from, block.to, written, offset);
      if (!block.code) return element("div", { class: "prose", dir: "auto" }, ...inner);
      const bar = element("div", { class: "code-bar" }, element("span", {}, block.language || "code"));
      bar.append(element("button", { type: "button", onclick: () => copy(text.slice(block.from, block.to)) }, "Copy"));
      return element("div", { class: "code" }, bar, element("pre", { tabindex: "0" }, element("code", {}, ...inner)));
    }),
  );
}

/** One answer's text, thoughts and figures, into `parent`; called again as it grows. */
export function fillAnswer(parent, answer, { colours, running, copy }) {
  if (!parent.firstChild) {
    parent.append(
      element("details", { class: "thoughts", hidden: true }, element("summary", {}, "Thoughts"), element("div")),
      element("div", { class: "said" }),
      element("p", { class: "error", role: "alert", hidden: true }),
      element("p", { class: "figures" }),
    );
  }
  const [thoughts, said, error, figures] = parent.children;
  const raw = colours ? answer.written.map(([text]) => text).join("") : "";
  const begin = answer.reasoning ? raw.indexOf(answer.reasoning) : 0;
  const offset = begin < 0 ? -1 : raw.indexOf(answer.content, begin + answer.reasoning.length);
  thoughts.hidden = !answer.reasoning;
  if (answer.reasoning) fill(thoughts.lastChild, answer.reasoning, colours && answer.written, begin, copy);
  fill(said, answer.content, colours && answer.written, offset, copy);
  said.classList.toggle("running", running);
  if (running && !answer.content) said.replaceChildren(element("span", { class: "quiet" }, "…"));
  error.hidden = !answer.error;
  error.textContent = answer.error || "";
  const by = answer.figures.drafter === "none" || shares(answer).length < 2 ? [] : shares(answer);
  const sum = by.reduce((total, [, n]) => total + n, 0);
  figures.replaceChildren(told(answer).join(" · "));
  for (const [source, n] of by) {
    figures.append(" · ", element("span", { class: colour(source) || null }, source), `\u00a0${Math.round((100 * n) / sum)}\u00a0%`);
  }
  if (answer.finish === "length" && !running) figures.append(" · stopped at the token limit");
  if (answer.stopped) figures.append(" · stopped");
  if (answer.figures.drafter !== "none" && !running && work(answer)) {
    figures.append(element("span", { class: "why", title: answer.figures.off_because || null }, work(answer)));
  }
}

/** A message of either kind. `acts`: its buttons, [label, function, name for screen readers]. */
export function message(its, options) {
  const who = its.role === "user" ? "You" : "Answer";
  const made = element("article", { class: its.role, "aria-label": who });
  if (its.role === "user") made.append(element("div", { class: "said", dir: "auto" }, its.content));
  else {
    const all = its.plain ? [its.plain, its.answer] : [its.answer];
    const columns = element("div", { class: its.plain ? "columns" : "column" });
    for (const answer of all) {
      const parts = element("div", { class: "parts" });
      const column = element("section", { "aria-label": answer.label || "Answer" });
      if (its.plain) column.append(element("h3", {}, answer.label));
      column.append(parts);
      columns.append(column);
      fillAnswer(parts, answer, options);
    }
    made.append(columns);
    if (its.plain && its.plain.finish && its.answer.finish) {
      const [same, words] = compared(its.plain, its.answer);
      made.append(element("p", { class: same ? "verdict same" : "verdict other" }, `${same ? "✓" : "✗"} ${words}`));
    }
  }
  const bar = element("div", { class: "acts" });
  for (const [label, act, name] of options.acts) {
    bar.append(element("button", { type: "button", onclick: act, "aria-label": name }, label));
  }
  made.append(bar);
  return made;
}
