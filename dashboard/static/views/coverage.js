// Which device has images of which class: a heat map of devices and classes, and the sums by class.

import { html, useMemo, useRef, useState } from "../vendor/standalone.module.js";
import { counted, countOf, prototypesOf } from "../format.js";
import { channels, color } from "./colors.js";
import { useDrawing } from "./drawing.js";

const HEIGHT = 480;
const SHOWN_CLASSES = 50;
const FIGURE_WIDTH = 34;

function layoutOf(canvas, devices, classes) {
  const ratio = window.devicePixelRatio || 1;
  const height = Math.max(1, Math.min(22, HEIGHT / devices.length));
  const left = height >= 11 ? Math.min(140, canvas.parentElement.clientWidth / 3) : 0;
  const top = 24;
  const hasFigures = left > 0 && classes.length <= SHOWN_CLASSES;
  const share = (canvas.parentElement.clientWidth - left) / classes.length;
  return { ratio, height, left, top, hasFigures, width: hasFigures ? Math.max(FIGURE_WIDTH, share) : share };
}

/** Return a function from a figure to its share of the strongest color. */
function sharesOf(devices, what) {
  const most = Math.log1p(devices.reduce((found, device) => Math.max(found, ...Object.values(device[what])), 1));
  return (value) => (value ? 0.15 + 0.85 * (Math.log1p(value) / most) : 0);
}

/** Draw one pixel for each cell, and scale that: as fast for a thousand devices as for ten. */
function cells(devices, classes, what, shareOf) {
  const image = new ImageData(classes.length, devices.length);
  const [empty, full] = [channels("--heat-empty"), channels("--heat-full")];
  devices.forEach((device, row) => {
    for (let column = 0; column < classes.length; column += 1) {
      const share = shareOf(countOf(device[what], classes[column]));
      const start = 4 * (row * classes.length + column);
      for (let channel = 0; channel < 3; channel += 1) {
        image.data[start + channel] = empty[channel] + share * (full[channel] - empty[channel]);
      }
      image.data[start + 3] = 255;
    }
  });
  return image;
}

async function draw(canvas, devices, classes, what) {
  const shareOf = sharesOf(devices, what);
  const bitmap = await createImageBitmap(cells(devices, classes, what, shareOf));
  const { ratio, height, left, top, width, hasFigures } = layoutOf(canvas, devices, classes);
  canvas.width = Math.round((left + width * classes.length) * ratio);
  canvas.height = Math.round((top + devices.length * height) * ratio);
  canvas.style.width = `${canvas.width / ratio}px`;
  canvas.style.height = `${canvas.height / ratio}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.imageSmoothingEnabled = false;
  context.drawImage(bitmap, left, top, width * classes.length, height * devices.length);
  context.fillStyle = color("--muted");
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  if (left) devices.forEach((device, row) => context.fillText(device.device, 0, top + (row + 0.5) * height, left - 8));
  if (width >= 24) {
    context.textAlign = "center";
    classes.forEach((name, column) => context.fillText(name, left + (column + 0.5) * width, top / 2, width - 4));
  }
  if (hasFigures) {
    const [onEmpty, onFull] = [color("--text"), color("--on-accent")];
    devices.forEach((device, row) =>
      classes.forEach((name, column) => {
        const value = countOf(device[what], name);
        context.fillStyle = shareOf(value) > 0.6 ? onFull : onEmpty;
        if (value) context.fillText(value, left + (column + 0.5) * width, top + (row + 0.5) * height, width - 4);
      }),
    );
  }
  if (width >= 8 && height >= 8) {
    context.strokeStyle = color("--surface");
    context.beginPath();
    for (let column = 0; column <= classes.length; column += 1) {
      context.moveTo(left + column * width, top);
      context.lineTo(left + column * width, top + devices.length * height);
    }
    for (let row = 0; row <= devices.length; row += 1) {
      context.moveTo(left, top + row * height);
      context.lineTo(left + classes.length * width, top + row * height);
    }
    context.stroke();
  }
}

function HeatMap({ devices, classes, what, noun }) {
  const canvas = useRef();
  const [place, setPlace] = useState("");
  useDrawing(canvas, draw, [devices, classes, what]);
  function locate(event) {
    const { height, left, top, width } = layoutOf(canvas.current, devices, classes);
    const row = devices[Math.floor((event.offsetY - top) / height)];
    const column = Math.floor((event.offsetX - left) / width);
    setPlace(row && column >= 0 && column < classes.length ? `${row.device}, ${classes[column]}: ${countOf(row[what], classes[column])} ${noun}` : "");
  }
  const label = `${noun} of ${counted(devices.length, "device")} by class; the table below has the sums`;
  return html`<div class="heatmap scroll" tabindex="0" role="region" aria-label="Heat map">
      <canvas ref=${canvas} role="img" aria-label=${label} onPointerMove=${locate} onPointerLeave=${() => setPlace("")}></canvas>
    </div>
    <p class="quiet place">${place || "A stronger color means more; point at a cell for its figure."}</p>`;
}

function Sums({ status, devices }) {
  const rows = status.classes.map((name) => ({
    name,
    images: devices.reduce((total, device) => total + countOf(device.images_by_class, name), 0),
    ...status.coverage[name],
  }));
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Classes">
      <table>
        <thead>
          <tr>
            <th scope="col">Class</th><th scope="col" class="number">Images</th>
            <th scope="col" class="number">${prototypesOf(status)}</th><th scope="col" class="number">Devices</th>
          </tr>
        </thead>
        <tbody>
          ${rows.slice(0, SHOWN_CLASSES).map(
            (row) => html`<tr key=${row.name} class=${row.devices ? "" : "missing"}>
              <th scope="row">${row.name}</th><td class="number">${row.images}</td>
              <td class="number">${row.prototypes}</td><td class="number">${row.devices || "none"}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
    ${rows.length > SHOWN_CLASSES && html`<p class="quiet">${SHOWN_CLASSES} of ${rows.length} classes.</p>`}`;
}

export function Coverage({ status }) {
  const [noun, setNoun] = useState("images");
  const what = `${noun}_by_class`;
  const used = useMemo(() => status.devices.filter((device) => device.counts), [status]);
  const devices = useMemo(() => used.filter((device) => Object.keys(device[what]).length), [used, what]);
  return html`<div class="tools">
      <label>
        Show
        <select value=${noun} onChange=${(event) => setNoun(event.target.value)}>
          <option value="images">images on devices</option>
          <option value="prototypes">${status.counted === "images" ? "images in submitted prototypes" : "submitted prototypes"}</option>
        </select>
      </label>
    </div>
    ${devices.length
      ? html`<${HeatMap} devices=${devices} classes=${status.classes} what=${what} noun=${noun} />`
      : html`<p class="empty">No device has reported any yet.</p>`}
    <${Sums} status=${status} devices=${used} />`;
}
