// Several fleets in a table, read again every few seconds; each one's name leads to its own dashboard.

import { html, render, useEffect, useState } from "./vendor/standalone.module.js";
import { counted, percent } from "./format.js";

const EVERY_MS = 3000;
const KEY = "fleets-token"; // not that of a fleet's own dashboard

const QUOTAS = [
  ["devices", 1, "devices"],
  ["storage_bytes", 1024 ** 2, "MiB"],
  ["uploads", 1, "uploads an hour"],
];

async function fetchFleets() {
  const token = sessionStorage.getItem(KEY);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch("api/v1/fleets", { cache: "no-store", headers });
  if (response.status === 401) return { fleets: null, signedOut: true, problem: token ? "Wrong token" : "" };
  if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
  return { ...(await response.json()), signedOut: false, problem: "" };
}

function SignIn({ problem, onToken }) {
  const submit = (event) => {
    event.preventDefault();
    onToken(new FormData(event.target).get("token").trim());
  };
  return html`<form class="sign-in" onSubmit=${submit}>
    <label>Token <input type="password" name="token" autocomplete="off" required /></label> <button class="primary">Sign in</button>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
  </form>`;
}

function stateOf(fleet) {
  if (fleet.problem) return ["bad", "no answer"];
  return fleet.summary.running ? ["good", "running"] : ["bad", "stopped"];
}

function Quotas({ quotas }) {
  const set = QUOTAS.filter(([name]) => quotas[name].limit !== null).map(([name, unit, what]) => {
    const { used, limit } = quotas[name];
    const text = `${+(used / unit).toPrecision(3)} of ${+(limit / unit).toPrecision(3)} ${what}`;
    return html`<span class="flag ${used >= 0.9 * limit ? "warn" : ""}" key=${name}>${text}</span>`;
  });
  return set.length ? set : "none";
}

function Row({ fleet }) {
  const [kind, state] = stateOf(fleet);
  const name = html`<th scope="row"><a href=${fleet.link}>${fleet.name}</a></th>
    <td><span class="state ${kind}">${state}</span></td>`;
  if (fleet.problem) return html`<tr id="fleet-${fleet.name}">${name}<td class="text" colspan="6">${fleet.problem}</td></tr>`;
  const { online, devices, submissions, head, accuracy, quotas, attention } = fleet.summary;
  return html`<tr id="fleet-${fleet.name}">
    ${name}
    <td class="number">${online} of ${devices}</td>
    <td class="number">${submissions}</td>
    <td class="number">${head || "none"}</td>
    <td class="number">${percent(accuracy)}</td>
    <td class="text"><${Quotas} quotas=${quotas} /></td>
    <td class="text">
      ${attention.map(({ title, text }) => html`<span class="flag warn" title=${text} key=${title}>${title}</span>`)}
    </td>
  </tr>`;
}

const COLUMNS = ["Fleet", "State", "Devices online", "Submissions", "Head", "Accuracy", "Quotas", "Needs attention"];

function Fleets({ fleets }) {
  return html`<section aria-labelledby="fleets-title">
    <h2 id="fleets-title">${counted(fleets.length, "fleet")}</h2>
    <div class="scroll" tabindex="0" role="region" aria-label="Fleets">
      <table>
        <thead>
          <tr>${COLUMNS.map((title) => html`<th scope="col" key=${title}>${title}</th>`)}</tr>
        </thead>
        <tbody>${fleets.map((fleet) => html`<${Row} key=${fleet.name} fleet=${fleet} />`)}</tbody>
      </table>
    </div>
  </section>`;
}

function Page() {
  const [shown, show] = useState({ fleets: null, signedOut: false, problem: "Reading the fleets" });
  const refresh = () =>
    fetchFleets().then(show, (error) => show((before) => ({ ...before, problem: `No answer: ${error.message}` })));
  useEffect(() => {
    refresh();
    const timer = setInterval(() => document.hidden || refresh(), EVERY_MS);
    return () => clearInterval(timer);
  }, []);
  const signIn = (token) => {
    sessionStorage.setItem(KEY, token);
    refresh();
  };
  return html`<header><div class="title"><h1>Fleets</h1></div></header>
    <main>
      ${shown.signedOut && html`<${SignIn} problem=${shown.problem} onToken=${signIn} />`}
      ${!shown.signedOut && shown.problem && html`<p class="note" role="status">${shown.problem}</p>`}
      ${shown.fleets && html`<${Fleets} fleets=${shown.fleets} />`}
    </main>`;
}

render(html`<${Page} />`, document.body);
