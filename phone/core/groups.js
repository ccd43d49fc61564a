// @ts-check
/** Groups of images: an image is in one group for good, so that no difference of two submissions shows an image. */

/** @typedef {string[]} Group digests of the images' pixels */
/** @typedef {{batchSize: number, minImages: number}} Sizes */

/**
 * Return new groups of a class, for images that are in none; the images of no group wait.
 * @param {string[]} waiting digests of kept images
 * @param {number} groups how many the class has
 * @param {Sizes} sizes
 * @param {(images: string[]) => string[]} shuffled in a secret random order
 * @returns {Group[]}
 */
export function newGroups(waiting, groups, { batchSize, minImages }, shuffled) {
  const least = Math.max(batchSize, minImages);
  const images = shuffled(waiting);
  if (images.length < least) return !groups && images.length >= minImages ? [images] : [];
  const count = Math.floor(images.length / least);
  return Array.from({ length: count }, (_, at) => images.slice(at * least, at + 1 < count ? (at + 1) * least : undefined));
}

/**
 * Return how many images a class needs until its next group.
 * @param {number} waiting fewer than make a group
 * @param {number} groups
 * @param {Sizes} sizes
 */
export const moreNeeded = (waiting, groups, { batchSize, minImages }) =>
  (groups ? Math.max(batchSize, minImages) : minImages) - waiting;

/**
 * Return the groups that a submission may have: whole ones of enough images.
 * @param {Group[]} groups
 * @param {Set<string>} present digests of the images that the device has
 * @param {number} minImages
 */
export const usableGroups = (groups, present, minImages) =>
  groups.filter((group) => group.length >= minImages && group.every((image) => present.has(image)));

/**
 * Return the images of each prototype: whole groups, one after the other.
 * @param {Group[]} groups
 * @param {number} batchSize
 * @returns {string[][]}
 */
export function packed(groups, batchSize) {
  /** @type {string[][]} */
  const prototypes = [];
  for (const group of groups) {
    const last = prototypes.at(-1);
    if (last && last.length < batchSize) last.push(...group);
    else prototypes.push([...group]);
  }
  const last = prototypes.at(-1);
  if (last && last.length < batchSize && prototypes.length > 1) {
    prototypes.pop();
    prototypes.at(-1)?.push(...last);
  }
  return prototypes;
}
