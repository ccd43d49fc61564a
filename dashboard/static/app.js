// The page: a header, what needs attention, and one section for each question about the fleet.

import { html, render, useEffect, useState } from "./vendor/standalone.module.js";
import { fleet, refresh, start, subscribe } from "./fleet.js";
import { Dialogs, SignIn, openSignIn } from "./views/dialogs.js";
import { Accuracy } from "./views/accuracy.js";
import { Alarms } from "./views/alarms.js";
import { Collection } from "./views/collection.js";
import { Coverage } from "./views/coverage.js";
import { Devices } from "./views/devices.js";
import { Heads } from "./views/heads.js";
import { Privacy } from "./views/privacy.js";
import { Refused } from "./views/refused.js";
import { TryIt } from "./views/try-it.js";
import { Summary } from "./views/summary.js";

const SECTIONS = [
  ["collection", "Collection", Collection],
  ["devices", "Devices", Devices],
  ["privacy", "Privacy", Privacy],
  ["coverage", "Coverage", Coverage],
  ["accuracy", "Accuracy", Accuracy],
  ["heads", "Heads", Heads],
  ["try-it", "Try it", TryIt],
  ["refused", "Refused messages", Refused],
];

/** Draw this view again at each change of the fleet. */
function useFleet() {
  const [, count] = useState(0);
  useEffect(() => subscribe(() => count((number) => number + 1)), []);
  return fleet;
}

function Live({ live, running }) {
  const [kind, text] = !live
    ? ["bad", "reconnecting"]
    : running
      ? ["good", "live"]
      : ["warn", "aggregator stopped"];
  return html`<span class="live ${kind}" role="status">${text}</span>`;
}

const THEMES = { "": "Automatic colors", light: "Light colors", dark: "Dark colors" };

function Theme() {
  const [theme, set] = useState(localStorage.getItem("theme") ?? "");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("theme", theme);
    window.dispatchEvent(new Event("themechange"));
  }, [theme]);
  return html`<label class="quiet">
    <span class="hidden">Colors</span>
    <select value=${theme} onChange=${(event) => set(event.target.value)}>
      ${Object.entries(THEMES).map(([name, text]) => html`<option value=${name}>${text}</option>`)}
    </select>
  </label>`;
}

function Header({ status, live, session }) {
  return html`<header>
    <div class="title">
      <h1>${status ? status.fleet : "protofleet"}</h1>
      <${Live} live=${live} running=${status?.running ?? true} />
    </div>
    ${status &&
    html`<p class="task">
      <span>${status.algorithm}</span>
      <span>${status.classes.length} classes</span>
      <span>task <code>${status.task.slice(0, 12)}</code></span>
    </p>`}
    <div class="controls">
      <${Theme} />
      ${session.command
        ? html`<span class="quiet">signed in</span>`
        : html`<button class="quiet" onClick=${openSignIn}>Sign in</button>`}
    </div>
  </header>`;
}

/** A section, drawn in a task of its own, so that the browser can answer in between. */
function Section({ name, title, View, place, isLast, status }) {
  const [shown, show] = useState(null);
  const isShown = Boolean(shown);
  useEffect(() => {
    // Once the last section is shown, the one in the address can be scrolled to.
    if (isShown && isLast) document.getElementById(location.hash.slice(1))?.scrollIntoView();
  }, [isShown]);
  useEffect(() => {
    const timer = setTimeout(() => show(status), 20 * place);
    return () => clearTimeout(timer);
  }, [status]);
  return html`<section id=${name} aria-labelledby="${name}-title">
    <h2 id="${name}-title">${title}</h2>
    ${shown && html`<${View} status=${shown} />`}
  </section>`;
}

function Fleet({ status }) {
  const sections = SECTIONS.filter(([name]) => name !== "privacy" || status.privacy);
  return html`<nav aria-label="Sections">
      ${sections.map(([name, title]) => html`<a href="#${name}">${titleOf(name, title, status)}</a>`)}
    </nav>
    <main>
      <${Alarms} status=${status} />
      <${Summary} status=${status} />
      ${sections.map(
        ([name, title, View], place) =>
          html`<${Section} key=${name} title=${titleOf(name, title, status)} isLast=${place === sections.length - 1} ...${{ name, View, place, status }} />`,
      )}
    </main>`;
}

function titleOf(name, title, status) {
  return name === "collection" && status.round ? "Round" : title;
}

function Page() {
  const { status, problem, session, live } = useFleet();
  let content;
  if (status) content = html`<${Fleet} status=${status} />`;
  else if (!session.read) content = html`<main><${SignIn} /></main>`;
  else content = html`<main><p class="empty">${problem || "Reading the fleet's state"}</p></main>`;
  return html`<${Header} status=${status} live=${live} session=${session} />
    ${status && problem && html`<p class="banner" role="alert">${problem}</p>`} ${content}
    <${Dialogs} />`;
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.dispatchEvent(new Event("themechange")));

render(html`<${Page} />`, document.body);
start();
window.addEventListener("pageshow", (event) => event.persisted && refresh());
