// @ts-check
/** Sentences that need attention. */

import { html } from "../vendor/standalone.module.js";
import { percent, t } from "./texts.js";

/** @typedef {import("./app.js").DeviceState} DeviceState */

/** @param {{kind: "good" | "warn" | "bad", text: string}} props */
export const Notice = ({ kind, text }) => html`<p class="notice ${kind}" role=${kind === "bad" ? "alert" : "status"}>${text}</p>`;

/** @param {{state: DeviceState}} props what keeps this phone from taking part */
export function Notices({ state }) {
  const { task, unsupported, problem, download } = state;
  return html`<div>
    ${problem && html`<${Notice} kind="bad" text=${t(problem.key, { detail: problem.detail })} />`}
    ${unsupported && html`<${Notice} kind="bad" text=${t(unsupported)} />`}
    ${!task && !problem && html`<${Notice} kind="warn" text=${t(state.connection === "online" ? "no_task" : "connecting")} />`}
    ${download && html`<${Notice} kind="warn" text=${t("loading", { percent: percent(download.done_bytes / Math.max(1, download.total_bytes)) })} />`}
  </div>`;
}
