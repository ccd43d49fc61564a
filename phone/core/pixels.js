// @ts-check
/** Pixels that a browser has decoded and turned upright. */

/** @typedef {{data: Uint8Array, width: number, height: number}} Image `data` has height x width x 3 levels, RGB */

/** An image that is not used. */
export class UnusableImage extends Error {}

/**
 * Put RGBA on white.
 * @param {Uint8Array | Uint8ClampedArray} rgba not premultiplied
 * @returns {Uint8Array} RGB
 * @throws {UnusableImage} if every pixel is transparent
 */
export function onWhite(rgba) {
  const rgb = new Uint8Array((rgba.length / 4) * 3);
  let isVisible = false;
  for (let from = 0, to = 0; from < rgba.length; from += 4, to += 3) {
    const alpha = rgba[from + 3];
    isVisible ||= alpha > 0;
    for (let channel = 0; channel < 3; channel += 1) {
      rgb[to + channel] = Math.round((rgba[from + channel] * alpha + 255 * (255 - alpha)) / 255);
    }
  }
  if (!isVisible) throw new UnusableImage("every pixel is transparent");
  return rgb;
}
