// @ts-check
/** What a backbone gets of an image: resized, then cropped or padded. */

import { roundToEven } from "./numbers.js";
import { UnusableImage } from "./pixels.js";
import { resize } from "./resize.js";

/** @typedef {import("./pixels.js").Image} Image */
/**
 * @typedef {object} Preprocessing of a backbone's metadata
 * @property {number} width
 * @property {number} height
 * @property {number} crop_pct
 * @property {"center" | "border" | "squash"} crop_mode
 * @property {import("./resize.js").Interpolation} interpolation
 * @property {[number, number, number]} fill
 */

const MAX_PIXELS = 2 ** 24;

/**
 * Return width and height before the crop.
 * @param {number} w
 * @param {number} h
 * @param {Preprocessing} spec
 * @returns {[number, number]}
 */
function resizedSize(w, h, spec) {
  const wide = Math.floor(spec.width / spec.crop_pct);
  const high = Math.floor(spec.height / spec.crop_pct);
  if (spec.crop_mode === "squash") return [wide, high];
  if (spec.crop_mode === "center" && wide === high) {
    const longer = Math.floor((wide * Math.max(w, h)) / Math.min(w, h));
    return w < h ? [wide, longer] : [longer, wide];
  }
  const ratio = (spec.crop_mode === "center" ? Math.min : Math.max)(h / high, w / wide);
  return [Math.max(1, roundToEven(w / ratio)), Math.max(1, roundToEven(h / ratio))];
}

/**
 * Return the pixels that a backbone gets.
 * @param {Image} image upright, on white
 * @param {Preprocessing} spec
 * @returns {Uint8Array} height x width x 3 levels
 * @throws {UnusableImage} if the image is too large once it is resized
 */
export function preprocess(image, spec) {
  const [width, height] = resizedSize(image.width, image.height, spec);
  if (width * height > MAX_PIXELS || (width > image.width && width * image.height > MAX_PIXELS)) {
    throw new UnusableImage("more than 2^24 pixels at the size of the backbone");
  }
  const resized = resize(image, width, height, spec.interpolation);
  const [left, x] = edge(width, spec.width);
  const [top, y] = edge(height, spec.height);
  const pixels = new Uint8Array(spec.width * spec.height * 3);
  for (let at = 0; at < pixels.length; at += 3) pixels.set(spec.fill, at);
  const columns = Math.min(width, spec.width);
  for (let row = 0; row < Math.min(height, spec.height); row += 1) {
    const from = ((row + top) * width + left) * 3;
    pixels.set(resized.data.subarray(from, from + columns * 3), ((row + y) * spec.width + x) * 3);
  }
  return pixels;
}

/**
 * Return the first pixel of an edge that is used, and its place.
 * @param {number} n
 * @param {number} target
 * @returns {[number, number]}
 */
const edge = (n, target) => (n > target ? [roundToEven((n - target) / 2), 0] : [0, Math.floor((target - n) / 2)]);
