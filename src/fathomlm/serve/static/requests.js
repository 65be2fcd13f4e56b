// From settings and a conversation to a request, and a request as a command or a program.

// `side` is {model, depth}; `shape` that of its model. The messages are those before turn `index`, and its own.
export function requestOf(conversation, index, side, shape, settings, seed) {
  const fathom = { depths: true };
  if (shape.kind === "routed") fathom.max_depth = side.depth;
  else if (shape.kind === "exits") fathom.threshold = side.depth;
  const request = { model: side.model, max_tokens: settings.tokens, temperature: settings.temperature, seed, stream: true, fathom };
  if (settings.topP < 1) request.top_p = settings.topP;
  if (settings.topK > 0) request.top_k = settings.topK;
  if (settings.stop.length) request.stop = settings.stop;
  const user = conversation.turns[index].user;
  if (conversation.kind !== "chat") return { ...request, prompt: user, logprobs: 4 };
  return { ...request, messages: messagesOf(conversation, index).concat({ role: "user", content: user }), logprobs: true, top_logprobs: 4 };
}

// What was said before a turn. A conversation goes on from the first reply where two stand side by side; a turn without a reply was not heard.
export function messagesOf(conversation, index) {
  const messages = conversation.system ? [{ role: "system", content: conversation.system }] : [];
  for (const turn of conversation.turns.slice(0, index)) {
    const text = textOf(turn.replies[0]);
    if (text) messages.push({ role: "user", content: turn.user }, { role: "assistant", content: text });
  }
  return messages;
}

export function textOf(reply) {
  return reply ? reply.tokens.map((token) => token.text).join("") : "";
}

export function asCurl(request, origin, hasKey) {
  const path = request.messages ? "chat/completions" : "completions";
  const body = JSON.stringify({ ...request, stream: false }).replaceAll("'", "'\\''");
  const key = hasKey ? ` -H "Authorization: Bearer $KEY"` : "";
  return `curl ${origin}/v1/${path}${key} -H 'Content-Type: application/json' -d '${body}'`;
}

export function asPython(request, origin) {
  const { fathom, stream, top_k, messages, prompt, ...rest } = request;
  const values = Object.entries({ ...rest, ...(messages ? { messages } : { prompt }) });
  const fields = values.map(([name, value]) => `    ${name}=${python(value)},`).join("\n");
  const call = messages ? "chat.completions" : "completions";
  const extra = python(top_k === undefined ? { fathom } : { fathom, top_k });
  return `from openai import OpenAI\n\nclient = OpenAI(base_url="${origin}/v1", api_key="...")\nanswer = client.${call}.create(\n${fields}\n    extra_body=${extra},\n)\nprint(answer.choices[0])\n`;
}

function python(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([k, v]) => `${JSON.stringify(k)}: ${python(v)}`).join(", ")}}`;
  return JSON.stringify(value);
}

export function asMarkdown(conversation, title) {
  const parts = [`# ${title}`];
  if (conversation.system) parts.push(`**System:** ${conversation.system}`);
  for (const turn of conversation.turns) {
    parts.push(`**${conversation.kind === "chat" ? "You" : "Prompt"}:** ${turn.user}`);
    for (const reply of turn.replies) parts.push(`**${reply.title}:** ${textOf(reply)}`, `_${reply.facts}_`);
  }
  return `${parts.join("\n\n")}\n`;
}
