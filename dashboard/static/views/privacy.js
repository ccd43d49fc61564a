// What the task promises and devices have spent, the sums that the second operator opens, and who holds which key.

import { html } from "../vendor/standalone.module.js";
import { counted, moment } from "../format.js";
import { Figure } from "./summary.js";

const short = (key) => html`<code title=${key}>${key.slice(0, 16)}</code>`;

function requestOf({ requested, requested_s, problem }) {
  if (!requested) return "";
  if (problem) return "refused";
  return requested_s === null ? "opened, in no head yet" : `since ${moment(requested_s)}`;
}

function Sums({ sums }) {
  const share = `${Math.round(100 * sums.tolerance)} % may add no noise`;
  const opened = `in ${counted(sums.lists, "list")}${sums.left_out ? `, and ${sums.left_out} in no head` : ""}`;
  return html`<${Figure} name="Devices in a sum" value=${`≥ ${sums.min_devices}`} note=${share} />
    <${Figure} name="Devices opened" value=${sums.devices} note=${opened} />
    <${Figure} name="Devices requested" value=${sums.requested} note=${requestOf(sums)} />
    <${Figure} name="Devices waiting" value=${sums.waiting} note="in no list" />`;
}

function Keys({ status: { aggregator_key, enrollment, sums } }) {
  return html`<h3>Who holds which key</h3>
    <table>
      <tbody>
        <tr><th scope="row">Devices</th><td class="text">sign submissions with keys of their own: ${enrollment.enrolled} enrolled, ${enrollment.first_use} stored at first use</td></tr>
        <tr><th scope="row">Aggregator</th><td class="text">signs the task with ${short(aggregator_key)}</td></tr>
        <tr>
          <th scope="row">Second operator</th>
          <td class="text">
            signs sums of masks with ${short(sums.sign_key)}: owners of devices compare it with <code>--second-operator</code><br />
            opens masks of this task with ${short(sums.seal_key)}
          </td>
        </tr>
      </tbody>
    </table>`;
}

export function Privacy({ status }) {
  const { privacy, sums } = status;
  const local = privacy.local_epsilon;
  const condition = local === null ? "" : ", conditional";
  return html`<dl class="figures">
      <${Figure} name="Epsilon of a submission" value=${privacy.epsilon} note=${`of ${privacy.unit}; delta ${privacy.delta}${condition}`} />
      <${Figure} name="Epsilon of a device" value=${`≤ ${privacy.max_epsilon}`} note=${`of all its submissions${condition}`} />
      ${local !== null && html`<${Figure} name="Local epsilon" value=${local.toFixed(2)} note="to both operators; conditional ones need an honest second operator" />`}
      <${Figure}
        name="Greatest epsilon spent"
        value=${privacy.spent === null ? "none" : privacy.spent.toFixed(2)}
        note=${`${counted(privacy.nearly_spent, "device")} near the limit${condition}`}
      />
      ${sums && html`<${Sums} sums=${sums} />`}
    </dl>
    ${sums?.problem && html`<p class="problem">The second operator opens no sum: ${sums.problem}</p>`}
    ${sums && html`<${Keys} status=${status} />`}`;
}
