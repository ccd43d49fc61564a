// @ts-check
/**
 * Uploads: a query, the ranges that the aggregator is missing in windows, and another query until the receipt.
 *
 * Receipts are not signed, so a refusal is never final: the device queries again with growing delays. Nor is `received`:
 * it queries again whenever the aggregator has started or has signed the task again.
 */

import { cut, queryRange } from "../wire/frames.js";
import { retryDelayS } from "./delays.js";

/** @typedef {import("../wire/frames.js").Range} Range */
/** @typedef {import("./machine.js").State} State */
/** @typedef {import("./machine.js").Step} Step */
/** @typedef {import("../wire/messages.js").Message<"receipt">} Receipt */
/**
 * @typedef {object} Item in the outbox
 * @property {string} digest hex, identifies the transfer
 * @property {number} size_bytes
 * @property {"submission" | "evaluation"} kind
 * @property {string} task hex digest
 * @property {string} about a submission's fingerprint, or the hex digest of an evaluation's head
 * @property {boolean} received by the aggregator
 */
/**
 * @typedef {object} Upload
 * @property {Item} item
 * @property {Range[]} missing as the aggregator has named them last
 * @property {Range[]} ranges still to be sent before the next query
 * @property {boolean} sent everything missing and the query after it
 * @property {number} attempts queries since the last new answer
 * @property {number} refusals
 * @property {string} problem a reason of refusal; empty if nothing prevents the upload
 * @property {number | null} dueS time of the next query; null while frames are with the connection
 */

/** Refusals of other kinds are problems at once; these from the third one on. */
const MAY_PASS = ["digest", "late", "unknown_round", "unknown_task"];
const MAX_REFUSALS = 3;
/** A greater sequence is not exceeded: the device would soon run out of numbers. */
const MAX_SEQUENCE = 2 ** 53;

/** @param {Item} item @returns {Upload} */
const begun = (item) => ({ item, missing: [], ranges: [], sent: false, attempts: 0, refusals: 0, problem: "", dueS: 0 });

/** Begin with a query, at once: frames in flight may be lost. @param {Upload} upload @returns {Upload} */
export const restarted = (upload) => ({ ...upload, ranges: [], sent: false, attempts: 0, dueS: 0 });

/** What was refused comes last, and submissions first; all but the first restart. @param {Upload[]} uploads */
function queue(uploads) {
  const rank = (/** @type {Upload} */ each) => (each.refusals ? 2 : 0) + (each.item.kind === "evaluation" ? 1 : 0);
  return [...uploads].sort((a, b) => rank(a) - rank(b)).map((each, at) => (at ? restarted(each) : each));
}

/** Upload an item, unless it was received, in place of the one of its kind. @param {State} state @param {Item} item @returns {State} */
export function start(state, item) {
  if (state.uploads.some((each) => each.item.digest === item.digest)) return state;
  const others = state.uploads.filter((each) => each.item.kind !== item.kind);
  return { ...state, uploads: queue(item.received ? others : [...others, begun(item)]) };
}

/** Upload the task's items in the outbox; running transfers continue. @param {State} state @param {Item[]} items @returns {State} */
export function synchronize(state, items) {
  const own = items.filter((item) => item.task === state.task?.digest);
  const running = new Map(state.uploads.map((each) => [each.item.digest, each]));
  const pending = own.filter((item) => !item.received || running.has(item.digest)).map((item) => running.get(item.digest) ?? begun(item));
  const received = own.find((item) => item.received && item.kind === "submission") ?? null;
  return { ...state, received, uploads: queue(pending) };
}

/** Query whether the aggregator still has the submission. @param {State} state @returns {State} */
export function confirm(state) {
  const { received, uploads } = state;
  if (!received || uploads.some(({ item }) => item.kind === "submission")) return state;
  return { ...state, uploads: [...uploads, begun(received)] };
}

/** Send the first upload's query if it is due. @param {State} state @param {number} nowS @returns {Step} */
export function queryDue(state, nowS) {
  const [upload] = state.uploads;
  if (!upload || !state.connected || upload.dueS === null || nowS < upload.dueS) return { state, actions: [] };
  const isShort = upload.item.digest === state.received?.digest || upload.attempts > 0;
  const ranges = [queryRange(upload.item.size_bytes, isShort ? 0 : state.chunk)];
  const next = { ...upload, ranges: [], sent: false, attempts: upload.attempts + 1, dueS: null };
  return { state: withUpload(state, next), actions: [{ type: "send", item: upload.item, ranges }] };
}

/** Send the next window once the broker has the last one; after the last window wait for a receipt. @param {State} state @param {number} nowS @returns {Step} */
export function drained(state, nowS) {
  const [upload] = state.uploads;
  if (!upload || upload.dueS !== null) return { state, actions: [] };
  if (upload.ranges.length) return sendWindow(state, upload);
  return { state: withUpload(state, { ...upload, dueS: nowS + retryDelayS(upload.attempts) }), actions: [] };
}

/** @param {State} state @param {Receipt} receipt @param {string} digest hex @param {number} nowS @returns {Step} */
export function receive(state, receipt, digest, nowS) {
  const upload = state.uploads.find(({ item }) => item.digest === digest);
  if (!upload) {
    const isLost = receipt.status === "missing" && state.received?.digest === digest;
    return { state: isLost ? confirm(state) : state, actions: [] };
  }
  if (receipt.status === "missing") return sendMissing(state, upload, receipt.missing, nowS);
  if (receipt.status === "refused") return refused(state, upload, receipt, nowS);
  const { item } = upload;
  const next = without(state, upload);
  const after = item.kind === "submission" ? { ...next, received: { ...item, received: true } } : { ...next, evaluated: item.about };
  return { state: after, actions: [{ type: "received", item }] };
}

/** @param {State} state @param {Upload} upload @param {Range[]} named @param {number} nowS @returns {Step} */
function sendMissing(state, upload, named, nowS) {
  const size = upload.item.size_bytes;
  const missing = named.map(([start, stop]) => /** @type {Range} */ ([start, Math.min(stop, size)])).filter(([start, stop]) => start < stop);
  if (upload !== state.uploads[0] || upload.ranges.length || !missing.length) return { state, actions: [] };
  const isSame = String(missing) === String(upload.missing);
  if (upload.sent && isSame) {
    // All that was sent is being lost; or it is under way, and this answers an earlier one of two queries.
    const waiting = { ...upload, ranges: [], sent: false, dueS: nowS + retryDelayS(upload.attempts) };
    return { state: withUpload(state, waiting), actions: [] };
  }
  const query = missing[missing.length - 1][1] === size ? [] : [queryRange(size, 0)];
  return sendWindow(state, { ...upload, missing, ranges: [...missing, ...query], attempts: isSame ? upload.attempts : 0 });
}

/** @param {State} state @param {Upload} upload @returns {Step} */
function sendWindow(state, upload) {
  const { window, rest } = cut(upload.ranges, state.chunk);
  const next = { ...upload, ranges: rest, sent: !rest.length, dueS: null };
  return { state: withUpload(state, next), actions: [{ type: "send", item: upload.item, ranges: window }] };
}

/** @param {State} state @param {Upload} upload @param {Receipt} receipt @param {number} nowS @returns {Step} */
function refused(state, upload, { reason, sequence }, nowS) {
  // `refused` counts only as the answer to a query.
  if (!upload.attempts && !upload.ranges.length && !upload.sent) return { state, actions: [] };
  if (reason === "unknown_device" || reason === "revoked") return { state: { ...without(state, upload), ended: reason }, actions: [] };
  if (reason === "superseded" && upload.item.kind === "submission" && sequence <= MAX_SEQUENCE) {
    return { state: { ...without(state, upload), buildDueS: 0, above: Number(sequence) }, actions: [] };
  }
  if (reason === "no_space") {
    const waiting = { ...upload, ranges: [], sent: false, problem: reason, dueS: nowS + retryDelayS(upload.attempts) };
    return { state: withUpload(state, waiting), actions: [] };
  }
  const refusals = upload.refusals + 1;
  const mayPass = MAY_PASS.includes(String(reason)) && refusals < MAX_REFUSALS;
  const delayS = reason === "digest" && mayPass ? 0 : retryDelayS(refusals - 1);
  const again = {
    ...restarted(upload), missing: [], refusals, problem: mayPass ? upload.problem : reason ?? "malformed", dueS: nowS + delayS,
  };
  const next = without(state, upload);
  return { state: { ...next, uploads: [...next.uploads, again] }, actions: [] };
}

/** @param {State} state @param {Upload} upload @returns {State} */
const withUpload = (state, upload) =>
  ({ ...state, uploads: state.uploads.map((each) => (each.item.digest === upload.item.digest ? upload : each)) });

/** @param {State} state @param {Upload} upload @returns {State} */
const without = (state, upload) => ({ ...state, uploads: state.uploads.filter((each) => each.item.digest !== upload.item.digest) });
