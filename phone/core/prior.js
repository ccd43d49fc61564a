// @ts-check
/**
 * The prior of a place: how often each class occurs there, and probabilities that take it into account.
 *
 * A head expects all classes alike. The estimate and its test are of Saerens, Latinne and Decaestecker, "Adjusting the
 * outputs of a classifier to new a priori probabilities", Neural Computation 14 (2002); the quantile of Wilson and
 * Hilferty (1931).
 */

/** @typedef {ArrayLike<number>} Row probabilities of the C classes */

/** The newest images by which the prior is chosen, and the number below which labels are not compared with none. */
export const WINDOW = 100;
const FEWEST = 20;
const STEPS = 50;
/** The standard normal distribution's quantile at 0.999. */
const Z = 3.090232306167813;

/** @param {number[]} values */
const sum = (values) => values.reduce((total, value) => total + value, 0);

/** Return a row without negative numbers that adds up to 1; all classes alike if it has no positive one. @param {Row} row @returns {number[]} */
function normalized(row) {
  const positive = Array.from(row, (value) => Math.max(0, value));
  const total = sum(positive);
  return positive.map((value) => (total ? value / total : 1 / positive.length));
}

/** Return shares in which each class is counted once more. @param {number[]} counts */
function smoothed(counts) {
  const total = sum(counts) + counts.length;
  return counts.map((count) => (count + 1) / total);
}

/** Return the share of each class in labeled images; null without any. @param {number[]} counts */
export const labelShares = (counts) => (counts.some(Boolean) ? smoothed(counts) : null);

/** Return rows of the classes of which an image has any probability, and these classes. @param {Row[]} rows */
function possible(rows) {
  const all = rows.map(normalized);
  const classes = [...(all[0]?.keys() ?? [])].filter((at) => all.some((row) => row[at] > 0));
  return { rows: all.map((row) => classes.map((at) => row[at])), classes };
}

/** @param {number[]} row @param {number[]} shares */
const dot = (row, shares) => row.reduce((total, value, at) => total + value * shares[at], 0);

/** Return the log likelihood of images by shares, less that by equal ones. @param {Row[]} probabilities @param {number[]} shares */
function logGain(probabilities, shares) {
  const { rows, classes } = possible(probabilities);
  const some = classes.map((at) => shares[at]);
  const total = sum(some);
  return rows.reduce((gain, row) => gain + Math.log((dot(row, some) / total) * classes.length), 0);
}

/** Return a quantile at 0.999 of the chi-squared distribution, to 3 %. @param {number} freedom */
function chiSquaredLimit(freedom) {
  const spread = 2 / (9 * freedom);
  return freedom * (1 - spread + Z * Math.sqrt(spread)) ** 3;
}

/** Return the share of each class in images, or null if they do not show that the shares differ. @param {Row[]} probabilities */
function estimate(probabilities) {
  const { rows, classes } = possible(probabilities);
  if (classes.length < 2) return null;
  /** @type {number[]} */
  let found = classes.map(() => 1 / classes.length);
  for (let step = 0; step < STEPS; step += 1) {
    const counts = classes.map(() => 0);
    for (const row of rows) {
      const total = dot(row, found);
      row.forEach((value, at) => (counts[at] += (value * found[at]) / total));
    }
    found = smoothed(counts);
  }
  const gain = rows.reduce((total, row) => total + Math.log(dot(row, found) * classes.length), 0);
  if (2 * gain <= chiSquaredLimit(classes.length - 1)) return null;
  const shares = new Array(probabilities[0].length).fill(0);
  classes.forEach((at, place) => (shares[at] = found[place]));
  return shares;
}

/**
 * Return the shares of a prior for images with these probabilities of a head without one; null for none. The labels'
 * shares count unless 20 images or more are as likely without a prior; without labels the shares are estimated.
 * @param {Row[]} probabilities
 * @param {number[] | null} labels the shares of the device's labeled images
 * @returns {number[] | null}
 */
export function choosePrior(probabilities, labels) {
  if (!labels) return probabilities.length ? estimate(probabilities) : null;
  return probabilities.length < FEWEST || logGain(probabilities, labels) > 0 ? labels : null;
}

/** Return probabilities multiplied by the classes' shares, in single precision. @param {Row} row @param {number[] | null} shares @returns {Float32Array} */
export const adjusted = (row, shares) =>
  Float32Array.from(shares ? normalized(normalized(row).map((value, at) => value * shares[at])) : row);

/** Return the index of the greatest value, the first of equal ones. @param {Row} row */
export const bestOf = (row) => Array.from(row).reduce((best, value, at) => (value > row[best] ? at : best), 0);
