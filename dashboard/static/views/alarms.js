// What needs an operator, as the server finds it.

import { html } from "../vendor/standalone.module.js";

const KINDS = { error: "bad", warning: "warn" };

export function Alarms({ status }) {
  if (!status.attention.length) return null;
  return html`<ul class="alarms" aria-label="Needs attention">
    ${status.attention.map(({ level, title, text }) => {
      const line = `${title[0].toUpperCase()}${title.slice(1)}: ${text}`;
      return html`<li class=${KINDS[level]} key=${line}>${line}</li>`;
    })}
  </ul>`;
}
