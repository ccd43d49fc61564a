// @ts-check
/** The fleet's head on the camera's frames. */

import { html, useEffect, useState } from "../vendor/standalone.module.js";
import { frameOf } from "./camera.js";
import { Notice } from "./notices.js";
import { count, percent, reasonOf, t } from "./texts.js";
import { Viewfinder } from "./viewfinder.js";

/** @typedef {import("./app.js").Device} Device */
/** @typedef {import("./app.js").DeviceState} DeviceState */
/** @typedef {NonNullable<Awaited<ReturnType<Device["classify"]>>>} Answer */

const SHOWN = 3;
const PAUSE_MS = 20;

/** @param {{device: Device, state: DeviceState}} props */
export function Recognize({ device, state }) {
  const [video, setVideo] = useState(/** @type {HTMLVideoElement | null} */ (null));
  const [canvas] = useState(() => new OffscreenCanvas(1, 1));
  const [answer, setAnswer] = useState(/** @type {(Answer & {rate: number}) | null} */ (null));
  const [problem, setProblem] = useState("");
  const hasHead = Boolean(state.head);

  useEffect(() => {
    if (!video || !hasHead) return undefined;
    let isOver = false;
    let rate = 0;
    const next = async () => {
      const began = performance.now();
      const frame = frameOf(video, canvas);
      try {
        const found = frame && (await device.classify(frame));
        if (isOver) return;
        const now = 1000 / (performance.now() - began);
        rate = rate ? 0.8 * rate + 0.2 * now : now;
        if (found) setAnswer({ ...found, rate });
        setProblem("");
      } catch (error) {
        if (isOver) return;
        setProblem(reasonOf(error));
      }
      if (!isOver) setTimeout(next, PAUSE_MS);
    };
    next();
    return () => void (isOver = true);
  }, [video, hasHead]);

  return html`<${Viewfinder} onVideo=${setVideo}>
      ${answer && html`<div class="overlay"><div class="name" role="status">${answerText(answer)}</div></div>`}
    <//>
    ${!state.head && html`<${Notice} kind="warn" text=${t("no_head")} />`}
    ${problem && html`<${Notice} kind="bad" text=${problem} />`}
    ${answer && html`<section><${Bars} answer=${answer} /></section>`}
    ${
      state.head &&
      html`<p class="quiet small">
        ${t("head_version", { version: count(state.head.version) })} ${answer && t("speed", { rate: count(Number(answer.rate.toPrecision(2))) })}
      </p>`
    }`;
}

/** @param {Answer} answer */
function answerText({ state, best, classes }) {
  return state === "known" ? classes[best] : t("unrecognized");
}

/** @param {{answer: Answer}} props */
function Bars({ answer: { probabilities, classes } }) {
  const ranked = Array.from(probabilities, (probability, label) => ({ probability, name: classes[label] }));
  ranked.sort((a, b) => b.probability - a.probability);
  return html`<ul class="bars">
    ${ranked.slice(0, SHOWN).map(
      ({ name, probability }) => html`<li key=${name}>
        <span class="name">${name}</span><meter min="0" max="1" value=${probability} aria-label=${name}></meter><span class="share">${percent(probability)}</span>
      </li>`,
    )}
  </ul>`;
}
