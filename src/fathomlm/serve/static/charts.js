// Small charts in SVG, with their numbers in a label for those who do not see them.

const SVG = "http://www.w3.org/2000/svg";

function frame(holder, label) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 240 90");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  holder.replaceChildren(svg);
  return svg;
}

function add(svg, name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  svg.append(element);
}

export function line(holder, values, label) {
  const svg = frame(holder, `${label}: ${values.map((value) => Math.round(value)).join(", ")}`);
  const most = Math.max(1, ...values);
  const step = 240 / Math.max(1, values.length - 1);
  const points = values.map((value, i) => `${(i * step).toFixed(1)} ${(84 - (78 * value) / most).toFixed(1)}`);
  if (points.length > 1) add(svg, "path", { d: `M${points.join("L")}` });
}

export function bars(holder, counts, label) {
  const entries = Object.entries(counts);
  const svg = frame(holder, `${label}: ${entries.map(([name, count]) => `${name} ${count}`).join(", ")}`);
  const most = Math.max(1, ...entries.map(([, count]) => count));
  const wide = 240 / Math.max(1, entries.length);
  entries.forEach(([name, count], i) => {
    const tall = (62 * count) / most;
    add(svg, "rect", { x: i * wide + 2, y: 70 - tall, width: Math.max(1, wide - 4), height: tall });
    if (entries.length <= 12) add(svg, "text", { x: i * wide + wide / 2, y: 84, "text-anchor": "middle" }, name);
  });
}

export function share(holder, used, total, label) {
  const svg = frame(holder, `${label}: ${used} of ${total}`);
  add(svg, "rect", { x: 0, y: 34, width: 240, height: 16, opacity: 0.2 });
  add(svg, "rect", { x: 0, y: 34, width: (240 * used) / Math.max(1, total), height: 16 });
}
