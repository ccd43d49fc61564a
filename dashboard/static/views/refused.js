// Messages that the aggregator has refused, by reason, and the devices that sent most of them.

import { html } from "../vendor/standalone.module.js";
import { counted } from "../format.js";

const SHOWN = 20;

export function Refused({ status }) {
  if (!status.refusals.length) return html`<p class="empty">None.</p>`;
  const reasons = new Map();
  for (const { reason, count } of status.refusals) reasons.set(reason, (reasons.get(reason) ?? 0) + count);
  const most = [...status.refusals].sort((one, other) => other.count - one.count).slice(0, SHOWN);
  const total = Math.max(...reasons.values());
  return html`<ul class="bars" aria-label="By reason">
      ${[...reasons].map(
        ([reason, count]) => html`<li key=${reason}>
          <span class="name">${reason}</span><meter min="0" max=${total} value=${count} aria-label=${reason}></meter><span>${count}</span>
        </li>`,
      )}
    </ul>
    <div class="scroll" tabindex="0" role="region" aria-label="Refused messages by device">
      <table>
        <thead>
          <tr><th scope="col">Device</th><th scope="col">Reason</th><th scope="col" class="number">Messages</th><th scope="col">Last one</th></tr>
        </thead>
        <tbody>
          ${most.map(
            (each) => html`<tr key=${`${each.device} ${each.reason}`}>
              <th scope="row">${each.device}</th><td>${each.reason}</td><td class="number">${each.count}</td><td class="text">${each.detail}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
    ${status.refusals.length > SHOWN && html`<p class="quiet">The first ${SHOWN} of ${counted(status.refusals.length, "row")}.</p>`}`;
}
