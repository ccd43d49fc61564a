// All devices in a table: sorted, filtered, a page at a time.

import { html, useMemo, useState } from "../vendor/standalone.module.js";
import { ago, bytes, counted, moment, percent } from "../format.js";
import { ask } from "./dialogs.js";

const PAGE = 25;

const COLUMNS = [
  ["device", "Device", (row) => row.device],
  ["state", "State", (row) => row.state],
  ["seen", "Last seen", (row) => row.seen_s ?? 0],
  ["images", "Images", (row) => row.images],
  ["classes", "Classes", (row) => row.classes],
  ["bytes", "Upload", (row) => row.bytes],
  ["head", "Head", (row) => row.head],
  ["accuracy", "Accuracy", (row) => row.accuracy ?? -1],
  ["epsilon", "Epsilon", (row) => row.epsilon ?? -1],
  ["backbone", "Backbones", (row) => row.backbones.length],
  ["flags", "Flags", (row) => row.flags.length],
];

const NUMBERS = new Set(["images", "classes", "bytes", "head", "accuracy", "epsilon"]);

function rowsOf(status) {
  const held = new Map(status.quarantine.map((each) => [each.device, each]));
  return status.devices.map((device) => {
    const entry = held.get(device.device);
    const quarantined = entry && entry.released_s === null;
    const flags = [];
    if (quarantined) flags.push(["bad", `quarantined: ${entry.reason}`]);
    else if (entry) flags.push(["", `released from quarantine: ${entry.reason}`]);
    if (device.problem) flags.push(["bad", device.problem]);
    if (device.head_problem) flags.push(["bad", `head refused: ${device.head_problem}`]);
    if (device.warning) flags.push(["warn", device.warning]);
    for (const [reason, count] of Object.entries(device.refused_messages)) {
      flags.push(["warn", `refused ${counted(count, "message")}: ${reason}`]);
    }
    return { ...device, quarantined, flags };
  });
}

function sorted(rows, [name, isDescending]) {
  const key = COLUMNS.find(([column]) => column === name)[2];
  const order = isDescending ? -1 : 1;
  return [...rows].sort((one, other) => {
    const [a, b] = [key(one), key(other)];
    return a < b ? -order : a > b ? order : 0;
  });
}

function Heading({ name, title, sort, setSort }) {
  const isSorted = sort[0] === name;
  const direction = isSorted ? (sort[1] ? "descending" : "ascending") : "none";
  return html`<th scope="col" aria-sort=${direction} class=${NUMBERS.has(name) ? "number" : ""}>
    <button onClick=${() => setSort([name, isSorted && !sort[1]])}>${title}</button>
  </th>`;
}

function Backbones({ row }) {
  if (!row.backbones.length) return "–";
  return row.backbones.map((each) => html`<code title=${each}>${each.slice(0, 8)}</code> `);
}

function Row({ row }) {
  return html`<tr>
    <th scope="row">${row.device}</th>
    <td><span class="state ${row.state.replace(" ", "-")}">${row.state}</span></td>
    <td title=${row.seen_s ? moment(row.seen_s) : ""}>${ago(row.seen_s)}</td>
    <td class="number">${row.images || "–"}</td>
    <td class="number">${row.classes || "–"}</td>
    <td class="number">${row.bytes ? bytes(row.bytes) : "–"}</td>
    <td class="number">${row.head || "–"}</td>
    <td class="number">${percent(row.accuracy)}</td>
    <td class="number">${row.epsilon === null ? "–" : row.epsilon.toFixed(2)}</td>
    <td><${Backbones} row=${row} /></td>
    <td class=${row.flags.length ? "text" : ""}>${row.flags.map(([kind, text]) => html`<span class="flag ${kind}" key=${text}>${text}</span>`)}</td>
    <td class="actions">
      ${row.quarantined && row.state !== "revoked" && html`<button onClick=${() => ask("release", row.device)}>Release<span class="hidden"> ${row.device}</span></button>`}
      ${row.prototypes > 0 && html`<button onClick=${() => ask("forget", row.device)}>Forget<span class="hidden"> ${row.device}</span></button>`}
      ${row.state !== "revoked" && html`<button onClick=${() => ask("revoke", row.device)}>Revoke<span class="hidden"> ${row.device}</span></button>`}
    </td>
  </tr>`;
}

export function Devices({ status }) {
  // With a second operator, an epsilon holds only if that operator is honest.
  const titled = (title) => (title === "Epsilon" && status.sums ? "Conditional epsilon" : title);
  const [sort, setSort] = useState(["device", false]);
  const [filter, setFilter] = useState("");
  const [page, setPage] = useState(0);
  const rows = useMemo(() => rowsOf(status), [status]);
  const found = useMemo(() => {
    const text = filter.trim().toLowerCase();
    const matches = (row) =>
      row.device.toLowerCase().includes(text) ||
      row.state.includes(text) ||
      row.flags.some(([, flag]) => flag.toLowerCase().includes(text));
    return sorted(text ? rows.filter(matches) : rows, sort);
  }, [rows, filter, sort]);
  const pages = Math.max(1, Math.ceil(found.length / PAGE));
  const shown = Math.min(page, pages - 1);
  return html`<div class="tools">
      <label>Filter <input type="search" value=${filter} onInput=${(event) => setFilter(event.target.value)} placeholder="name, state or flag" /></label>
      <span class="quiet" role="status">${counted(found.length, "device")}</span>
      <button onClick=${() => ask("link")}>Add a device</button>
      <button onClick=${() => ask("enroll")}>Enroll a device</button>
    </div>
    <div class="scroll" tabindex="0" role="region" aria-label="Devices">
      <table>
        <thead>
          <tr>
            ${COLUMNS.map(([name, title]) => html`<${Heading} key=${name} ...${{ name, title: titled(title), sort, setSort }} />`)}
            <th scope="col">Actions</th>
          </tr>
        </thead>
        <tbody>
          ${found.slice(shown * PAGE, (shown + 1) * PAGE).map((row) => html`<${Row} key=${row.device} row=${row} />`)}
        </tbody>
      </table>
    </div>
    ${pages > 1 &&
    html`<div class="tools">
      <button disabled=${shown === 0} onClick=${() => setPage(shown - 1)}>Previous</button>
      <span>Page ${shown + 1} of ${pages}</span>
      <button disabled=${shown === pages - 1} onClick=${() => setPage(shown + 1)}>Next</button>
    </div>`}`;
}
