// @ts-check
/** The first screen: a link to a fleet, and a name for this phone. */

import { ADDRESS } from "../device/address.js";
import { JoinError, readLink } from "../device/membership.js";
import { html, useState } from "../vendor/standalone.module.js";
import { Notice } from "./notices.js";
import { hasText, reasonOf, t } from "./texts.js";

/** @typedef {import("./app.js").Device} Device */

const NAME = "[A-Za-z0-9_\\-]{1,64}";

/** @param {string} text @returns {import("../device/membership.js").Link | null} null if it is no link to a fleet */
function linkOf(text) {
  try {
    return readLink(text);
  } catch {
    return null;
  }
}

/** @param {JoinError} error */
function joinProblem({ key, reason, message }) {
  const words = `join_${reason || key}`;
  return t(hasText(words) ? words : `join_${key}`, { detail: message });
}

function randomName() {
  const bytes = crypto.getRandomValues(new Uint8Array(3));
  return `phone-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

/** @param {{device: Device}} props */
export function Join({ device }) {
  const [wasOpened] = useState(() => linkOf(location.href) !== null);
  const [link, setLink] = useState(wasOpened ? location.href : "");
  const [own, setName] = useState(randomName);
  const [problem, setProblem] = useState("");
  const [isBusy, setBusy] = useState(false);
  const found = linkOf(link);
  const name = found?.name || own;
  const isElsewhere = found && found.address !== ADDRESS;
  const buttonText = isElsewhere ? t("join_elsewhere", { host: new URL(found.address).host }) : t(isBusy ? "joining" : "join_button");

  /** @param {Event} event */
  async function join(event) {
    event.preventDefault();
    if (!found) return setProblem(t("join_link"));
    if (isElsewhere) return location.assign(link);
    setBusy(true);
    setProblem("");
    try {
      await device.join(link, name);
      history.replaceState(null, "", "./"); // the secret is used
    } catch (error) {
      setProblem(error instanceof JoinError ? joinProblem(error) : reasonOf(error));
    }
    setBusy(false);
  }

  return html`<section>
    <h2>${found ? t("join_title", { fleet: found.fleet }) : t("join_a_fleet")}</h2>
    <p>${t("join_what")}</p>
    <form onSubmit=${join}>
      ${
        !wasOpened &&
        html`<p>${t("join_no_link")}</p>
          <label>${t("link")} <input type="text" inputmode="url" autocomplete="off" value=${link} onInput=${(/** @type {any} */ event) => setLink(event.target.value)} /></label>`
      }
      <label
        >${t("name")}
        <input type="text" required pattern=${NAME} title=${t("name_rule")} autocomplete="off" autocapitalize="off" spellcheck="false" readonly=${Boolean(found?.name)} value=${name} aria-describedby="name-rule"
          onInput=${(/** @type {any} */ event) => setName(event.target.value)} />
      </label>
      <p class="quiet small" id="name-rule">${t("name_rule")}</p>
      ${problem && html`<${Notice} kind="bad" text=${problem} />`}
      <button class="primary wide" disabled=${isBusy}>${buttonText}</button>
    </form>
  </section>`;
}
