// @ts-check
/** Bins in which a device counts its held-out images. */

import { CONFIDENCE_BINS } from "../wire/messages.js";

/** @param {number} bin */
const limited = (bin) => Math.min(CONFIDENCE_BINS - 1, Math.max(0, Math.floor(bin)));

/**
 * Return the bin of an image's confidence.
 * @param {ArrayLike<number>} probabilities of all classes, of single precision
 */
export function confidenceBin(probabilities) {
  let best = 0;
  let rest = 0;
  for (let at = 1; at < probabilities.length; at += 1) {
    if (probabilities[at] > probabilities[best]) best = at;
  }
  for (let at = 0; at < probabilities.length; at += 1) rest += at === best ? 0 : probabilities[at];
  return limited(2 * (Math.log(probabilities[best] / rest) + 4));
}

/** @param {number} novelty @returns {number} its bin */
export const noveltyBin = (novelty) => limited(novelty * CONFIDENCE_BINS);
