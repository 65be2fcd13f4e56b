// Depths as colours. The server has the palette, the same that plots and the terminal use: for each depth a background and the ink that reads best on it.

export function paint(element, shape, depth) {
  const pair = shape.colours[depth] ?? shape.colours.at(-1);
  element.style.setProperty("background-color", pair[0]);
  element.style.setProperty("color", pair[1]);
}
