// @ts-check
/** The page: a fleet's name, one screen, and tabs to the others. */

import { openDevice } from "../device/device.js";
import { html, render, useEffect, useState } from "../vendor/standalone.module.js";
import { Images } from "./images.js";
import { Join } from "./join.js";
import { Notice, Notices } from "./notices.js";
import { Privacy } from "./privacy.js";
import { Recognize } from "./recognize.js";
import { missingRequirement } from "./requirements.js";
import { Teach } from "./teach.js";
import { language, problemText, t } from "./texts.js";
import { installWorker, Update } from "./updates.js";

/** @typedef {Awaited<ReturnType<typeof openDevice>>} Device */
/** @typedef {Device["state"]} DeviceState */

/** @type {Record<string, import("./texts.js").Key>} */
const SCREENS = { teach: "teach", recognize: "answer", images: "images", privacy: "left" };
const VIEWS = { teach: Teach, recognize: Recognize, images: Images, privacy: Privacy };

const shownScreen = () => (location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "teach");

/** @param {{device: Device}} props */
function App({ device }) {
  const [state, setState] = useState(device.state);
  const [screen, setScreen] = useState(shownScreen);
  useEffect(() => device.subscribe(() => setState(device.state)), []);
  useEffect(() => {
    const change = () => setScreen(shownScreen());
    window.addEventListener("hashchange", change);
    return () => window.removeEventListener("hashchange", change);
  }, []);

  if (!state.fleet) return html`<${Header} state=${null} /><main><${Join} device=${device} /></main>`;
  const View = VIEWS[/** @type {keyof typeof VIEWS} */ (screen)];
  return html`<${Header} state=${state} />
    <main>
      <${Update} />
      <${Notices} state=${state} />
      <${View} device=${device} state=${state} />
    </main>
    <nav class="tabs">
      ${Object.entries(SCREENS).map(([name, key]) => html`<a key=${name} href="#${name}" aria-current=${name === screen ? "page" : undefined}>${t(key)}</a>`)}
    </nav>`;
}

/** @param {{state: DeviceState | null}} props */
const Header = ({ state }) => html`<header>
  <h1>${state?.fleet ?? "protofleet"}</h1>
  ${state && html`<span class="chip ${state.connected ? "good" : "warn"}" role="status">${t(state.connected ? "online" : "offline")}</span>`}
</header>`;

async function start() {
  document.documentElement.lang = language;
  const body = document.body;
  const missing = await missingRequirement();
  try {
    if (missing) throw new Error(missing);
    installWorker();
    const device = await openDevice();
    render(html`<${App} device=${device} />`, body);
  } catch (error) {
    const reason = error instanceof Error ? error.message : String(error);
    render(html`<${Header} state=${null} /><main><${Notice} kind="bad" text=${problemText(reason)} /></main>`, body);
    if (!missing) throw error;
  }
}

start();
