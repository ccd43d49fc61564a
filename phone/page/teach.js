// @ts-check
/** Take images: one tap for a class. */

import { StorageFull } from "../device/device.js";
import { html, useEffect, useRef, useState } from "../vendor/standalone.module.js";
import { photographOf } from "./camera.js";
import { Notice } from "./notices.js";
import { count, reasonOf, t } from "./texts.js";
import { Viewfinder } from "./viewfinder.js";

/** @typedef {import("./app.js").Device} Device */
/** @typedef {import("./app.js").DeviceState} DeviceState */

const HOLD_MS = 500;
const BURST_MS = 300;

/** @param {{device: Device, state: DeviceState}} props */
export function Teach({ device, state }) {
  const [video, setVideo] = useState(/** @type {HTMLVideoElement | null} */ (null));
  const [canvas] = useState(() => new OffscreenCanvas(1, 1));
  const [last, setLast] = useState(/** @type {{id: string, label: string} | null} */ (null));
  const [problem, setProblem] = useState("");
  const [flash, setFlash] = useState(0);
  const { task } = state;
  if (!task) return null;
  /** @type {Map<string, number>} */
  const counts = new Map();
  for (const { label } of state.images) counts.set(label, (counts.get(label) ?? 0) + 1);

  /** @param {string} label @param {Blob} blob @param {"camera" | "file"} origin */
  async function add(label, blob, origin) {
    try {
      const id = await device.addImage({ blob, label, origin });
      setProblem("");
      setLast({ id, label });
    } catch (error) {
      // The notices name a full storage.
      setProblem(error instanceof StorageFull ? "" : t("unusable", { reason: reasonOf(error) }));
    }
  }

  /** @param {string} label */
  async function take(label) {
    if (!video) return;
    const blob = await photographOf(video, canvas);
    if (!blob) return;
    setFlash((number) => number + 1);
    await add(label, blob, "camera");
  }

  async function undo() {
    if (last) await device.deleteImages([last.id]);
    setLast(null);
  }

  return html`<${Viewfinder} onVideo=${setVideo}>
      ${flash > 0 && html`<div class="flash" key=${flash}></div>`}
    <//>
    ${problem && html`<${Notice} kind="bad" text=${problem} />`}
    <div class="row one-line">
      <span role="status" class="small">${last ? t("taken", { label: last.label }) : t("teach_hint")}</span>
      <button type="button" onClick=${undo} disabled=${!last}>${t("undo")}</button>
    </div>
    <ul class="classes">
      ${task.classes.map(
        (name) => html`<li key=${name}>
          <${ClassButton} name=${name} images=${counts.get(name) ?? 0} missing=${state.missing[name] ?? 0} take=${video && (() => take(name))} />
        </li>`,
      )}
    </ul>
    ${
      state.storage.persistent
        ? html`<${Files} classes=${task.classes} add=${(/** @type {string} */ label, /** @type {Blob} */ blob) => add(label, blob, "file")} />`
        : html`<p class="quiet small">${t("only_camera")}</p>`
    }`;
}

/**
 * One tap takes an image, holding takes several; without a camera, `take` is null.
 * @param {{name: string, images: number, missing: number, take: (() => Promise<void>) | null}} props
 */
function ClassButton({ name, images, missing, take }) {
  const timer = useRef(0);
  const isBurst = useRef(false);

  const stop = () => {
    clearTimeout(timer.current);
    timer.current = 0;
  };
  useEffect(() => stop, []);

  async function burst() {
    isBurst.current = true;
    const mine = timer.current;
    await take?.();
    if (timer.current === mine) timer.current = setTimeout(burst, BURST_MS);
  }
  function press() {
    isBurst.current = false;
    timer.current = setTimeout(burst, HOLD_MS);
  }
  function tap() {
    stop();
    if (!isBurst.current) take?.();
    isBurst.current = false;
  }
  return html`<button type="button" disabled=${!take} onPointerDown=${press} onPointerUp=${stop} onPointerLeave=${stop} onPointerCancel=${stop} onClick=${tap} onContextMenu=${(/** @type {Event} */ event) => event.preventDefault()}>
    <strong>${name}</strong>
    <span class="missing">${images > 0 && `${t("images_taken", { count: images })} · `}${missing > 0 ? t("missing", { count: missing }) : t("enough")}</span>
  </button>`;
}

/** @param {{classes: readonly string[], add: (label: string, blob: Blob) => Promise<void>}} props */
function Files({ classes, add }) {
  const [label, setLabel] = useState(classes[0]);
  const [done, setDone] = useState(0);

  /** @param {any} event */
  async function choose(event) {
    const files = [...event.target.files];
    event.target.value = "";
    for (const [at, file] of files.entries()) {
      await add(label, file);
      setDone(at + 1);
    }
    setDone(0);
  }
  return html`<section>
    <label>
      ${t("change_class")}
      <select value=${label} onChange=${(/** @type {any} */ event) => setLabel(event.target.value)}>
        ${classes.map((name) => html`<option value=${name}>${name}</option>`)}
      </select>
    </label>
    <label class="button wide">
      ${t("choose_files")} ${done > 0 && count(done)}
      <input type="file" accept="image/*" multiple onChange=${choose} />
    </label>
  </section>`;
}
