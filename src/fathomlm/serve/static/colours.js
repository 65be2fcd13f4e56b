// Depths as colours: cividis, from blue (shallow) to yellow (deep). Its darkest end would not show on a dark page. Text on them is black or white, whichever reads better.

const CIVIDIS = [[0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115], [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56]];
const DARKEST = 0.16;

export function colourOf(part) {
  const at = (DARKEST + (1 - DARKEST) * Math.min(Math.max(part, 0), 1)) * (CIVIDIS.length - 1);
  const low = CIVIDIS[Math.floor(at)];
  const high = CIVIDIS[Math.ceil(at)];
  const rgb = low.map((value, i) => Math.round(value + (high[i] - value) * (at % 1)));
  const [r, g, b] = rgb.map((value) => (value / 255) ** 2.2);
  const light = 0.2126 * r + 0.7152 * g + 0.0722 * b;
  return { back: `rgb(${rgb.join(" ")})`, ink: light > 0.18 ? "#000000" : "#ffffff" };
}

export function paint(element, part) {
  const { back, ink } = colourOf(part);
  element.style.setProperty("background-color", back);
  element.style.setProperty("color", ink);
}
