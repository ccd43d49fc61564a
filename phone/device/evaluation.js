// @ts-check
/** A head's results on the held-out images. Pure. */

import { confidenceBin, noveltyBin } from "../core/confidence.js";
import { adjusted, bestOf, choosePrior, labelShares } from "../core/prior.js";
import { CONFIDENCE_BINS, encodeMessage } from "../wire/messages.js";

/** @typedef {import("../wire/messages.js").Message<"evaluation">} Evaluation */
/** @typedef {{label: number, probabilities: Float32Array, novelty: number | null}} Answer of a head to an image of a class */

const MAX_CONFUSED = 1024;
/** Probabilities by which a prior is chosen at most. */
const MAX_VALUES = 2 ** 20;

/**
 * Count how many images of each class a head classifies correctly.
 * @param {number} classes
 * @param {Answer[]} answers
 */
export function correctImages(classes, answers) {
  const correct = new Array(classes).fill(0);
  for (const { label, probabilities } of answers) correct[label] += Number(bestOf(probabilities) === label);
  return correct;
}

/** @param {Answer[]} answers @returns {Evaluation["confused"]} */
function confused(answers) {
  /** @type {Map<string, {label: number, predicted: number, images: number}>} */
  const pairs = new Map();
  for (const { label, probabilities } of answers) {
    const predicted = bestOf(probabilities);
    const key = `${label} ${predicted}`;
    if (predicted !== label) pairs.set(key, { label, predicted, images: (pairs.get(key)?.images ?? 0) + 1 });
  }
  return [...pairs.values()].sort((a, b) => b.images - a.images).slice(0, MAX_CONFUSED);
}

/** @param {number[]} places of bins */
function binned(places) {
  const bins = new Array(CONFIDENCE_BINS).fill(0);
  for (const place of places) bins[place] += 1;
  return bins;
}

/**
 * Encode the evaluation of a head.
 * @param {{task: Uint8Array, version: number | bigint, classes: number}} head
 * @param {Answer[]} answers to the held-out images, class by class
 * @param {number[] | null} previous images of each class that the previous head of the task classified correctly
 * @param {number[]} labels labeled images of each class
 */
export function encodeEvaluation({ task, version, classes }, answers, previous, labels) {
  const correct = correctImages(classes, answers);
  const totals = new Array(classes).fill(0);
  for (const { label } of answers) totals[label] += 1;
  const rows = answers.map(({ probabilities }) => probabilities);
  const isRight = answers.map(({ label, probabilities }) => bestOf(probabilities) === label);
  const bins = answers.map(({ probabilities }) => confidenceBin(probabilities));
  const hasAny = answers.length > 0;
  const hasPrior = hasAny && answers.length * classes <= MAX_VALUES;
  const shares = hasPrior ? choosePrior(rows, labelShares(labels)) : null;
  const novelties = answers.flatMap(({ novelty }) => (novelty === null ? [] : [novelty]));
  return encodeMessage("evaluation", {
    task, head_version: version, correct, problem: "",
    incorrect: totals.map((total, at) => total - correct[at]),
    previous_correct: previous ?? [],
    correct_with_prior: hasPrior ? answers.filter(({ label }, at) => bestOf(adjusted(rows[at], shares)) === label).length : undefined,
    confidence_correct: hasAny ? binned(bins.filter((_, at) => isRight[at])) : undefined,
    confidence_images: hasAny ? binned(bins) : undefined,
    novelty_images: novelties.length ? binned(novelties.map(noveltyBin)) : undefined,
    confused: hasAny ? confused(answers) : undefined,
  });
}

/**
 * Encode the report of a head that the device does not use.
 * @param {{task: Uint8Array, version: number | bigint, classes: number}} head
 * @param {string} problem
 */
export function encodeRefusal({ task, version, classes }, problem) {
  const zeros = new Array(classes).fill(0);
  return encodeMessage("evaluation", {
    task, head_version: version, correct: zeros, incorrect: zeros, previous_correct: [], problem: [...problem].slice(0, 256).join(""),
    correct_with_prior: undefined, confidence_correct: undefined, confidence_images: undefined, novelty_images: undefined,
    confused: undefined,
  });
}
