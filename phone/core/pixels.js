// @ts-check
/** Decoded pixels: turned upright, and put on white. */

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

/**
 * Refuse an image of 16 bits that is all dark among its upper eight bits: such files often have 10 or 12 bits.
 * @param {Uint8Array} rgb
 * @throws {UnusableImage}
 */
export function refuseDarkSixteenBits(rgb) {
  if (rgb.every((level) => level < 64)) throw new UnusableImage("16 bits, all below a quarter of white");
}

/**
 * Turn an image upright.
 * @param {Image} image
 * @param {number} orientation of EXIF: 1 to 8, any other is 1
 * @returns {Image}
 */
export function upright({ data, width, height }, orientation) {
  if (!(orientation >= 2 && orientation <= 8)) return { data, width, height };
  const isTurned = orientation >= 5;
  const [wide, high] = isTurned ? [height, width] : [width, height];
  const mirrorsX = [2, 3, 7, 8].includes(orientation);
  const mirrorsY = [3, 4, 6, 7].includes(orientation);
  const turned = new Uint8Array(data.length);
  for (let y = 0; y < high; y += 1) {
    for (let x = 0; x < wide; x += 1) {
      const along = isTurned ? y : x;
      const down = isTurned ? x : y;
      const column = mirrorsX ? width - 1 - along : along;
      const row = mirrorsY ? height - 1 - down : down;
      const from = (row * width + column) * 3;
      turned.set(data.subarray(from, from + 3), (y * wide + x) * 3);
    }
  }
  return { data: turned, width: wide, height: high };
}
