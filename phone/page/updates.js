// @ts-check
/** The service worker: the page works without a network, and changes to a newer version when the user says so. */

import { html, useEffect, useState } from "../vendor/standalone.module.js";
import { t } from "./texts.js";

/** Install the service worker; without one, the page works while it is online. */
export function installWorker() {
  navigator.serviceWorker?.register("sw.js", { updateViaCache: "none" }).catch((error) => console.warn("no service worker:", error));
}

/** Offers the version that waits. */
export function Update() {
  const [waiting, setWaiting] = useState(/** @type {ServiceWorker | null} */ (null));
  useEffect(() => {
    navigator.serviceWorker?.getRegistration().then((found) => {
      if (!found) return;
      const see = () => setWaiting(navigator.serviceWorker.controller ? found.waiting : null);
      found.addEventListener("updatefound", () => found.installing?.addEventListener("statechange", see));
      see();
    });
  }, []);
  function change() {
    navigator.serviceWorker.addEventListener("controllerchange", () => location.reload(), { once: true });
    waiting?.postMessage("activate");
  }
  return waiting && html`<p class="notice warn row" role="status">
    <span>${t("update")}</span> <button type="button" onClick=${change}>${t("reload")}</button>
  </p>`;
}
