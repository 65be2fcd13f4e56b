// The settings on the page: reading them, showing what fits the model, and remembering them.

import { loadSettings, saveSettings } from "./store.js";

const $ = (id) => document.getElementById(id);
const FIELDS = ["tokens", "temperature", "top-p", "top-k", "seed", "stop-strings", "system", "compare", "other-model"];
const DEFAULTS = Object.fromEntries(FIELDS.map((id) => [id, $(id).value]));

// `kept` is what outlives a reload: fields by their ids, the model, the kind, and by model the depths of both sides.
export const kept = { model: null, kind: "prompt", conversation: null, fields: {}, depths: {}, ...loadSettings() };

export function restore() {
  for (const id of FIELDS) {
    if (kept.fields[id] !== undefined) $(id).value = kept.fields[id];
  }
  $("key").value = sessionStorage.getItem("fathomlm.key") ?? ""; // a key is not for the disk
}

export function remember() {
  for (const id of FIELDS) if ($(id).value) kept.fields[id] = $(id).value;
  for (const id of ["seed", "stop-strings", "system"]) kept.fields[id] = $(id).value; // empty is a setting too
  sessionStorage.setItem("fathomlm.key", $("key").value);
  saveSettings(kept);
}

export function reset() {
  for (const id of FIELDS) if (id !== "system") $(id).value = DEFAULTS[id];
  kept.fields = {};
  kept.depths = {};
  remember();
}

export function readSettings() {
  const number = (id) => Number($(id).value || DEFAULTS[id]);
  const lines = $("stop-strings").value.split("\n").filter((line) => line);
  return {
    tokens: number("tokens"), temperature: number("temperature"), topP: number("top-p"), topK: number("top-k"),
    stop: lines.map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t")),
  };
}

export function seed() {
  return $("seed").value === "" ? Math.floor(Math.random() * 2 ** 31) : Number($("seed").value);
}

// The depth of a model that was set, or by default, for the first side or the second.
export function depthOf(model, shape, side) {
  const given = kept.depths[model]?.[side];
  if (shape.kind === "routed") return Math.min(given ?? shape.allowed, shape.allowed);
  if (shape.kind === "exits") return given ?? (side === 0 ? shape.threshold ?? 0.9 : 1);
  return null;
}

export function setDepth(model, side, value) {
  kept.depths[model] = Object.assign(kept.depths[model] ?? [], { [side]: value });
}

// Which controls a model has, and what they say.
export function fitTo(model, shape, names) {
  const whole = shape.kind === "whole";
  const word = shape.kind === "exits" ? "threshold" : "depth";
  $("depth-control").hidden = whole;
  $("depth-name").textContent = shape.kind === "exits" ? "Threshold" : "Maximum depth";
  $("other-depth-name").textContent = shape.kind === "exits" ? "Other threshold" : "Other maximum depth";
  $("depth-help").textContent = shape.kind === "exits"
    ? "How sure an exit must be for a token to exit there. At 1 none does: full depth."
    : "No token runs the shared layers more often than this.";
  for (const [side, id] of ["depth", "other-depth"].entries()) {
    const range = shape.kind === "exits" ? { min: 0, max: 1, step: 0.01 } : { min: 1, max: shape.allowed, step: 1 };
    Object.assign($(id), range);
    $(id).value = [depthOf(model, shape, side) ?? range.max].flat()[0];
    $(`${id}-value`).textContent = $(id).value;
  }
  const [, byDepth, byModel] = $("compare").options;
  byDepth.disabled = whole;
  byDepth.textContent = `another ${word}${whole ? ": this model has one" : ""}`;
  byModel.disabled = names.length < 2;
  if ($("compare").selectedOptions[0]?.disabled) $("compare").value = "none";
  const others = names.filter((name) => name !== model);
  const chosen = others.includes($("other-model").value) ? $("other-model").value : kept.fields["other-model"];
  $("other-model").replaceChildren(...others.map((name) => new Option(name)));
  if (others.includes(chosen)) $("other-model").value = chosen;
  $("other-depth-control").hidden = $("compare").value !== "depth";
  $("other-model-control").hidden = $("compare").value !== "model";
}
