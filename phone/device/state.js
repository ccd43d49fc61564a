// @ts-check
/** What a device shows of itself: a plain object, made anew at each change. Words are keys of the page's sentences. */

import { MAX_DAMAGED } from "./downloads.js";
import { classReports, heldOutImages } from "./submission.js";
import { currentHead, unsupportedReason } from "./machine.js";

/**
 * @typedef {object} DeviceState
 * @property {"starting" | "other_tab" | "alone" | "member"} phase `alone` is in no fleet; in `other_tab` another tab is the device
 * @property {string | null} fleet
 * @property {string | null} device its name
 * @property {"offline" | "online"} connection
 * @property {boolean | null} aggregator_online null while it is not known
 * @property {{classes: string[], min_images: number, batch_size: number} | null} task
 * @property {"" | import("./machine.js").Unsupported} unsupported why this device does not take part in the task
 * @property {{version: number, classes: string[]} | null} head the head in use
 * @property {{kind: "backbone" | "head", done_bytes: number, total_bytes: number} | null} download
 * @property {{id: string, label: string, time_s: number, origin: "camera" | "file", held_out: boolean, averaged_with: number | null}[]} images
 *   `averaged_with`: other images of the same group, which count no longer without this one; null if it is in no group
 * @property {Record<string, number>} missing images that each class needs until the next upload, at least; 0 if the next upload has more of it
 * @property {{state: "none" | "due" | "building" | "waiting" | "sending" | "received" | "refused", sent_bytes: number, total_bytes: number, reason: string}} upload
 * @property {{time_s: number, kind: "submission" | "evaluation", bytes: number, prototypes: number, images: number}[]} left newest first
 * @property {{bytes: number, messages: number}} left_total
 * @property {{persistent: boolean, full: boolean}} storage without persistence, only images of the camera are taken
 * @property {number} unusable images that the backbone cannot use
 * @property {{key: Problem, detail: string} | null} problem the first one
 */
/**
 * @typedef {"replaced" | "revoked" | "unknown_device" | "name_taken" | "not_enrolled" | "wrong_fleet" | "too_many" | "broker"
 *   | "storage_full" | "expired" | "download_damaged" | "upload_refused" | "build_failed" | "head_refused" | "crashed"} Problem
 */
/** @typedef {{digest: string, kind: "submission" | "evaluation", time_s: number, bytes: number, prototypes: number, images: number}} LeftRow */
/**
 * @typedef {object} Known what the device knows beside its session
 * @property {DeviceState["phase"]} phase
 * @property {import("./store.js").Membership | null} membership
 * @property {import("./store.js").StoredImage[]} images
 * @property {import("./store.js").StoredGroup[]} groups
 * @property {import("./store.js").Facts["heads"] | null} heads
 * @property {LeftRow[]} left
 * @property {DeviceState["storage"]} storage
 * @property {DeviceState["problem"]} problem that nothing of the fleet has caused
 * @property {number} unusable
 */
/** @typedef {{state: import("./machine.js").State, closed: string, buildProblem: string, isAggregatorOnline: boolean | null}} InFleet */

/** @param {InFleet | null} session @param {boolean} hasMore images than the last build @returns {DeviceState["upload"]} */
function uploadOf(session, hasMore) {
  const none = { state: /** @type {const} */ ("none"), sent_bytes: 0, total_bytes: 0, reason: "" };
  if (!session) return none;
  const { uploads, building, received, connected, buildDueS, task } = session.state;
  const [upload] = uploads;
  if (!upload && building) return { ...none, state: "building" };
  if (!upload && task && hasMore && buildDueS < Infinity) return { ...none, state: "due" };
  if (!upload) return received ? { ...none, state: "received", sent_bytes: received.size_bytes, total_bytes: received.size_bytes } : none;
  const total = upload.item.size_bytes;
  const left = (upload.ranges.length ? upload.ranges : upload.sent ? [] : [[0, total]]).reduce((sum, [start, stop]) => sum + stop - start, 0);
  const state = upload.problem ? "refused" : connected ? "sending" : "waiting";
  return { state, sent_bytes: Math.max(0, total - left), total_bytes: total, reason: upload.problem };
}

/** @param {InFleet} session @param {DeviceState["storage"]} storage @returns {DeviceState["problem"]} */
function problemOf({ state, closed, buildProblem }, storage) {
  const followed = ["task", ...(currentHead(state) ? ["head"] : [])].filter((channel) => state.expired.has(channel));
  const refusedUpload = state.uploads.find(({ problem }) => problem)?.problem ?? "";
  /** @type {[boolean, string, string][]} */
  const problems = [
    [state.ended !== "", state.ended, ""],
    [closed !== "" && closed !== "offline", closed, ""],
    [storage.full, "storage_full", ""],
    [state.task !== null && followed.length > 0, "expired", followed.join(" ")],
    [(state.download?.damaged ?? 0) >= MAX_DAMAGED, "download_damaged", state.download?.blob.name ?? ""],
    [refusedUpload !== "", "upload_refused", refusedUpload],
    [buildProblem !== "", "build_failed", buildProblem],
    [state.refused !== null, "head_refused", state.refused?.reason ?? ""],
  ];
  const found = problems.find(([holds]) => holds);
  return found ? { key: /** @type {Problem} */ (found[1]), detail: found[2] } : null;
}

/**
 * Return the state of a device.
 * @param {Known} known
 * @param {InFleet | null} session
 * @returns {DeviceState}
 */
export function deviceState(known, session) {
  const { phase, membership, images, groups, heads, left, storage } = known;
  const machine = session?.state;
  const task = machine?.task?.manifest;
  const unsupported = task ? unsupportedReason(task) : "";
  const held = heldOutImages(images, groups);
  const others = new Map(groups.flatMap((group) => group.images.map((id) => [id, group.images.length - 1])));
  const download = machine?.download;
  const isBackbone = task?.backbones.some(({ name, size_bytes }) => name === download?.blob.name && size_bytes === download?.blob.size_bytes);
  const installed = heads?.installed;
  const reports = task && !unsupported ? classReports(task, images, groups) : [];
  /** @type {DeviceState} */
  const state = {
    phase,
    fleet: membership?.fleet ?? null,
    device: membership?.device ?? null,
    connection: machine?.connected && !machine.ended ? "online" : "offline",
    aggregator_online: session?.isAggregatorOnline ?? null,
    task: task ? { classes: task.classes, min_images: task.min_images, batch_size: task.batch_size } : null,
    unsupported,
    head: installed ? { version: installed.version, classes: installed.classes } : null,
    download: download ? { kind: isBackbone ? /** @type {const} */ ("backbone") : /** @type {const} */ ("head"), done_bytes: download.offset, total_bytes: download.blob.size_bytes } : null,
    images: images.map((image) => ({ ...image, held_out: held.has(image.id), averaged_with: others.get(image.id) ?? null })),
    missing: Object.fromEntries(reports.map(({ label, missing }) => [label, missing])),
    upload: uploadOf(session, reports.some(({ missing }) => missing === 0)),
    left: [...left].sort((a, b) => b.time_s - a.time_s).map(({ time_s, kind, bytes, prototypes, images: count }) => ({ time_s, kind, bytes, prototypes, images: count })),
    left_total: { bytes: left.reduce((sum, { bytes }) => sum + bytes, 0), messages: left.length },
    storage,
    unusable: known.unusable,
    problem: known.problem ?? (session ? problemOf(session, storage) : null),
  };
  return Object.freeze(state);
}
