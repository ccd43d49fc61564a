// @ts-check
/**
 * The device's state machine: (state, event) -> (state, actions). Pure.
 *
 * A device follows the retained task: it downloads the backbone, builds a submission of its images, uploads it until the
 * aggregator's receipt arrives, installs the announced head, evaluates it and uploads the evaluation. Every request is
 * repeated after a delay, so any message may be lost. One upload and one download run at a time.
 */

import { chunkBytes } from "../wire/frames.js";
import { MAX_CHUNK_BYTES } from "../wire/messages.js";
import { hex } from "../wire/signatures.js";
import { retryDelayS } from "./delays.js";
import * as downloads from "./downloads.js";
import * as uploads from "./uploads.js";

/** @typedef {import("../wire/messages.js").Message<"task">} Task */
/** @typedef {import("../wire/messages.js").Message<"head">} Heads */
/** @typedef {Heads["current"]} HeadRef */
/** @typedef {import("../wire/messages.js").Message<"frame">} Frame */
/** @typedef {import("../wire/messages.js").Message<"receipt">} Receipt */
/** @typedef {import("./uploads.js").Item} Item */
/** @typedef {import("./downloads.js").Blob_} Blob_ */
/** @typedef {"rounds" | "statistics" | "privacy" | "perturbation" | "several_backbones"} Unsupported */
/**
 * @typedef {object} State
 * @property {boolean} connected
 * @property {number} chunk bytes of data in a frame
 * @property {{digest: string, manifest: Task} | null} task
 * @property {{manifest: Heads, isCanary: boolean} | null} head the newest manifest of heads, of any task
 * @property {ReadonlySet<string>} stored digests of whole blobs
 * @property {ReadonlySet<string>} expired channels whose newest manifest has expired
 * @property {number} buildDueS time of the next build; infinite if none is due
 * @property {boolean} building
 * @property {number} failures builds in a row that failed
 * @property {number} above the next submission has a higher sequence
 * @property {string} installing digest of the head that is being installed
 * @property {string} installed digest of the head in use, once its evaluation is made
 * @property {{head: string, reason: string} | null} refused the last head that was refused
 * @property {string} evaluated digest of the last head whose evaluation was received
 * @property {Item | null} received the task's submission that the aggregator has received
 * @property {import("./uploads.js").Upload[]} uploads the current one first
 * @property {import("./downloads.js").Download | null} download
 * @property {boolean} isFull the browser has no room for downloads
 * @property {string} ended why the device has ended; empty while it runs
 */
/**
 * @typedef {{type: "connected", maxPacketBytes: number | null} | {type: "disconnected"} | {type: "drained"}
 *   | {type: "aggregatorStarted"} | {type: "aggregatorReconnected"} | {type: "ticked"}
 *   | {type: "task", digest: string, manifest: Task} | {type: "head", manifest: Heads, isCanary: boolean}
 *   | {type: "outbox", items: Item[]} | {type: "opened", digest: string, offset: number}
 *   | {type: "finished", digest: string, isValid: boolean} | {type: "stored", digests: ReadonlySet<string>}
 *   | {type: "frame", frame: Frame} | {type: "receipt", receipt: Receipt}
 *   | {type: "built", task: string, item: Item | null, failed: boolean}
 *   | {type: "installed", head: string, report: Item | null, reason: string}
 *   | {type: "expired", channels: ReadonlySet<string>} | {type: "imagesChanged"} | {type: "full", isFull: boolean}
 *   | {type: "ended", reason: string}} Event
 */
/**
 * @typedef {{type: "open", blob: Blob_} | {type: "request", digest: string, offset: number, length: number}
 *   | {type: "append", blob: Blob_, offset: number, parts: Uint8Array[], done: boolean}
 *   | {type: "build", task: string, manifest: Task, above: number}
 *   | {type: "install", task: string, manifest: Task, head: HeadRef}
 *   | {type: "send", item: Item, ranges: import("../wire/frames.js").Range[]} | {type: "received", item: Item}} Action
 */
/** @typedef {{state: State, actions: Action[]}} Step */

/** Seconds without a change of the images before a submission is built: a group of images is final, a tap is not. */
export const QUIET_S = 8;
export const MAX_HEAD_BYTES = 2 ** 26;

/** @type {State} */
export const START = {
  connected: false, chunk: MAX_CHUNK_BYTES, task: null, head: null, stored: new Set(), expired: new Set(), buildDueS: 0,
  building: false, failures: 0, above: 0, installing: "", installed: "", refused: null, evaluated: "", received: null,
  uploads: [], download: null, isFull: false, ended: "",
};

/** Return why this device does not follow a task; empty if it does. @param {Task} task @returns {Unsupported | ""} */
export function unsupportedReason(task) {
  if (task.program) return "rounds";
  if (task.differential_privacy) return "privacy";
  if (task.statistics) return "statistics";
  if (task.perturbation) return "perturbation";
  return task.backbones.length > 1 ? "several_backbones" : "";
}

/** Return the head that the device is to use: the candidate if it is a canary. @param {State} state @returns {HeadRef | null} */
export function currentHead({ head, task }) {
  if (!head || hex(head.manifest.task) !== task?.digest) return null;
  return (head.isCanary && head.manifest.candidate) || head.manifest.current;
}

/**
 * Handle one event, then start everything that is possible and not under way.
 * @param {State} before
 * @param {Event} event
 * @param {number} nowS of a clock that only grows
 * @returns {Step}
 */
export function step(before, event, nowS) {
  if (before.ended) return { state: before, actions: [] };
  let { state, actions } = react(before, event, nowS);
  const pursued = [(/** @type {State} */ each) => downloads.choose(each, requiredBlobs(each)), install, build, downloads.requestDue, uploads.queryDue];
  for (const pursue of pursued) {
    if (state.ended) break;
    const next = pursue(state, nowS);
    state = next.state;
    actions = [...actions, ...next.actions];
  }
  return { state, actions };
}

/** @param {State} state @param {Event} event @param {number} nowS @returns {Step} */
function react(state, event, nowS) {
  switch (event.type) {
    case "drained": return uploads.drained(state, nowS);
    case "frame": return downloads.receive(state, event.frame, hex(event.frame.digest), nowS);
    case "receipt": {
      const { receipt } = event;
      const digest = hex(receipt.digest);
      const isDownload = state.download?.blob.digest === digest && receipt.status === "refused";
      return isDownload ? { state: downloads.refused(state, receipt.reason, nowS), actions: [] } : uploads.receive(state, receipt, digest, nowS);
    }
    default: return { state: changed(state, event, nowS), actions: [] };
  }
}

/** @param {State} state @param {Exclude<Event, {type: "drained" | "frame" | "receipt"}>} event @param {number} nowS @returns {State} */
function changed(state, event, nowS) {
  switch (event.type) {
    case "connected": return { ...restarted(state), connected: true, chunk: chunkBytes(event.maxPacketBytes) };
    case "disconnected": return { ...state, connected: false };
    case "aggregatorStarted": return { ...restarted(uploads.confirm(state)), refused: null };
    case "aggregatorReconnected": return restarted(state);
    case "task": return withTask(state, event);
    case "head": return { ...state, head: { manifest: event.manifest, isCanary: event.isCanary } };
    case "outbox": return uploads.confirm(uploads.synchronize(state, event.items));
    case "opened": return downloads.opened(state, event.digest, event.offset, nowS);
    case "finished": return downloads.finished(state, event.digest, event.isValid, nowS);
    case "stored": return { ...state, stored: event.digests };
    case "built": return built(state, event, nowS);
    case "installed": return installed(state, event);
    case "expired": return { ...state, expired: event.channels };
    case "imagesChanged": return { ...state, buildDueS: nowS + QUIET_S };
    case "full": return { ...state, isFull: event.isFull };
    case "ended": return { ...state, ended: event.reason };
    case "ticked": return state;
  }
}

/** Repeat all requests: messages in flight may be lost. @param {State} state @returns {State} */
const restarted = (state) => ({ ...downloads.restart(state), uploads: state.uploads.map(uploads.restarted) });

/** @param {State} state @param {{digest: string, manifest: Task}} seen @returns {State} */
function withTask(state, { digest, manifest }) {
  if (digest === state.task?.digest) return state;
  return { ...state, task: { digest, manifest }, buildDueS: 0, building: false, failures: 0, above: 0, installing: "", received: null, uploads: [] };
}

/** @param {Blob_ | {digest: Uint8Array, size_bytes: number, name: string}} ref @returns {Blob_} */
const blobOf = ({ digest, size_bytes, name }) => ({ digest: typeof digest === "string" ? digest : hex(digest), size_bytes, name });

/** @param {State} state @returns {Blob_[]} */
function requiredBlobs(state) {
  const { task } = state;
  if (!task || unsupportedReason(task.manifest)) return [];
  const head = currentHead(state);
  const isWanted = head && head.head.size_bytes <= MAX_HEAD_BYTES && hex(head.head.digest) !== state.refused?.head;
  return [blobOf(task.manifest.backbones[0]), ...(isWanted ? [blobOf(head.head)] : [])];
}

/** @param {State} state @returns {boolean} */
const hasBackbone = ({ task, stored }) => task !== null && stored.has(hex(task.manifest.backbones[0].digest));

/** Install the head once it and the backbone are stored; one that is too large is refused by then. @param {State} state @returns {Step} */
function install(state) {
  const { task } = state;
  const head = currentHead(state);
  const key = head ? hex(head.head.digest) : "";
  const isReady = hasBackbone(state) && head && (state.stored.has(key) || head.head.size_bytes > MAX_HEAD_BYTES);
  const isKnown = [state.installed, state.installing, state.refused?.head].includes(key);
  const isStale = state.expired.has("task") || state.expired.has("head");
  if (!task || unsupportedReason(task.manifest) || !isReady || isKnown || isStale) return { state, actions: [] };
  return { state: { ...state, installing: key }, actions: [{ type: "install", task: task.digest, manifest: task.manifest, head }] };
}

/** @param {State} state @param {number} nowS @returns {Step} */
function build(state, nowS) {
  const { task, above } = state;
  const isDue = nowS >= state.buildDueS && !state.building && hasBackbone(state) && !state.expired.has("task");
  if (!task || unsupportedReason(task.manifest) || !isDue) return { state, actions: [] };
  return { state: { ...state, building: true, buildDueS: Infinity }, actions: [{ type: "build", task: task.digest, manifest: task.manifest, above }] };
}

/** @param {State} state @param {{task: string, item: Item | null, failed: boolean}} event @param {number} nowS @returns {State} */
function built(state, { task, item, failed }, nowS) {
  if (task !== state.task?.digest) return state;
  const failures = failed ? state.failures + 1 : 0;
  const buildDueS = failed ? Math.min(state.buildDueS, nowS + retryDelayS(failures)) : state.buildDueS;
  const next = { ...state, building: false, failures, buildDueS, above: item ? 0 : state.above };
  if (!item) return next;
  return uploads.start(item.received ? { ...next, received: item } : next, item);
}

/** @param {State} state @param {{head: string, report: Item | null, reason: string}} event @returns {State} */
function installed(state, { head, report, reason }) {
  if (head !== state.installing) return state;
  const next = { ...state, installing: "" };
  const after = report ? uploads.start(next, report) : next;
  return reason ? { ...after, refused: { head, reason } } : { ...after, installed: head };
}
