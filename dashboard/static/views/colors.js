// Colors of charts, from the style sheet: dark or light.

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Return red, green and blue of a color of the style sheet, which is in the form #rrggbb. */
export function channels(name) {
  const text = color(name);
  return [1, 3, 5].map((start) => parseInt(text.slice(start, start + 2), 16));
}
