// @ts-check
/** What has left this phone, what stays, and leaving the fleet. */

import { html, useRef } from "../vendor/standalone.module.js";
import { count, lines, percent, t, time } from "./texts.js";

/** @typedef {import("./app.js").Device} Device */
/** @typedef {import("./app.js").DeviceState} DeviceState */

const SHOWN = 10;

/** @param {DeviceState["upload"]} upload */
function uploadText({ state, sent_bytes, total_bytes, reason }) {
  return t(`upload_${state}`, { percent: percent(sent_bytes / Math.max(1, total_bytes)), detail: reason });
}

/** @param {{device: Device, state: DeviceState}} props */
export function Privacy({ device, state }) {
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const submissions = state.left.filter(({ kind }) => kind === "submission");
  return html`<section>
      <h2>${t("left_title")}</h2>
      <dl>
        <dt>${t("left_bytes")}</dt><dd>${t("bytes_of", { count: count(state.left_total.bytes) })}</dd>
        <dt>${t("left_images")}</dt><dd>${count(submissions[0]?.images ?? 0)}</dd>
        <dt>${t("left_kept")}</dt><dd>${count(state.images.length)}</dd>
      </dl>
      <p role="status" class="small">${uploadText(state.upload)}</p>
      ${submissions.length > 0 && html`<p class="quiet small">${t("taken_back")}</p>`}
      ${submissions.length ? html`<${Uploads} submissions=${submissions} />` : html`<p class="quiet">${t("left_none")}</p>`}
    </section>
    <section>
      <h2>${t("leaves_title")}</h2>
      <ul class="list">${lines("leaves", { min_images: state.task?.min_images ?? 2 }).map((line) => html`<li key=${line}>${line}</li>`)}</ul>
      <p class="quiet small">${t("not_private")}</p>
      <h2>${t("stays_title")}</h2>
      <p>${t("stays")}</p>
    </section>
    <section>
      <h2>${t("leave_title")}</h2>
      <p class="quiet small">${state.fleet} · ${state.device}</p>
      <button type="button" class="danger wide" onClick=${() => dialog.current?.showModal()}>${t("leave_button")}</button>
      <dialog ref=${dialog} aria-label=${t("leave_title")}>
        <p>${t("leave_sure")}</p>
        <div class="row">
          <button type="button" class="danger" onClick=${() => device.leave()}>${t("leave_button")}</button>
          <button type="button" onClick=${() => dialog.current?.close()}>${t("cancel")}</button>
        </div>
      </dialog>
    </section>`;
}

/** @param {{submissions: DeviceState["left"]}} props */
function Uploads({ submissions }) {
  return html`<table>
    <thead><tr><th scope="col">${t("time")}</th><th scope="col">${t("bytes")}</th><th scope="col">${t("averages")}</th><th scope="col">${t("images")}</th></tr></thead>
    <tbody>
      ${submissions.slice(0, SHOWN).map(
        (each) => html`<tr key=${each.time_s}>
          <td>${time(each.time_s)}</td><td>${count(each.bytes)}</td><td>${count(each.prototypes)}</td><td>${count(each.images)}</td>
        </tr>`,
      )}
    </tbody>
  </table>`;
}
