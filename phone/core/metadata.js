// @ts-check
/** Metadata of backbones and heads: the JSON in their files, checked field by field. */

import { RefusedFile } from "./onnx_file.js";

/**
 * @typedef {object} BackboneMetadata
 * @property {number} feature_size
 * @property {import("./preprocessing.js").Preprocessing} preprocessing
 */
/**
 * @typedef {object} HeadMetadata
 * @property {string[]} classes
 * @property {string[]} backbones hex digests
 * @property {number} feature_size
 * @property {number | null} novelty_threshold
 */

/** @param {boolean} holds @param {string} what */
function expect(holds, what) {
  if (!holds) throw new RefusedFile(`invalid metadata: ${what}`);
}

/** @param {unknown} value @param {number} low @param {number} high */
const isInteger = (value, low, high) => Number.isInteger(value) && Number(value) >= low && Number(value) <= high;

/** @param {string} text @param {string} kind @returns {any} */
function parsed(text, kind) {
  let fields;
  try {
    fields = JSON.parse(text);
  } catch {
    throw new RefusedFile("no metadata of protofleet");
  }
  expect(fields?.kind === kind, `expected a ${kind}`);
  expect(isInteger(fields.feature_size, 1, 2 ** 20), "feature_size");
  return fields;
}

/** @param {string} text @returns {BackboneMetadata} */
export function backboneMetadata(text) {
  const { feature_size, preprocessing: given } = parsed(text, "backbone");
  const preprocessing = { crop_pct: 1, crop_mode: "center", interpolation: "bicubic", fill: [0, 0, 0], ...given };
  const { width, height, crop_pct, crop_mode, interpolation, fill } = preprocessing;
  expect(isInteger(width, 1, 4096) && isInteger(height, 1, 4096), "width and height");
  expect(typeof crop_pct === "number" && crop_pct >= 0.1 && crop_pct <= 1, "crop_pct");
  expect(["center", "border", "squash"].includes(crop_mode), "crop_mode");
  expect(["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"].includes(interpolation), "interpolation");
  expect(Array.isArray(fill) && fill.length === 3 && fill.every((level) => isInteger(level, 0, 255)), "fill");
  return { feature_size, preprocessing: { width, height, crop_pct, crop_mode, interpolation, fill: [fill[0], fill[1], fill[2]] } };
}

/** @param {string} text @returns {HeadMetadata} */
export function headMetadata(text) {
  const { feature_size, classes, backbones, novelty_threshold: threshold = null } = parsed(text, "head");
  const areTexts = (/** @type {unknown} */ list) => Array.isArray(list) && list.length > 0 && list.every((each) => typeof each === "string");
  expect(areTexts(classes) && areTexts(backbones), "classes and backbones");
  expect(threshold === null || Number.isFinite(threshold), "novelty_threshold");
  return { feature_size, classes, backbones, novelty_threshold: threshold };
}

/**
 * Refuse a head for other backbones or classes.
 * @param {HeadMetadata} head
 * @param {{backbone: string, featureSize: number, classes: string[]}} here
 */
export function refuseForeignHead(head, { backbone, featureSize, classes }) {
  if (String(head.backbones) !== backbone || head.feature_size !== featureSize) throw new RefusedFile("a head for another backbone");
  if (JSON.stringify(head.classes) !== JSON.stringify(classes)) throw new RefusedFile("a head of other classes");
}
