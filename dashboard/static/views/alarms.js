// What needs an operator: each with what to do.

import { html } from "../vendor/standalone.module.js";
import { ago, counted, duration, now } from "../format.js";

function alarmsOf(status) {
  const found = [];
  const add = (kind, text) => found.push({ kind, text });
  if (!status.running) add("bad", "The aggregator is not running: start `aggregator run`.");
  if (status.preparing) add("warn", `A task with ${status.preparing} is prepared: its graphs are exported, and not served yet.`);
  if (status.intake.stopped_s !== null) {
    add("bad", `Uploads are not stored since ${ago(status.intake.stopped_s)}: ${status.intake.reason}`);
  }
  if (status.duplicate) add("bad", `Another aggregator uses this key, at ${status.duplicate.address || "an unknown address"}: stop one of them.`);
  if (status.lost_files.length) {
    add("bad", `${counted(status.lost_files.length, "lost file")}: devices or trainings need it; the log says why.`);
  }
  if (status.collection_problem) add("warn", `Collection: ${status.collection_problem}.`);
  const failed = status.failed_training;
  if (failed) {
    const again = duration(failed.retry_at_s - now());
    add("bad", `Training of head ${failed.version} has failed ${counted(failed.failures, "time")}: ${failed.reason}. Repeated in ${again}.`);
  }
  if (status.lost_submissions.length) {
    add("warn", `The disk has lost ${counted(status.lost_submissions.length, "submission")}: in no head until the device uploads again.`);
  }
  const valid = new Set(status.devices.filter((each) => each.state !== "revoked").map((each) => each.device));
  const held = status.quarantine.filter((each) => each.released_s === null && valid.has(each.device));
  if (held.length) {
    add("warn", `${counted(held.length, "device")} quarantined: ${held.slice(0, 5).map((each) => each.device).join(", ")}${held.length > 5 ? " …" : ""}`);
  }
  for (const [field, what] of [["problem", "cannot take part"], ["warning", "with a warning"]]) {
    const [first, ...rest] = status.devices.filter((device) => device[field]);
    if (!first) continue;
    const others = rest.slice(0, 5).map((each) => each.device).join(", ") + (rest.length > 5 ? " …" : "");
    const more = others && `; also ${others}: see the flags in Devices`;
    add("warn", `${counted(rest.length + 1, "device")} ${what}: ${first.device}: ${first[field]}${more}`);
  }
  for (const head of status.heads.slice(-1)) if (head.warning) add("warn", `Head ${head.version}: ${head.warning}`);
  for (const [quota, unit, what] of [
    [status.quotas.devices, 1, "devices (limits.max_devices)"],
    [status.quotas.storage_bytes, 1024 ** 2, "MiB of submissions (limits.max_storage_mb)"],
    [status.quotas.uploads, 1, "uploads an hour (limits.uploads_per_hour)"],
  ]) {
    if (quota.limit === null || quota.used < 0.9 * quota.limit) continue;
    const used = `${+(quota.used / unit).toPrecision(4)} of ${+(quota.limit / unit).toPrecision(4)} ${what}`;
    add("warn", `A quota is nearly used up: ${used}. Raise it in the task file, or revoke or forget devices.`);
  }
  if (status.rate_limited_until_s && status.rate_limited_until_s > now()) {
    add("warn", `The next training starts in ${duration(status.rate_limited_until_s - now())}, by limits.heads_per_hour.`);
  }
  return found;
}

export function Alarms({ status }) {
  const alarms = alarmsOf(status);
  if (!alarms.length) return null;
  return html`<ul class="alarms" aria-label="Needs attention">
    ${alarms.map(({ kind, text }) => html`<li class=${kind} key=${text}>${text}</li>`)}
  </ul>`;
}
