// @ts-check
/** Sentences that need attention. */

import { html } from "../vendor/standalone.module.js";
import { percent, problemText, t } from "./texts.js";

/** @typedef {import("./app.js").DeviceState} DeviceState */

/** @param {{kind: "good" | "warn" | "bad", text: string}} props */
export const Notice = ({ kind, text }) => html`<p class="notice ${kind}" role=${kind === "bad" ? "alert" : "status"}>${text}</p>`;

/** @param {{state: DeviceState}} props what keeps this phone from taking part */
export function Notices({ state }) {
  const reasons = [state.problem, state.unsupported, state.storage.full ? "storage_full" : ""].filter(Boolean);
  const { loading } = state;
  return html`<div>
    ${reasons.map((reason) => html`<${Notice} key=${reason} kind="bad" text=${problemText(String(reason))} />`)}
    ${!state.task && !reasons.length && html`<${Notice} kind="warn" text=${t("no_task")} />`}
    ${loading !== null && html`<${Notice} kind="warn" text=${t("loading", { percent: percent(loading) })} />`}
  </div>`;
}
