// @ts-check
/**
 * Downloads: windows of a blob are requested, and of each window what is missing.
 *
 * Frames in order are stored; frames ahead of their turn wait in memory. Frames are not signed, so a wrong digest says
 * nothing about the blob: the device downloads it again, with growing delays and without an end.
 */

import { cut } from "../wire/frames.js";
import { MAX_CHUNK_BYTES } from "../wire/messages.js";
import { retryDelayS } from "./delays.js";

/** @typedef {import("../wire/frames.js").Range} Range */
/** @typedef {import("./machine.js").State} State */
/** @typedef {import("./machine.js").Step} Step */
/** @typedef {import("../wire/messages.js").Message<"frame">} Frame */
/** @typedef {{digest: string, size_bytes: number, name: string}} Blob_ with its digest in hex */
/**
 * @typedef {object} Download
 * @property {Blob_} blob
 * @property {number} offset first bytes that are stored
 * @property {{start: number, data: Uint8Array}[]} ahead frames beyond them, in order
 * @property {number} until where the last request ends; 0 if none is open, and frames are ignored
 * @property {number} attempts requests since the last new frame
 * @property {number} damaged times that the blob arrived with another digest
 * @property {number} dueS time of the next request; infinite until the bytes that are stored are known
 */

const WINDOW_BYTES = 16 * MAX_CHUNK_BYTES;
/** Frames that are held, which may be small and overlap. */
const MAX_AHEAD = 4096;
const MAX_REQUESTS = 16;
/** Damaged arrivals after which the device waits and says so. */
export const MAX_DAMAGED = 3;

/** Open the first required blob that is not stored. @param {State} state @param {Blob_[]} required @returns {Step} */
export function choose(state, required) {
  const blob = required.find(({ digest }) => !state.stored.has(digest));
  if (!blob || state.isFull) return { state: { ...state, download: null }, actions: [] };
  if (state.download?.blob.digest === blob.digest) return { state, actions: [] };
  return { state: { ...state, download: begun(blob) }, actions: [{ type: "open", blob }] };
}

/** @param {Blob_} blob @returns {Download} */
const begun = (blob) => ({ blob, offset: 0, ahead: [], until: 0, attempts: 0, damaged: 0, dueS: Infinity });

/** Continue at the bytes that are stored. @param {State} state @param {string} digest @param {number} offset @param {number} nowS @returns {State} */
export function opened(state, digest, offset, nowS) {
  const { download } = state;
  if (download?.blob.digest !== digest) return state;
  return { ...state, download: { ...download, offset, ahead: [], until: 0, attempts: 0, dueS: nowS } };
}

/** Request again at once what is in flight: it may be lost. @param {State} state @returns {State} */
export function restart(state) {
  const { download } = state;
  return download?.until ? { ...state, download: { ...download, until: 0, attempts: 0, dueS: 0 } } : state;
}

/** Return the missing ranges of the next window. @param {Download} download @returns {Range[]} */
function gaps({ blob, offset, ahead }) {
  const end = Math.min(blob.size_bytes, offset + WINDOW_BYTES);
  /** @type {Range[]} */
  const missing = [];
  let covered = offset;
  for (const { start, data } of [...ahead, { start: end, data: new Uint8Array() }]) {
    if (covered < Math.min(start, end)) missing.push([covered, Math.min(start, end)]);
    covered = Math.max(covered, start + data.length);
  }
  return missing;
}

/** Request what is missing of the next window, or of the last one if that is overdue. @param {State} state @param {number} nowS @returns {Step} */
export function requestDue(state, nowS) {
  const { download } = state;
  if (!download || !state.connected || download.offset >= download.blob.size_bytes || nowS < download.dueS) return { state, actions: [] };
  const { window } = cut(gaps(download), WINDOW_BYTES, MAX_REQUESTS);
  const attempts = download.attempts + (download.until ? 1 : 0);
  const next = { ...download, until: window[window.length - 1][1], attempts, dueS: nowS + retryDelayS(attempts) };
  const { digest } = download.blob;
  return {
    state: { ...state, download: next },
    actions: window.map(([offset, stop]) => ({ type: "request", digest, offset, length: stop - offset })),
  };
}

/** Take a frame; duplicate, foreign and unexpected ones are ignored. @param {State} state @param {Frame} frame @param {string} digest @param {number} nowS @returns {Step} */
export function receive(state, frame, digest, nowS) {
  const { download } = state;
  const stop = frame.offset + frame.data.length;
  if (!download?.until || download.blob.digest !== digest || frame.size_bytes !== download.blob.size_bytes) return { state, actions: [] };
  const isHeld = download.ahead.some(({ start, data }) => start <= frame.offset && stop <= start + data.length);
  const isWanted = stop > download.offset && stop <= Math.min(frame.size_bytes, download.offset + WINDOW_BYTES) && frame.data.length > 0;
  const aheadBytes = download.ahead.reduce((sum, { data }) => sum + data.length, frame.data.length);
  const hasRoom = frame.offset <= download.offset || (download.ahead.length < MAX_AHEAD && aheadBytes <= 2 * WINDOW_BYTES);
  if (!isWanted || isHeld || !hasRoom) return { state, actions: [] };

  const ahead = [...download.ahead, { start: frame.offset, data: frame.data }].sort((a, b) => a.start - b.start);
  let { offset } = download;
  /** @type {Uint8Array[]} */
  const parts = [];
  while (ahead.length && ahead[0].start <= offset) {
    const [{ start, data }] = ahead.splice(0, 1);
    if (start + data.length <= offset) continue;
    parts.push(data.subarray(offset - start));
    offset = start + data.length;
  }
  const isEnd = stop === download.until || offset >= download.until;
  const next = {
    ...download, offset, ahead, attempts: 0, until: isEnd ? 0 : download.until, dueS: isEnd ? nowS : nowS + retryDelayS(0),
  };
  const done = offset === download.blob.size_bytes;
  const first = download.offset;
  return {
    state: { ...state, download: next },
    actions: parts.length ? [{ type: "append", blob: download.blob, offset: first, parts, done }] : [],
  };
}

/** Take a blob that was verified, or begin again with one that was damaged. @param {State} state @param {string} digest @param {boolean} isValid @param {number} nowS @returns {State} */
export function finished(state, digest, isValid, nowS) {
  const { download } = state;
  if (isValid) return { ...state, stored: new Set([...state.stored, digest]) };
  if (download?.blob.digest !== digest) return state;
  const damaged = download.damaged + 1;
  const delayS = damaged < MAX_DAMAGED ? 0 : retryDelayS(damaged - MAX_DAMAGED);
  return { ...state, download: { ...begun(download.blob), damaged, dueS: nowS + delayS } };
}

/** The aggregator does not send the blob now: request it again later. @param {State} state @param {string | null} reason @param {number} nowS @returns {State} */
export function refused(state, reason, nowS) {
  const { download } = state;
  if (!download?.until) return state; // nothing was asked
  if (reason === "unknown_device" || reason === "revoked") return { ...state, ended: reason };
  const attempts = download.attempts + 1;
  return { ...state, download: { ...download, attempts, dueS: nowS + retryDelayS(attempts) } };
}
