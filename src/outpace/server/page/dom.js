// What the page says and takes outside of chats.

export const at = (id) => document.getElementById(id);

/** Whether what had the focus is gone: keys would begin at the page's top again. */
export function lost() {
  return document.activeElement === document.body || !document.activeElement.checkVisibility();
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied.");
  } catch {
    notice("The browser does not let this page copy: open it at localhost or by https.");
  }
}

export function say(words) {
  at("status").textContent = words;
}

export function notice(words) {
  at("notice").textContent = words;
  at("notice").hidden = !words;
}
