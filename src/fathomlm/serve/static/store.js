// What outlives a reload, in this browser only: settings, and each conversation under a key of its own, so that two tabs do not overwrite each other's.

const PREFIX = "fathomlm.conversation.";
const SETTINGS = "fathomlm.settings";
const MOST = 100;

export function loadSettings() {
  return read(SETTINGS) ?? {};
}

export function saveSettings(settings) {
  put(SETTINGS, settings);
}

// The newest first.
export function conversations() {
  const found = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX)).map(read);
  for (const one of found) for (const turn of one?.turns ?? []) for (const reply of turn.replies) reply.shape = one.shapes[reply.model];
  return found.filter((one) => one?.turns?.length).sort((a, b) => b.changed - a.changed);
}

export function newConversation(kind) {
  const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
  return { id, kind, system: "", changed: Date.now(), shapes: {}, turns: [] };
}

export function saveConversation(conversation) {
  if (conversation.removed) return true;
  conversation.changed = Date.now();
  for (const old of conversations().slice(MOST)) remove(old.id);
  // A full store makes room with the oldest. Alternatives to a token are much and not worth keeping, and shapes are kept by model.
  const record = JSON.stringify(conversation, (key, value) => (key === "top" || key === "shape" ? undefined : value));
  while (!put(PREFIX + conversation.id, record, true)) {
    const oldest = conversations().filter((one) => one.id !== conversation.id).at(-1);
    if (!oldest) return false;
    remove(oldest.id);
  }
  return true;
}

export function remove(id) {
  localStorage.removeItem(PREFIX + id);
}

export function titleOf(conversation) {
  const text = conversation.turns[0]?.user.trim() || "(empty prompt)";
  return text.length > 48 ? `${text.slice(0, 47)}…` : text;
}

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

function put(key, value, isText = false) {
  try {
    localStorage.setItem(key, isText ? value : JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
