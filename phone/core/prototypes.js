// @ts-check
/** Prototypes, and their bytes: in single precision as the contract says. */

import { meanOf, roundToEven, toHalf } from "./numbers.js";

const { fround } = Math;

/**
 * Average features in double precision; round to single, then to half precision.
 * @param {ArrayLike<number>[]} features at least one
 * @returns {number[]}
 */
export const prototypeOf = (features) => Array.from(meanOf(features), (value) => toHalf(fround(value)));

/**
 * Return prototypes in steps of their range.
 * @param {number[][]} prototypes of all classes, of half precision; at least one
 * @returns {{steps: Uint8Array, low: number[], high: number[]}} `steps` (m, L) row by row
 */
export function quantize(prototypes) {
  const size = prototypes[0].length;
  const low = Array.from({ length: size }, (_, at) => prototypes.reduce((least, each) => Math.min(least, each[at]), Infinity));
  const high = Array.from({ length: size }, (_, at) => prototypes.reduce((most, each) => Math.max(most, each[at]), -Infinity));
  const step = low.map((least, at) => fround(fround(high[at] - least) / 255));
  const steps = prototypes.flatMap((each) => each.map((value, at) =>
    step[at] === 0 ? 0 : roundToEven(fround(fround(value - low[at]) / step[at]))));
  return { steps: Uint8Array.from(steps), low, high };
}
