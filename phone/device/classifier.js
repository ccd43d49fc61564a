// @ts-check
/** The head in use on images: probabilities with the prior of the place, and whether an image is of a known class. */

import { adjusted, bestOf, choosePrior, labelShares, WINDOW } from "../core/prior.js";

/** @typedef {import("./store.js").InstalledHead} InstalledHead */
/** @typedef {import("./store.js").StoredImage} StoredImage */
/**
 * @typedef {object} Prediction
 * @property {string[]} classes
 * @property {Float32Array} probabilities with the prior
 * @property {number} best index of the most probable class
 * @property {"known" | "unrecognized"} state `unrecognized`: the head has seen nothing like it
 */
/** @typedef {{id: string, label: string, best: string, score: number, kind: "label" | "unknown"}} Suspicion */

export class Classifier {
  /** Probabilities of the newest images, without a prior. @type {Float32Array[]} */
  #newest = [];

  /** @param {import("./features.js").Features} features @param {InstalledHead} head */
  constructor(features, head) {
    this.features = features;
    this.head = head;
  }

  /**
   * Return the prediction for an image, whose class may be in the prior's sample.
   * @param {Blob | ImageData} image
   * @param {StoredImage[]} labeled the device's images
   * @returns {Promise<Prediction>}
   */
  async classify(image, labeled) {
    const { head, backbone, classes } = this.head;
    const { threshold } = await this.features.head(head, { backbone, classes });
    const feature = await this.features.feature(backbone, image);
    const [{ probabilities, novelty }] = await this.features.runHead(head, [feature]);
    const isKnown = threshold === null || novelty === null || novelty <= threshold;
    if (isKnown) this.#newest = [...this.#newest, probabilities].slice(-WINDOW);
    const counts = classes.map((label) => labeled.filter((each) => each.label === label).length);
    const shares = isKnown ? choosePrior(this.#newest, labelShares(counts)) : null;
    const with_prior = adjusted(probabilities, shares);
    return { classes, probabilities: with_prior, best: bestOf(with_prior), state: isKnown ? "known" : "unrecognized" };
  }

  /**
   * Return the images whose labels a person should check, most suspicious first of each kind, of learned classes.
   * @param {StoredImage[]} images of the head's classes
   * @param {Map<string, Float32Array>} byImage their features
   * @returns {Promise<Suspicion[]>}
   */
  async suspicious(images, byImage) {
    const { head, backbone, classes } = this.head;
    const { threshold } = await this.features.head(head, { backbone, classes });
    const usable = images.filter(({ id }) => byImage.has(id));
    const results = await this.features.runHead(head, usable.map(({ id }) => /** @type {Float32Array} */ (byImage.get(id))));
    const found = usable.map(({ id, label }, at) => {
      const { probabilities, novelty } = results[at];
      const best = bestOf(probabilities);
      const isKnown = threshold === null || novelty === null || novelty <= threshold;
      const score = isKnown ? probabilities[best] - probabilities[classes.indexOf(label)] : novelty;
      return { id, label, best: classes[best], score: score ?? 0, kind: isKnown ? /** @type {const} */ ("label") : /** @type {const} */ ("unknown") };
    });
    const suspects = found.filter(({ score, kind }) => kind === "unknown" || score > 0);
    // A head that has not learned a class recognizes few of its images.
    const isLearned = (/** @type {string} */ name) => 2 * suspects.filter(({ label }) => label === name).length < found.filter(({ label }) => label === name).length;
    return suspects.filter(({ label }) => isLearned(label))
      .sort((a, b) => a.kind.localeCompare(b.kind) || b.score - a.score);
  }
}
