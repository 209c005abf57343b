// What the page asks of its server: OpenAI's API, streamed.

/** An error with the words of the server. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem("outpace.key") || "",
  set: (value) => (value ? sessionStorage.setItem("outpace.key", value) : sessionStorage.removeItem("outpace.key")),
};

function headers() {
  return key.get() ? { authorization: `Bearer ${key.get()}` } : {};
}

async function refused(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // no body of ours: a proxy's, whose status line says as much
  }
  const after = response.headers.get("retry-after");
  return new Refused(response.status, after ? `${message} (in ${after} s)` : message);
}

/** What a GET says. */
export async function ask(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) throw await refused(response);
  return response.json();
}

/** Every event of a streamed chat, as it comes. `signal` ends it, at the server too. */
export async function* chat(body, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers() },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true }, return_token_ids: true }),
    signal,
  });
  if (!response.ok) throw await refused(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Refused(0, "the server went away in the middle of the answer");
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
      if (!data.length) continue; // a sign of life
      if (data[0] === "[DONE]") return;
      const told = JSON.parse(data.join("\n"));
      if (told.error) throw new Refused(500, told.error.message);
      yield told;
    }
  }
}
