// @ts-check
/** The page: a fleet's name, one screen, and tabs to the others. */

import { missingFeatures, openDevice } from "../device/device.js";
import { html, render, useEffect, useState } from "../vendor/standalone.module.js";
import { Images } from "./images.js";
import { Join } from "./join.js";
import { Notice, Notices } from "./notices.js";
import { Privacy } from "./privacy.js";
import { Recognize } from "./recognize.js";
import { Teach } from "./teach.js";
import { language, reasonOf, t } from "./texts.js";
import { installWorker, Update } from "./updates.js";

/** @typedef {Awaited<ReturnType<typeof openDevice>>} Device */
/** @typedef {import("../device/state.js").DeviceState} DeviceState */

/** @type {Record<string, import("./texts.js").Key>} */
const SCREENS = { teach: "teach", recognize: "answer", images: "images", privacy: "left" };
const VIEWS = { teach: Teach, recognize: Recognize, images: Images, privacy: Privacy };

/** @param {{device: Device}} props */
function App({ device }) {
  const { state } = device;
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const change = () => setHash(location.hash);
    window.addEventListener("hashchange", change);
    return () => window.removeEventListener("hashchange", change);
  }, []);

  if (state.phase === "other_tab") return html`<${Header} state=${null} /><main><${Notice} kind="warn" text=${t("other_tab")} /></main>`;
  if (state.phase !== "member") return html`<${Header} state=${null} /><main><${Join} key=${hash} device=${device} /></main>`;
  const screen = /** @type {keyof typeof VIEWS} */ (Object.hasOwn(VIEWS, hash.slice(1)) ? hash.slice(1) : "teach");
  const View = VIEWS[screen];
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
  ${state && html`<span class="chip ${state.connection === "online" ? "good" : "warn"}" role="status">${t(state.connection)}</span>`}
</header>`;

/** @param {{text: string}} props */
const Failure = ({ text }) => html`<${Header} state=${null} /><main><${Notice} kind="bad" text=${text} /></main>`;

async function start() {
  document.documentElement.lang = language;
  const [missing] = await missingFeatures();
  if (missing) return render(html`<${Failure} text=${t(missing)} />`, document.body);
  installWorker();
  /** @type {Device | null} */
  let device = null;
  const draw = () => device && device.state.phase !== "starting" && render(html`<${App} device=${device} />`, document.body);
  try {
    device = await openDevice({ onChange: draw });
    draw();
  } catch (error) {
    render(html`<${Failure} text=${t("no_start", { reason: reasonOf(error) })} />`, document.body);
    throw error;
  }
}

start();
