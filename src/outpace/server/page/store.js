// Chats and settings, kept by the browser. The API key is not among them.

const CHATS = "outpace.chats";
const SETTINGS = "outpace.settings";

export const DEFAULTS = {
  temperature: "0", top_p: "", seed: "", max_tokens: "512", drafter: "", model: "", colours: true, both: false, theme: "",
};

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise; // not ours, or storage is turned off
  }
}

export function settings() {
  return { ...DEFAULTS, ...read(SETTINGS, {}) };
}

export function chats() {
  const found = read(CHATS, []);
  return Array.isArray(found) ? found.filter((its) => its && Array.isArray(its.messages)) : [];
}

export function newChat() {
  return { id: crypto.randomUUID ? crypto.randomUUID() : String(Date.now()), title: "", system: "", messages: [] };
}

/** Keep it; false when the browser does not. */
export function keepSettings(value) {
  return write(SETTINGS, value);
}

/** Keep them, the newest first. Where there is no room, the oldest lose their colours, then go. */
export function keepChats(all) {
  let kept = all.filter((chat) => chat.messages.length || chat.system);
  if (write(CHATS, kept)) return true;
  kept = kept.map((chat, i) => (i ? { ...chat, messages: chat.messages.map(bare) } : chat));
  while (kept.length && !write(CHATS, kept)) kept.pop();
  return false;
}

/** `take` is given the chats whenever another tab of this browser has kept some. */
export function onOtherTabs(take) {
  addEventListener("storage", (event) => {
    if (event.key === CHATS || event.key === null) take(chats());
  });
}

function bare(message) {
  const { role, content, answer } = message;
  if (!answer) return { role, content };
  return { role, content, answer: { ...answer, written: [], ids: [] } };
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false; // no room, or storage is turned off: the caller says so
  }
}
