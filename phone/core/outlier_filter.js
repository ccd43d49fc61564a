// @ts-check
/** The outlier filter of FedTC, eq. 1 to 3. */

import { meanOf } from "./numbers.js";

/**
 * Return ceil(alpha n), with alpha as the decimal number that it is printed as.
 * @param {number} alpha
 * @param {number} n
 */
export function keptImages(alpha, n) {
  const [digits, exponent = "0"] = String(alpha).split("e");
  const [whole, fraction = ""] = digits.split(".");
  const scale = 10n ** BigInt(fraction.length - Number(exponent));
  return Number((BigInt(whole + fraction) * BigInt(n) + scale - 1n) / scale);
}

/** @param {ArrayLike<number>} a @param {ArrayLike<number>} b */
function dot(a, b) {
  let sum = 0;
  for (let at = 0; at < a.length; at += 1) sum += a[at] * b[at];
  return sum;
}

/**
 * Return for each image of a class if the filter keeps it.
 * @param {ArrayLike<number>[]} features of all training images of the class, by path
 * @param {number} alpha above 0, at most 1
 * @returns {boolean[]}
 */
export function keptByFilter(features, alpha) {
  const mean = meanOf(features);
  const scores = features.map((each) => {
    const lengths = Math.sqrt(dot(each, each)) * Math.sqrt(dot(mean, mean));
    return lengths === 0 ? 0 : dot(each, mean) / lengths;
  });
  const best = scores.map((_, at) => at).sort((a, b) => scores[b] - scores[a] || a - b);
  const kept = new Set(best.slice(0, keptImages(alpha, features.length)));
  return features.map((_, at) => kept.has(at));
}
