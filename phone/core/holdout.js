// @ts-check
/** Images that are held out of the prototypes, to evaluate heads on. */

/** Images of a class from which at least one is held out; of more, a fifth. */
const FEW = 5;

/** @param {number} images of a class */
export const heldOutCount = (images) => Math.max(images >= FEW ? 1 : 0, Math.floor(images / 5));

/**
 * Return the held-out images of a class: those with the lowest digests, but none that is in a group. One image more
 * changes the side of at most one of the others.
 * @param {string[]} images hex digests of the pixels, which are as good as random
 * @param {(image: string) => boolean} isGrouped
 * @returns {Set<string>}
 */
export function heldOut(images, isGrouped) {
  const free = images.filter((image) => !isGrouped(image)).sort();
  return new Set(free.slice(0, heldOutCount(images.length)));
}
