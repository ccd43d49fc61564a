// @ts-check
/** Rounding, half precision and means. */

/** @param {number} value @returns {number} the nearest integer, ties to even */
export function roundToEven(value) {
  const floor = Math.floor(value);
  const rest = value - floor;
  return rest < 0.5 || (rest === 0.5 && floor % 2 === 0) ? floor : floor + 1;
}

/**
 * Return the mean in double precision.
 * @param {ArrayLike<number>[]} features at least one
 * @returns {Float64Array}
 */
export function meanOf(features) {
  const sum = new Float64Array(features[0]?.length ?? 0);
  for (const each of features) {
    for (let at = 0; at < sum.length; at += 1) sum[at] += each[at];
  }
  return sum.map((total) => total / features.length);
}

/**
 * Round to the nearest number of half precision, ties to even.
 * @param {number} value
 * @returns {number} infinite from 65520 on
 */
export function toHalf(value) {
  const size = Math.abs(value);
  if (!(size < 65_520)) return size >= 65_520 ? Math.sign(value) * Infinity : value;
  // The distance of two numbers of half precision: 2^-24 below 2^-14, then 2^-10 of their power of two.
  const step = 2 ** (Math.max(-14, size ? Math.floor(Math.log2(Math.fround(size))) : -14) - 10);
  return roundToEven(value / step) * step;
}

/**
 * Encode numbers of half precision, little-endian.
 * @param {Iterable<number>} values
 * @returns {Uint8Array}
 */
export function halfBytes(values) {
  const numbers = [...values];
  const view = new DataView(new ArrayBuffer(2 * numbers.length));
  numbers.forEach((value, at) => {
    const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
    const size = Math.abs(value);
    const exponent = Math.max(-14, size ? Math.floor(Math.log2(size)) : -14);
    // Of a number below 2^-14 the exponent's bits are 0: the sum is that of a subnormal one.
    const bits = Number.isFinite(size) ? (exponent + 14) * 0x400 + size / 2 ** (exponent - 10) : 0x7c00;
    view.setUint16(2 * at, sign | bits, true);
  });
  return new Uint8Array(view.buffer);
}
