// The page: chats, the composer, settings. Everything is plain modules; nothing is fetched from elsewhere.

import { ask, chat as asked, key } from "./api.js";
import { cutOff, emptyAnswer, take, told } from "./answer.js";
import { at, copy, lost, notice, say } from "./dom.js";
import { element, colour, fillAnswer, known, message } from "./render.js";
import { chats, keepChats, keepSettings, newChat, onOtherTabs, settings } from "./store.js";

const state = { all: chats(), chat: null, settings: settings(), running: null, editing: -1, traces: false, models: [] };
const EXAMPLES = [
  ["Repeat", "Write a recipe for pancakes. List the ingredients, then repeat the list with amounts, then the steps."],
  ["Code", "Write a Python function that adds two numbers, then one that multiplies two numbers."],
  ["Prose", "Tell a short story about a lighthouse keeper and a whale."],
];
const FIELDS = ["temperature", "top_p", "seed", "max_tokens", "drafter"];

// -- what is asked -----------------------------------------------------------------------------------------------------

/** The request's body. `seed`: where the settings have none and two answers must have one. */
function bodyOf(messages, off, seed) {
  const { temperature, top_p, max_tokens, drafter, model } = state.settings;
  const body = { messages, speculation: { trace: true } };
  if (model) body.model = model;
  if (temperature !== "") body.temperature = Number(temperature);
  if (top_p !== "") body.top_p = Number(top_p);
  if (max_tokens !== "") body.max_tokens = Number(max_tokens);
  if (state.settings.seed !== "") body.seed = Number(state.settings.seed);
  else if (seed !== undefined) body.seed = seed;
  if (off || drafter === "off") body.speculation.off = true;
  else if (drafter) body.speculation.drafter = drafter;
  return body;
}

function conversation(chat) {
  const system = chat.system.trim();
  const said = chat.messages.map((its) => ({ role: its.role, content: its.role === "user" ? its.content : its.answer.content }));
  return system ? [{ role: "system", content: system }, ...said] : said;
}

/** Ask for an answer to the chat as it stands. `both`: plain, too, beside it. */
async function answer(both = at("both").checked) {
  const chat = state.chat;
  const messages = conversation(chat);
  const its = { role: "assistant", content: "", answer: emptyAnswer("With drafts") };
  if (both) its.plain = emptyAnswer("Plain");
  chat.messages.push(its);
  const stopping = new AbortController();
  state.running = { chat, message: its, stopping };
  renderAll();
  if (lost()) at("stop").focus();
  say("The answer begins.");
  const seed = both ? Math.floor(Math.random() * 2 ** 32) : undefined;
  for (const one of both ? [its.plain, its.answer] : [its.answer]) {
    const body = bodyOf(messages, one === its.plain, seed);
    if (both) body.reuse_prefix = false; // so that neither has a start over the other
    if (!(await stream(one, body, stopping.signal))) break;
  }
  if (both && !its.answer.ids.length) its.answer.error ||= its.plain.error || "It was not asked.";
  its.content = its.answer.content;
  state.running = null;
  keep();
  renderAll();
  if (lost()) at("messages").focus({ preventScroll: true }); // not the message: that would bring a phone's keyboard up
  say(its.answer.error ? `It failed: ${its.answer.error}` : `The answer is done: ${told(its.answer).join(", ")}.`);
  refreshModels();
}

/** One answer to its end; false when it failed or was stopped. */
async function stream(one, body, signal) {
  const begun = performance.now();
  try {
    for await (const event of asked(body, signal)) {
      take(one, event, performance.now(), begun);
      draw();
    }
    return true;
  } catch (error) {
    if (signal.aborted) one.stopped = true;
    else one.error = error.message;
    if (error.status === 401) openSettings(at("key"));
    return false;
  }
}

function stop() {
  state.running?.stopping.abort();
}

function send(text, both) {
  if (state.running || !text.trim()) return;
  if (!state.chat.messages.length) {
    state.chat.title = text.trim().slice(0, 80);
    if (!state.all.includes(state.chat)) state.all.unshift(state.chat);
  }
  state.chat.messages.push({ role: "user", content: text });
  answer(both);
}

/** The answer at `i` again, in place of what follows the question. */
function again(i, both) {
  if (state.running) return;
  state.chat.messages.length = i;
  answer(both);
}

function edited(i, text) {
  if (state.running || !text.trim()) return;
  state.editing = -1;
  state.chat.messages.length = i;
  if (!i) state.chat.title = text.trim().slice(0, 80);
  send(text);
}

// -- drawing -----------------------------------------------------------------------------------------------------------

let drawing = 0;

/** What runs, drawn once a frame. */
function draw() {
  drawing ||= requestAnimationFrame(() => {
    drawing = 0;
    const run = state.running;
    if (!run || run.chat !== state.chat) return;
    const down = atBottom();
    const all = run.message.plain ? [run.message.plain, run.message.answer] : [run.message.answer];
    at("messages").querySelectorAll("article:last-of-type .parts").forEach((parts, i) => {
      fillAnswer(parts, all[i], { colours: state.settings.colours, running: !all[i].finish, copy });
    });
    renderLegend();
    if (down) scrollDown();
  });
}

const atBottom = () => at("messages").scrollHeight - at("messages").scrollTop - at("messages").clientHeight < 60;

function scrollDown() {
  at("messages").scrollTop = at("messages").scrollHeight;
}

function renderAll() {
  const down = atBottom();
  renderList();
  const { messages } = state.chat;
  at("messages").replaceChildren(
    ...messages.map((its, i) => {
      if (i === state.editing) return editor(its, i);
      const running = state.running?.message === its;
      return message(its, { acts: running ? [] : acts(its, i), running, colours: state.settings.colours, copy });
    }),
  );
  if (!messages.length) at("messages").append(beginning());
  at("messages").setAttribute("aria-busy", String(Boolean(state.running)));
  at("system-text").value = state.chat.system;
  at("stop").hidden = !state.running;
  at("send").hidden = Boolean(state.running);
  renderLegend();
  if (down) scrollDown();
}

/** What an empty chat shows: examples, each answered plain and with drafts, side by side. */
function beginning() {
  const words = "The same answer, sooner: a drafter proposes tokens, and the model checks several at once. Choose an example to"
    + " see it beside plain decoding, or ask something.";
  const examples = EXAMPLES.map(([name, text]) =>
    element("li", {}, element("button", { type: "button", onclick: () => send(text, true) }, element("b", {}, name), ` ${text}`)));
  return element("div", { class: "empty" }, element("p", {}, words), element("ul", { "aria-label": "Examples" }, ...examples));
}

function acts(its, i) {
  const text = its.role === "user" ? its.content : its.answer.content;
  const found = [["Copy", () => copy(text), `Copy ${its.role === "user" ? "the message" : "the answer"}`]];
  if (its.role === "user") found.push(["Edit", () => edit(i), "Edit the message and ask again"]);
  else {
    found.push(["Again", () => again(i), "Answer again"]);
    if (!its.plain) found.push(["Compare", () => again(i, true), "Ask again, beside plain decoding"]);
    if (state.traces && its.answer.id) found.push(["Steps", () => openSteps(its.answer.id), "Show the steps of this answer"]);
  }
  return found;
}

function editor(its, i) {
  const area = element("textarea", { rows: "3", "aria-label": "Edit the message" });
  area.value = its.content;
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      edited(i, area.value);
    }
  });
  const ask = element("button", { type: "button", class: "main", onclick: () => edited(i, area.value) }, "Ask again");
  const leave = element("button", { type: "button", onclick: () => edit(-1) }, "Cancel");
  return element("article", { class: "user editing" }, area, element("div", { class: "row" }, ask, leave));
}

function edit(i) {
  if (state.running) return;
  state.editing = i;
  renderAll();
  (i < 0 ? at("text") : at("messages").querySelector(".editing textarea")).focus();
}

function renderLegend() {
  const answers = state.settings.colours ? state.chat.messages.filter((its) => its.answer).map((its) => its.answer) : [];
  const wrote = answers.flatMap((its) => its.written.map(([, source]) => source));
  const asked = answers.flatMap((its) => (its.figures.drafter || "").split("+")); // those that wrote nothing, too
  const names = [...new Set([...wrote, ...asked])].filter((name) => name && name !== "target" && name !== "none");
  const marks = names.map((name) => element("li", {}, element("span", { class: colour(name) }, name),
    wrote.includes(name) ? " drafted it, the model agreed" : " wrote nothing here"));
  at("legend").replaceChildren(...(names.length ? [...marks, element("li", { class: "quiet" }, "no colour: the model itself")] : []));
}

function renderList() {
  at("list").replaceChildren(
    ...state.all.map((chat) => {
      const name = chat.title || "New chat";
      const current = chat === state.chat ? "true" : null;
      const open = element("button", { type: "button", "aria-current": current, onclick: () => show(chat) }, name);
      const gone = { type: "button", class: "gone", "aria-label": `Delete ${name}`, onclick: () => remove(chat) };
      return element("li", {}, open, element("button", gone, "×"));
    }),
  );
}

// -- chats -------------------------------------------------------------------------------------------------------------

function show(chat) {
  state.chat = chat;
  state.editing = -1;
  document.body.classList.remove("side-open");
  at("chats").setAttribute("aria-expanded", "false");
  at("system").open = Boolean(chat.system);
  renderAll();
  scrollDown();
  at("text").focus();
}

function remove(chat) {
  if (state.running?.chat === chat) stop();
  state.all = state.all.filter((its) => its !== chat);
  keep();
  if (chat === state.chat) show(state.all[0] || newChat());
  else renderList();
  if (lost()) at("new").focus();
}

function keep() {
  if (!keepChats(state.all)) notice("The browser keeps no more: older chats lost their colours or were dropped.");
}

/** What another tab kept. The chat that is being answered or edited here stays as it is here. */
function takeOver(others) {
  const busy = state.running ? state.running.chat : state.editing >= 0 ? state.chat : null;
  state.all = others.map((its) => (its.id === busy?.id ? busy : its));
  if (busy && !state.all.includes(busy)) state.all.unshift(busy);
  const open = state.all.find((its) => its.id === state.chat.id);
  if (open && open !== state.chat) {
    state.chat = open;
    if (document.activeElement !== at("system-text")) at("system-text").value = open.system;
    renderAll();
  } else renderList();
}

// -- settings ----------------------------------------------------------------------------------------------------------

function openSettings(field) {
  for (const name of FIELDS) at(name).value = state.settings[name];
  at("key").value = key.get();
  if (!at("panel").open) at("panel").showModal();
  (field || at("temperature")).focus();
}

function takeSettings() {
  for (const name of FIELDS) {
    if (at(name).checkValidity()) state.settings[name] = at(name).value.trim();
  }
  keepSettings(state.settings);
  if (key.get() !== at("key").value.trim()) {
    key.set(at("key").value.trim());
    refreshModels();
  }
}

function look() {
  const { theme, colours } = state.settings;
  if (theme) document.documentElement.dataset.theme = theme;
  at("colours").setAttribute("aria-pressed", String(colours));
  at("both").checked = state.settings.both;
}

function set(name, value) {
  state.settings[name] = value;
  keepSettings(state.settings);
  look();
}

async function refreshModels() {
  try {
    state.models = (await ask("v1/models")).data;
    notice("");
  } catch (error) {
    notice(error.message);
    if (error.status === 401) openSettings(at("key"));
    return;
  }
  const names = state.models.map((its) => its.id);
  if (!names.includes(state.settings.model)) state.settings.model = names[0];
  at("model").replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  at("model").value = state.settings.model;
  const drafters = state.models.find((its) => its.id === state.settings.model)?.drafters || [];
  const choices = [["", "The server's own"], ["off", "None: plain decoding"], ...drafters.map((name) => [name, name])];
  at("drafter").replaceChildren(...choices.map(([value, name]) => element("option", { value }, name)));
  if (!choices.some(([value]) => value === state.settings.drafter)) state.settings.drafter = "";
  at("drafter").value = state.settings.drafter;
}

function openSteps(id) {
  sessionStorage.setItem("outpace.drafters", JSON.stringify(known));
  at("steps").src = `page/steps#${encodeURIComponent(id)}`;
  at("viewer").showModal();
}

// -- the page ----------------------------------------------------------------------------------------------------------

function submitText() {
  const text = at("text").value;
  if (state.running || !text.trim()) return;
  at("text").value = "";
  send(text);
  scrollDown();
}

function onKey(event) {
  if (event.key === "Escape" && !at("panel").open && !at("viewer").open) {
    if (document.body.classList.contains("side-open")) at("chats").click();
    else if (state.editing >= 0) edit(-1);
    else stop();
  } else if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    show(newChat());
  }
}

function onTextKey(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submitText();
  } else if (event.key === "ArrowUp" && !at("text").value) {
    const last = state.chat.messages.findLastIndex((its) => its.role === "user");
    if (last >= 0) {
      event.preventDefault();
      edit(last);
    }
  }
}

function wire() {
  at("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submitText();
  });
  at("text").addEventListener("keydown", onTextKey);
  document.addEventListener("keydown", onKey);
  at("stop").onclick = stop;
  at("new").onclick = () => show(newChat());
  at("chats").onclick = () => {
    const open = document.body.classList.toggle("side-open");
    at("chats").setAttribute("aria-expanded", String(open));
    at(open ? "new" : "chats").focus();
  };
  at("colours").onclick = () => {
    set("colours", !state.settings.colours);
    renderAll();
  };
  at("both").onchange = () => set("both", at("both").checked);
  at("theme").onclick = () => {
    const dark = state.settings.theme ? state.settings.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    set("theme", dark ? "light" : "dark");
  };
  at("settings").onclick = () => openSettings();
  at("close").onclick = () => at("panel").close();
  at("panel").addEventListener("close", takeSettings);
  at("forget").onclick = () => {
    if (!confirm("Delete all chats?")) return;
    stop();
    state.all = [];
    keep();
    at("panel").close();
    show(newChat());
  };
  document.querySelector("main").addEventListener("click", () => {
    if (document.body.classList.contains("side-open")) at("chats").click();
  });
  at("leave").onclick = () => at("viewer").close();
  addEventListener("message", (event) => {
    if (event.source === at("steps").contentWindow && event.data === "leave") at("viewer").close();
  });
  addEventListener("pagehide", () => { // what had come is kept; nothing else is written, another tab may have kept more
    if (!state.running) return;
    cutOff(state.running.message);
    keep();
  });
  onOtherTabs(takeOver);
  at("viewer").addEventListener("close", () => at("steps").removeAttribute("src"));
  at("model").onchange = () => {
    set("model", at("model").value);
    refreshModels();
  };
  at("system-text").addEventListener("input", () => {
    state.chat.system = at("system-text").value;
    if (!state.all.includes(state.chat)) state.all.unshift(state.chat);
    keep();
    renderList();
  });
}

async function start() {
  wire();
  look();
  show(state.all[0] || newChat());
  try {
    state.traces = (await ask("page/about")).traces;
  } catch (error) {
    notice(error.message);
  }
  await refreshModels();
  renderAll();
}

start();
