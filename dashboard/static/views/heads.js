// Trained heads: their figures, the files of the current one, and what an operator can do.

import { html } from "../vendor/standalone.module.js";
import { save } from "../fleet.js";
import { bytes, counted, moment, percent, prototypesOf } from "../format.js";
import { ask } from "./dialogs.js";

const SHOWN = 20;

function Candidate({ candidate }) {
  return html`<div class="note">
    <p>
      Head ${candidate.version} is tried by ${counted(candidate.canaries.length, "canary device")};
      ${candidate.awaited.length ? ` waiting for ${candidate.awaited.slice(0, 10).join(", ")}.` : " all have answered."}
      ${` ${candidate.summary}`}
    </p>
    <button onClick=${() => ask("promote")}>Promote head ${candidate.version}</button>
  </div>`;
}

function Head({ head }) {
  const { version, held_out: heldOut, metrics: { images, counted_images, calibrated_from, calibration_images } } = head;
  const calibrated = calibrated_from && `head ${calibrated_from}, calibrated on ${Math.round(calibration_images)} held-out images`;
  return html`<tr>
    <th scope="row">${version}</th>
    <td class=${head.reason || calibrated ? "text" : ""}>${head.state && html`<span class="state ${head.state}">${head.state}</span>`} ${head.reason || calibrated}</td>
    <td>${moment(head.trained_s)}</td>
    <td class="number">${head.devices}</td>
    <td class="number">${head.prototypes}</td>
    <td class="number">${images === undefined ? "–" : `${counted_images} of ${images}`}</td>
    <td class="number">${percent(heldOut.accuracy)}</td>
    <td class="number">${percent(heldOut.balanced)}</td>
    <td class="number">${percent(heldOut.with_prior)}</td>
    <td class="number">${heldOut.devices}</td>
    <td class="number">${bytes(head.size_bytes)}</td>
    <td class="actions">
      ${head.state !== "current" && html`<button onClick=${() => ask("rollback", version)}>Roll back to ${version}</button>`}
    </td>
  </tr>`;
}

export function Heads({ status }) {
  if (!status.heads.length) return html`<p class="empty">No head is trained yet.</p>`;
  const newest = [...status.heads].reverse().slice(0, SHOWN);
  return html`${status.rollout.candidate && html`<${Candidate} candidate=${status.rollout.candidate} />`}
    <p class="tools">
      ${status.head_path && html`<a class="button" href="api/v1/files/head.onnx" download onClick=${save}>Download head.onnx</a>`}
      ${status.model_path && html`<a class="button" href="api/v1/files/model.onnx" download onClick=${save}>Download model.onnx</a>`}
    </p>
    <div class="scroll" tabindex="0" role="region" aria-label="Heads">
      <table>
        <thead>
          <tr>
            <th scope="col">Head</th><th scope="col">State</th><th scope="col">Trained</th>
            <th scope="col" class="number">Devices</th><th scope="col" class="number">${prototypesOf(status)}</th><th scope="col" class="number">Images that count</th>
            <th scope="col" class="number">Accuracy</th><th scope="col" class="number">Balanced accuracy</th>
            <th scope="col" class="number">With prior</th>
            <th scope="col" class="number">Evaluated by</th><th scope="col" class="number">Size</th><th scope="col">Actions</th>
          </tr>
        </thead>
        <tbody>
          ${newest.map((head) => html`<${Head} key=${head.version} head=${head} />`)}
        </tbody>
      </table>
    </div>
    ${newest[0].limited.map((limit) => html`<p class="quiet" key=${limit}>${limit}</p>`)}
    ${status.heads.length > SHOWN && html`<p class="quiet">The newest ${SHOWN} of ${status.heads.length}.</p>`}`;
}
