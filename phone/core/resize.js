// @ts-check
/** Pillow's resize, exactly: a canvas resizes otherwise in each browser. */

/** @typedef {import("./pixels.js").Image} Image */
/** @typedef {"box" | "bilinear" | "hamming" | "bicubic" | "lanczos" | "nearest"} Interpolation */
/** @typedef {{first: number, weights: Int32Array}} Window the pixels from `first` on, and their weights times 2^22 */

const BITS = 22;
const HALF = 2 ** (BITS - 1);

/** @param {number} x */
const sinc = (x) => (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));

/** @type {Record<Exclude<Interpolation, "nearest">, {support: number, weight: (x: number) => number}>} */
const FILTERS = {
  box: { support: 0.5, weight: (x) => Number(x > -0.5 && x <= 0.5) },
  bilinear: { support: 1, weight: (x) => Math.max(0, 1 - Math.abs(x)) },
  hamming: { support: 1, weight: (x) => (Math.abs(x) < 1 ? sinc(x) * (0.54 + 0.46 * Math.cos(Math.PI * x)) : 0) },
  bicubic: {
    support: 2,
    weight(x) {
      const y = Math.abs(x);
      if (y < 1) return (1.5 * y - 2.5) * y * y + 1;
      return y < 2 ? ((-0.5 * y + 2.5) * y - 4) * y + 2 : 0;
    },
  },
  lanczos: { support: 3, weight: (x) => (x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0) },
};

/**
 * The pixels and weights of each resized pixel of an edge.
 * @param {number} from
 * @param {number} to
 * @param {Interpolation} interpolation
 * @returns {Window[]}
 */
function windowsOf(from, to, interpolation) {
  const scale = from / to;
  if (interpolation === "nearest") {
    const weights = Int32Array.of(2 ** BITS);
    let place = scale / 2;
    return Array.from({ length: to }, () => {
      const first = Math.trunc(place);
      place += scale;
      return { first, weights };
    });
  }
  const { support, weight } = FILTERS[interpolation];
  const stretch = Math.max(scale, 1);
  return Array.from({ length: to }, (_, x) => {
    const center = (x + 0.5) * scale;
    const first = Math.max(0, Math.trunc(center - support * stretch + 0.5));
    const stop = Math.min(from, Math.trunc(center + support * stretch + 0.5));
    const exact = Array.from({ length: stop - first }, (_, at) => weight((first + at + 0.5 - center) / stretch));
    const sum = exact.reduce((total, each) => total + each, 0);
    const whole = exact.map((each) => {
      const scaled = (each / sum) * 2 ** BITS;
      return scaled < 0 ? Math.trunc(scaled - 0.5) : Math.trunc(scaled + 0.5);
    });
    return { first, weights: Int32Array.from(whole) };
  });
}

/**
 * Resize rows, then columns.
 * @param {Image} image
 * @param {number} width
 * @param {number} height
 * @param {Interpolation} interpolation
 * @returns {Image}
 */
export function resize(image, width, height, interpolation) {
  const rows = image.width === width ? image.data : resizeRows(image, windowsOf(image.width, width, interpolation));
  if (image.height === height) return { data: rows, width, height };
  return { data: resizeColumns(rows, width, windowsOf(image.height, height, interpolation)), width, height };
}

/** @param {Image} image @param {Window[]} windows */
function resizeRows({ data, width, height }, windows) {
  const resized = new Uint8ClampedArray(height * windows.length * 3);
  let to = 0;
  for (let row = 0; row < height; row += 1) {
    for (const { first, weights } of windows) {
      let red = HALF;
      let green = HALF;
      let blue = HALF;
      let pixel = (row * width + first) * 3;
      for (const weight of weights) {
        red += weight * data[pixel];
        green += weight * data[pixel + 1];
        blue += weight * data[pixel + 2];
        pixel += 3;
      }
      resized[to] = red >> BITS;
      resized[to + 1] = green >> BITS;
      resized[to + 2] = blue >> BITS;
      to += 3;
    }
  }
  return new Uint8Array(resized.buffer);
}

/** @param {Uint8Array} data @param {number} width @param {Window[]} windows */
function resizeColumns(data, width, windows) {
  const line = width * 3;
  const resized = new Uint8ClampedArray(windows.length * line);
  const sums = new Int32Array(line);
  windows.forEach(({ first, weights }, row) => {
    sums.fill(HALF);
    weights.forEach((weight, at) => {
      const from = (first + at) * line;
      for (let x = 0; x < line; x += 1) sums[x] += weight * data[from + x];
    });
    for (let x = 0; x < line; x += 1) resized[row * line + x] = sums[x] >> BITS;
  });
  return new Uint8Array(resized.buffer);
}
