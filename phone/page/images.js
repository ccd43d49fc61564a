// @ts-check
/** The images on this phone: look at them, change their class, delete them. */

import { html, useEffect, useRef, useState } from "../vendor/standalone.module.js";
import { Notice } from "./notices.js";
import { count, t, time } from "./texts.js";

/** @typedef {import("./app.js").Device} Device */
/** @typedef {import("./app.js").DeviceState} DeviceState */
/** @typedef {DeviceState["images"][number]} Image */
/** @typedef {ReadonlyMap<string, string>} Suspects the class that an image resembles, empty if it is none; by its id */

const SHOWN = 60;

/** @param {{device: Device, state: DeviceState}} props */
export function Images({ device, state }) {
  const [opened, setOpened] = useState(/** @type {string | null} */ (null));
  const [selected, setSelected] = useState(/** @type {ReadonlySet<string> | null} */ (null));
  const [suspects, setSuspects] = useState(/** @type {Suspects} */ (new Map()));
  useEffect(() => {
    let isOver = false;
    device.suspicious().then((found) => isOver || setSuspects(new Map(found.map(({ id, kind, best }) => [id, kind === "label" ? best : ""]))));
    return () => void (isOver = true);
  }, [state.images.length, state.head?.version]);

  const classes = state.task?.classes ?? [];
  const image = state.images.find(({ id }) => id === opened);
  if (!state.images.length) return html`<section><p class="quiet">${t("no_images")}</p></section>`;
  /** Select images, or none of them if all are. @param {string[]} ids */
  function toggle(ids) {
    const after = new Set(selected);
    const isAdded = ids.some((id) => !after.has(id));
    for (const id of ids) isAdded ? after.add(id) : after.delete(id);
    setSelected(after);
  }
  return html`${suspects.size > 0 && html`<${Notice} kind="warn" text=${t("suspicious")} />`}
    ${
      selected
        ? html`<${Selection} device=${device} images=${state.images.filter(({ id }) => selected.has(id))} close=${() => setSelected(null)} />`
        : html`<button type="button" class="wide" onClick=${() => setSelected(new Set())}>${t("select")}</button>`
    }
    ${classes.map((name) => {
      const images = state.images.filter(({ label }) => label === name);
      images.sort((a, b) => Number(suspects.has(b.id)) - Number(suspects.has(a.id)) || b.time_s - a.time_s);
      return images.length > 0 && html`<${Gallery} key=${name} device=${device} name=${name} images=${images} suspects=${suspects} selected=${selected} toggle=${toggle} open=${setOpened} />`;
    })}
    ${image && html`<${Details} key=${image.id} device=${device} image=${image} resembles=${suspects.get(image.id)} classes=${classes} close=${() => setOpened(null)} />`}`;
}

/** Delete selected images. @param {{device: Device, images: Image[], close: () => void}} props */
function Selection({ device, images, close }) {
  async function remove() {
    await device.deleteImages(images.map(({ id }) => id));
    close();
  }
  return html`<section class="selection">
    <div class="row">
      <button type="button" class="danger" disabled=${!images.length} onClick=${remove}>${t("delete_images", { count: images.length })}</button>
      <button type="button" onClick=${close}>${t("cancel")}</button>
    </div>
    ${images.some(({ averaged_with }) => averaged_with) && html`<p class="quiet small">${t("averaged_with_others")}</p>`}
  </section>`;
}

/**
 * @param {{device: Device, name: string, images: Image[], suspects: Suspects, selected: ReadonlySet<string> | null,
 *   toggle: (ids: string[]) => void, open: (id: string) => void}} props
 */
function Gallery({ device, name, images, suspects, selected, toggle, open }) {
  const [shown, setShown] = useState(SHOWN);
  return html`<section>
    <div class="row">
      <h2>${t("images_of", { label: name, count: count(images.length) })}</h2>
      ${selected && html`<button type="button" onClick=${() => toggle(images.map(({ id }) => id))}>${t("select_all")}</button>`}
    </div>
    <ul class="gallery">
      ${images.slice(0, shown).map(
        (image) => html`<li key=${image.id} class=${suspects.has(image.id) ? "suspect" : ""}>
          <button type="button" aria-pressed=${selected?.has(image.id)} onClick=${() => (selected ? toggle([image.id]) : open(image.id))}>
            <${Photograph} device=${device} id=${image.id} label=${t("open_image", { label: name, time: time(image.time_s) })} />
          </button>
        </li>`,
      )}
    </ul>
    ${images.length > shown && html`<button type="button" class="wide" onClick=${() => setShown(shown + SHOWN)}>+ ${count(images.length - shown)}</button>`}
  </section>`;
}

/** @param {{device: Device, id: string, label: string}} props an image file of the store */
function Photograph({ device, id, label }) {
  const [url, setUrl] = useState("");
  useEffect(() => {
    let made = "";
    let isOver = false;
    device.imageBlob(id).then((blob) => {
      if (isOver || !blob) return;
      made = URL.createObjectURL(blob);
      setUrl(made);
    });
    return () => {
      isOver = true;
      if (made) URL.revokeObjectURL(made);
    };
  }, [id]);
  return html`<img src=${url || undefined} alt=${label} loading="lazy" />`;
}

/** @param {{device: Device, image: Image, resembles: string | undefined, classes: readonly string[], close: () => void}} props */
function Details({ device, image, resembles, classes, close }) {
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useEffect(() => dialog.current?.showModal(), []);
  const { label: name } = image;
  async function remove() {
    await device.deleteImages([image.id]);
    close();
  }
  return html`<dialog ref=${dialog} onClose=${close} aria-label=${t("open_image", { label: name, time: time(image.time_s) })}>
    <${Photograph} device=${device} id=${image.id} label=${name} />
    ${resembles !== undefined && html`<p class="small">${resembles ? t("resembles", { label: resembles }) : t("resembles_none")}</p>`}
    <p class="quiet small">${time(image.time_s)}${image.held_out && ` · ${t("held_out")}`}</p>
    <label>
      ${t("change_class")}
      <select value=${name} onChange=${(/** @type {any} */ event) => device.relabel(image.id, event.target.value)}>
        ${classes.map((each) => html`<option value=${each}>${each}</option>`)}
      </select>
    </label>
    ${image.averaged_with !== null && html`<p class="quiet small">${t("averaged_with", { count: image.averaged_with })}</p>`}
    <div class="row">
      <button type="button" class="danger" onClick=${remove}>${t("delete")}</button>
      <button type="button" onClick=${() => dialog.current?.close()}>${t("close")}</button>
    </div>
  </dialog>`;
}
