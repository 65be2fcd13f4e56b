// Talking to the server: what it is, and texts as they are written.

export async function ask(path, key) {
  const reply = await fetch(path, { headers: headers(key) });
  if (!reply.ok) throw await failure(reply);
  return reply.json();
}

// Loads a model, which may take long; returns what it can do.
export async function load(model, key) {
  const reply = await fetch("v1/fathom/load", {
    method: "POST", headers: { ...headers(key), "Content-Type": "application/json" }, body: JSON.stringify({ model }),
  });
  if (!reply.ok) throw await failure(reply);
  return reply.json();
}

// Reads a text token by token. `onToken` gets {text, depth, confidence, logprob, top}.
export async function write(request, key, signal, onToken) {
  const path = request.messages ? "v1/chat/completions" : "v1/completions";
  const reply = await fetch(path, {
    method: "POST", signal, headers: { ...headers(key), "Content-Type": "application/json" }, body: JSON.stringify(request),
  });
  if (!reply.ok) throw await failure(reply);
  let finish = null;
  for await (const event of events(reply.body)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices?.[0];
    if (!choice) continue;
    finish = choice.finish_reason ?? finish;
    const token = tokenOf(choice);
    if (token) onToken(token);
  }
  return finish;
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function failure(reply) {
  const told = await reply.json().catch(() => null);
  return Object.assign(new Error(told?.error?.message ?? `the server answered ${reply.status}`), { status: reply.status });
}

// Server-sent events, one JSON object each, up to [DONE].
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

function tokenOf(choice) {
  const text = choice.text ?? choice.delta?.content ?? "";
  const depth = choice.fathom?.depths?.[0] ?? null;
  const confidence = choice.fathom?.confidences?.[0] ?? null;
  const told = choice.logprobs?.content?.[0];
  if (told) {
    const top = (told.top_logprobs ?? []).map((one) => [one.token, one.logprob]);
    return { text, depth, confidence, logprob: told.logprob, top };
  }
  const plain = choice.logprobs;
  if (plain?.tokens?.length) {
    return { text, depth, confidence, logprob: plain.token_logprobs[0], top: Object.entries(plain.top_logprobs?.[0] ?? {}) };
  }
  return text || depth !== null ? { text, depth, confidence, logprob: null, top: [] } : null;
}
