// The fleet in figures.

import { html } from "../vendor/standalone.module.js";
import { bytes, counted, percent } from "../format.js";

export function Figure({ name, value, note }) {
  return html`<div class="figure">
    <dt>${name}</dt>
    <dd><strong>${value}</strong>${note && html` <span>${note}</span>`}</dd>
  </div>`;
}

const QUOTAS = [
  ["devices", "Quota of devices", (value) => value],
  ["storage_bytes", "Quota of bytes", bytes],
  ["uploads", "Quota of uploads an hour", Math.ceil],
];

export function Summary({ status }) {
  const { devices, rollout } = status;
  const online = devices.filter((device) => device.state === "online").length;
  const current = status.heads.find((head) => head.version === rollout.current);
  const covered = Object.values(status.coverage).filter((each) => each.devices).length;
  const uploaded = devices.reduce((total, device) => total + device.bytes, 0);
  const epsilons = devices.map((device) => device.epsilon).filter((value) => value !== null);
  const refused = status.refusals.reduce((total, each) => total + each.count, 0);
  return html`<dl class="figures">
    <${Figure} name="Devices online" value=${online} note="of ${devices.length}" />
    <${Figure} name="Submissions" value=${status.submissions} note=${`${status.waiting} in no head yet`} />
    <${Figure} name="Classes covered" value=${covered} note="of ${status.classes.length}" />
    <${Figure}
      name="Current head"
      value=${rollout.current || "none"}
      note=${rollout.candidate ? `candidate ${rollout.candidate.version}` : ""}
    />
    <${Figure}
      name="Accuracy"
      value=${percent(current?.held_out.accuracy)}
      note=${current ? `on ${counted(current.held_out.correct + current.held_out.incorrect, "image")}` : ""}
    />
    <${Figure} name="Stored" value=${bytes(uploaded)} />
    ${epsilons.length > 0 &&
    html`<${Figure} name="Greatest epsilon" value=${Math.max(...epsilons).toFixed(2)} note=${`of ${epsilons.length} devices${status.sums ? ", conditional" : ""}`} />`}
    <${Figure} name="Refused messages" value=${refused} />
    ${QUOTAS.filter(([name]) => status.quotas[name].limit !== null).map(
      ([name, title, show]) =>
        html`<${Figure} key=${name} name=${title} value=${show(status.quotas[name].used)} note="of ${show(status.quotas[name].limit)}" />`,
    )}
  </dl>`;
}
