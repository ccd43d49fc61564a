// Progress of the open collection or round, and of the training that follows it.

import { html, useEffect, useState } from "../vendor/standalone.module.js";
import { counted, duration, now } from "../format.js";

/** Draw again each second, for what counts down. */
export function useSeconds() {
  const [, set] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => set((number) => number + 1), 1000);
    return () => clearInterval(timer);
  }, []);
}

function Names({ title, devices }) {
  if (!devices.length) return null;
  const shown = devices.slice(0, 40);
  return html`<p class="names"><b>${title}</b> ${shown.join(", ")}${devices.length > shown.length ? ` and ${devices.length - shown.length} more` : ""}</p>`;
}

function timeLeft(status) {
  if (status.closes_at_s === null) return "";
  const left_s = status.closes_at_s - now();
  return left_s > 0 ? `closes in ${duration(left_s)} at the latest` : "closes now";
}

function Training({ training }) {
  const epochs = training.epochs ? `epoch ${training.epoch} of ${training.epochs}` : "started";
  return html`<p>
    Training head ${training.version}: ${epochs}
    <progress max=${training.epochs ?? 1} value=${training.epochs ? training.epoch : undefined} aria-label="Training"></progress>
  </p>`;
}

export function Collection({ status }) {
  useSeconds();
  const held = new Set(status.quarantine.filter((each) => each.released_s === null).map((each) => each.device));
  const inside = status.devices.filter((device) =>
    status.round ? status.round.devices.includes(device.device) : device.prototypes > 0,
  );
  const names = new Set(inside.map((device) => device.device));
  const missing = status.devices.filter(
    (device) => !names.has(device.device) && !held.has(device.device) && device.state !== "revoked",
  );
  const first = !status.heads.length || status.round;
  const wanted = first ? status.quorum : status.retrain_after;
  const done = status.round ? status.round.devices.length : status.waiting;
  const what = status.round
    ? `Round ${status.round.number} of ${status.round.rounds}${status.round.over ? ", over" : ""}`
    : status.heads.length
      ? "Collection for the next head"
      : "Collection for the first head";
  return html`<p>
      <b>${what}:</b> ${done} of ${counted(wanted, first ? "submission" : "new submission")}
      <progress max=${wanted} value=${Math.min(done, wanted)} aria-label="Submissions"></progress>
      <span class="quiet">${timeLeft(status)}</span>
    </p>
    ${status.training && html`<${Training} training=${status.training} />`}
    <${Names} title=${first ? "In:" : "Submissions of:"} devices=${inside.map((device) => device.device)} />
    ${status.round && html`<${Names} title="Earlier submission counts:" devices=${status.round.carried} />`}
    <${Names} title="Missing:" devices=${missing.map((device) => device.device)} />`;
}
