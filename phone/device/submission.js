// @ts-check
/** A device's submission of prototypes, from its images and their features. Pure but for the secret random order. */

import { newGroups, moreNeeded, packed, usableGroups } from "../core/groups.js";
import { heldOut, heldOutCount } from "../core/holdout.js";
import { halfBytes } from "../core/numbers.js";
import { keptByFilter, keptImages } from "../core/outlier_filter.js";
import { prototypeOf, quantize } from "../core/prototypes.js";
import { encodeMessage } from "../wire/messages.js";
import { hex, sha256 } from "../wire/signatures.js";

/** @typedef {import("../wire/messages.js").Message<"task">} Task */
/** @typedef {import("./store.js").StoredImage} StoredImage */
/** @typedef {import("./store.js").StoredGroup} StoredGroup */
/** @typedef {ReadonlyMap<string, Float32Array>} Features of images by their ids */
/**
 * @typedef {object} ClassReport
 * @property {string} label
 * @property {number} images
 * @property {number} missing images until the class has another group, at least; 0 if the next build makes one
 */
/**
 * @typedef {object} Prepared
 * @property {StoredGroup[]} groups new ones, which are stored before anything is uploaded
 * @property {number[][]} prototypes (m, L)
 * @property {number[]} labels (m)
 * @property {number[]} counts (m)
 * @property {number} images
 * @property {number[]} omitted
 */

/** A task or features that cannot be used, with a word for the reason. */
export class NoSubmission extends Error {}

/** The images of a class in a fixed order. @param {StoredImage[]} images @param {string} label */
const ofClass = (images, label) =>
  images.filter((image) => image.label === label).sort((a, b) => a.time_s - b.time_s || (a.id < b.id ? -1 : 1));

/** @param {StoredGroup[]} groups */
const inGroups = (groups) => new Set(groups.flatMap(({ images }) => images));

/**
 * Return the ids of the held-out images.
 * @param {StoredImage[]} images
 * @param {StoredGroup[]} groups
 * @returns {Set<string>}
 */
export function heldOutImages(images, groups) {
  const grouped = inGroups(groups);
  const labels = new Set(images.map(({ label }) => label));
  return new Set([...labels].flatMap((label) => [...heldOut(ofClass(images, label).map(({ id }) => id), (id) => grouped.has(id))]));
}

/** @param {Task} task */
const sizesOf = ({ batch_size, min_images }) => ({ batchSize: batch_size, minImages: min_images });

/**
 * Return how many more images each class needs until it has another group, at least: of new images some are held out,
 * and some are filtered.
 * @param {Task} task
 * @param {StoredImage[]} images
 * @param {StoredGroup[]} groups
 * @returns {ClassReport[]}
 */
export function classReports(task, images, groups) {
  const grouped = inGroups(groups);
  return task.classes.map((label) => {
    const own = ofClass(images, label);
    const had = own.filter(({ id }) => grouped.has(id)).length;
    const count = groups.filter((group) => group.label === label).length;
    // Images that are in no group, if there were `n` of the class.
    const waiting = (/** @type {number} */ n) => {
      const training = n - Math.min(heldOutCount(n), n - had);
      return Math.max(0, Math.min(training - had, keptImages(task.alpha, training) - had));
    };
    let [missing, enough] = [0, 2 ** 40];
    while (missing < enough) {
      const middle = Math.floor((missing + enough) / 2);
      if (moreNeeded(waiting(own.length + middle), count, sizesOf(task)) > 0) missing = middle + 1;
      else enough = middle;
    }
    return { label, images: own.length, missing };
  });
}

/** @param {Task} task @param {Float32Array} feature @returns {Float32Array} */
function inColumns({ columns }, feature) {
  if (!columns) return feature;
  const bounds = columns.flat().map(Number);
  if (bounds.some((bound, at) => at > 0 && bound <= bounds[at - 1]) || bounds[bounds.length - 1] > feature.length) throw new NoSubmission("columns");
  const all = columns.flatMap(([start, stop]) => [...feature.subarray(Number(start), Number(stop))]);
  return Float32Array.from(all);
}

/**
 * Group images and make prototypes.
 * @param {Task} task
 * @param {StoredImage[]} images
 * @param {StoredGroup[]} groups that were stored before
 * @param {Features} features of all images of the task's classes
 * @param {(images: string[]) => string[]} shuffled in a secret random order
 * @returns {Prepared}
 * @throws {NoSubmission}
 */
export function prepare(task, images, groups, features, shuffled) {
  const held = heldOutImages(images, groups);
  const grouped = inGroups(groups);
  let number = Math.max(0, ...groups.map((group) => group.number));
  /** @type {Prepared} */
  const prepared = { groups: [], prototypes: [], labels: [], counts: [], images: 0, omitted: [] };
  task.classes.forEach((label, at) => {
    const own = ofClass(images, label);
    const training = own.map(({ id }) => id).filter((id) => !held.has(id));
    prepared.images += own.length;
    if (!training.length) return;
    const featureOf = (/** @type {string} */ id) => inColumns(task, /** @type {Float32Array} */ (features.get(id)));
    const isKept = keptByFilter(training.map(featureOf), task.alpha);
    const waiting = training.filter((id, place) => isKept[place] && !grouped.has(id));
    const before = groups.filter((group) => group.label === label);
    const made = newGroups(waiting, before.length, sizesOf(task), shuffled)
      .map((ids) => ({ number: (number += 1), label, images: ids }));
    prepared.groups.push(...made);
    const usable = usableGroups([...before, ...made].map((group) => group.images), new Set(training), task.min_images);
    const batches = packed(usable, task.batch_size);
    for (const batch of batches) {
      prepared.prototypes.push(prototypeOf(batch.map(featureOf)));
      prepared.labels.push(at);
      prepared.counts.push(batch.length);
    }
    if (!batches.length) prepared.omitted.push(at);
  });
  if (!prepared.prototypes.flat().every(Number.isFinite)) throw new NoSubmission("features");
  return prepared;
}

/** Return integers in the smallest dtype that has them. @param {number[]} values */
function unsigned(values) {
  const most = Math.max(...values);
  const [dtype, array] = most < 2 ** 8 ? /** @type {const} */ (["u1", Uint8Array]) : most < 2 ** 16 ? /** @type {const} */ (["u2", Uint16Array]) : /** @type {const} */ (["u4", Uint32Array]);
  return { dtype, shape: [values.length], data: new Uint8Array(array.from(values).buffer) };
}

/**
 * Return a digest that is equal for equal prototypes, labels and counts.
 * @param {Prepared} prepared with a prototype
 */
export async function fingerprint({ prototypes, labels, counts }) {
  const values = Float32Array.from([...prototypes.flat(), ...labels, ...counts]);
  return hex(await sha256(new Uint8Array(values.buffer)));
}

/**
 * Encode a submission.
 * @param {Prepared} prepared with a prototype
 * @param {Uint8Array} task digest
 * @param {number} sequence
 */
export function encodeSubmission({ prototypes, labels, counts, images, omitted }, task, sequence) {
  const { steps, low, high } = quantize(prototypes);
  return encodeMessage("submission", {
    task, sequence, images,
    prototypes: { dtype: "u1", shape: [prototypes.length, low.length], data: steps },
    labels: unsigned(labels),
    counts: unsigned(counts),
    omitted_classes: omitted,
    round: 0,
    tensors: { range: { dtype: "f2", shape: [2, low.length], data: halfBytes([...low, ...high]) } },
    loss: null, privacy: null, mask: undefined, block: undefined,
  });
}
