// Small charts, with their numbers in a label for those who do not see them.

const SVG = "http://www.w3.org/2000/svg";
const WIDE = 240;
const TALL = 72;

function frame(holder, label) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDE} ${TALL}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  holder.replaceChildren(svg);
  return svg;
}

function add(svg, name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  svg.append(element);
  return element;
}

// The newest value is at the right; `room` values fill the chart.
export function line(holder, values, room, label) {
  const svg = frame(holder, `${label}: ${values.map((value) => Math.round(value)).join(", ")}`);
  const most = Math.max(1, ...values);
  const step = WIDE / (room - 1);
  const left = WIDE - (values.length - 1) * step;
  const points = values.map((value, i) => `${(left + i * step).toFixed(1)} ${(TALL - 2 - ((TALL - 6) * value) / most).toFixed(1)}`);
  if (points.length < 2) return;
  add(svg, "path", { class: "area", d: `M${left.toFixed(1)} ${TALL}L${points.join("L")}L${WIDE} ${TALL}Z` });
  add(svg, "path", { class: "line", d: `M${points.join("L")}` });
}

// `colour` gives each name its own. Names stand below as text, which a stretched picture would distort.
export function bars(holder, counts, colour, label) {
  const entries = Object.entries(counts);
  if (!entries.length) {
    holder.textContent = "none yet";
    return;
  }
  const svg = frame(holder, `${label}: ${entries.map(([name, count]) => `${name} ${count}`).join(", ")}`);
  const most = Math.max(1, ...entries.map(([, count]) => count));
  const wide = WIDE / entries.length;
  const gap = Math.min(4, wide / 4);
  entries.forEach(([name, count], i) => {
    const tall = Math.max(1, ((TALL - 2) * count) / most);
    const bar = add(svg, "rect", { x: i * wide + gap / 2, y: TALL - tall, width: wide - gap, height: tall });
    bar.style.setProperty("fill", colour(name));
  });
  if (entries.length > 12) return;
  const names = document.createElement("div");
  names.className = "names";
  names.setAttribute("aria-hidden", "true");
  for (const [name] of entries) {
    const one = document.createElement("span");
    one.textContent = name;
    names.append(one);
  }
  holder.append(names);
}

export function share(holder, used, total, label) {
  const svg = frame(holder, `${label}: ${used} of ${total}`);
  add(svg, "rect", { class: "whole", x: 0, y: 0, width: WIDE, height: TALL });
  add(svg, "rect", { x: 0, y: 0, width: (WIDE * Math.min(used, total)) / Math.max(1, total), height: TALL });
}
