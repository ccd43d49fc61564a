// @ts-check
/** Delays before something is tried again. No clock and no randomness. */

/** Seconds before a request is repeated, doubled with each attempt. @param {number} attempts */
export const retryDelayS = (attempts) => Math.min(300, 10 * 2 ** Math.min(attempts, 10));

/**
 * Seconds before the next connection, spread so that a fleet does not reconnect all at once.
 * @param {number} failures
 * @param {number} random from 0 to 1
 */
export const reconnectDelayS = (failures, random) => 0.2 + random * (Math.min(60, 2 ** Math.min(failures, 10)) - 0.2);
