// The submitted prototypes in two dimensions: a color for each class, a shape for each device, a ring in quarantine.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/standalone.module.js";
import { refreshProjection } from "../fleet.js";
import { counted } from "../format.js";
import { color } from "./colors.js";
import { useDrawing } from "./drawing.js";

const HEIGHT = 420;
const SHOWN_CLASSES = 24;
const SIZE = 4;
const SIGNS = ["●", "■", "▲", "◆", "▼"];

const SHAPES = [
  (path, x, y) => path.arc(x, y, SIZE, 0, 2 * Math.PI),
  (path, x, y) => path.rect(x - SIZE, y - SIZE, 2 * SIZE, 2 * SIZE),
  (path, x, y) => polygon(path, [[x, y - SIZE - 1], [x + SIZE + 1, y + SIZE], [x - SIZE - 1, y + SIZE]]),
  (path, x, y) => polygon(path, [[x, y - SIZE - 1], [x + SIZE + 1, y], [x, y + SIZE + 1], [x - SIZE - 1, y]]),
  (path, x, y) => polygon(path, [[x, y + SIZE + 1], [x + SIZE + 1, y - SIZE], [x - SIZE - 1, y - SIZE]]),
];

function polygon(path, points) {
  points.forEach(([x, y], number) => (number ? path.lineTo(x, y) : path.moveTo(x, y)));
  path.closePath();
}

/** A color for each class, far from its neighbours'. */
function classColor(label) {
  return `hsl(${(label * 137.508) % 360} 65% ${color("--chart-lightness")})`;
}

function layoutOf(projection, width) {
  const span = (values) => {
    const [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
    return [low, high > low ? high - low : 1];
  };
  const [left, across] = span(projection.x);
  const [bottom, up] = span(projection.y);
  const margin = 14;
  return {
    x: (value) => margin + ((value - left) / across) * (width - 2 * margin),
    y: (value) => HEIGHT - margin - ((value - bottom) / up) * (HEIGHT - 2 * margin),
  };
}

function draw(canvas, projection, held, label) {
  const width = canvas.parentElement.clientWidth;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = HEIGHT * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${HEIGHT}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const place = layoutOf(projection, width);
  const paths = new Map();
  const rings = new Path2D();
  projection.label.forEach((each, point) => {
    if (label !== null && each !== label) return;
    if (!paths.has(each)) paths.set(each, new Path2D());
    const [x, y] = [place.x(projection.x[point]), place.y(projection.y[point])];
    const path = paths.get(each);
    path.moveTo(x, y);
    SHAPES[projection.device[point] % SHAPES.length](path, x, y);
    if (held.has(projection.devices[projection.device[point]])) {
      rings.moveTo(x + SIZE + 4, y);
      rings.arc(x, y, SIZE + 4, 0, 2 * Math.PI);
    }
  });
  context.globalAlpha = 0.75;
  for (const [each, path] of paths) {
    context.fillStyle = classColor(each);
    context.fill(path);
  }
  context.globalAlpha = 1;
  context.strokeStyle = color("--bad");
  context.lineWidth = 1.5;
  context.stroke(rings);
}

function nearest(projection, place, x, y) {
  let found = null;
  let least = 15 ** 2;
  projection.x.forEach((value, point) => {
    const distance = (place.x(value) - x) ** 2 + (place.y(projection.y[point]) - y) ** 2;
    if (distance < least) [least, found] = [distance, point];
  });
  return found;
}

function Scatter({ projection, held, label, classes }) {
  const canvas = useRef();
  const [place, setPlace] = useState("");
  useDrawing(canvas, draw, [projection, held, label]);
  function locate(event) {
    const point = nearest(projection, layoutOf(projection, canvas.current.parentElement.clientWidth), event.offsetX, event.offsetY);
    const device = point === null ? "" : projection.devices[projection.device[point]];
    setPlace(point === null ? "" : `${device}, ${classes[projection.label[point]]}${held.has(device) ? ", quarantined" : ""}`);
  }
  const explained = projection.explained.map((share) => `${Math.round(100 * share)} %`).join(" and ");
  const text = `${counted(projection.x.length, "prototype")} of ${counted(projection.devices.length, "device")} in two dimensions`;
  return html`<div class="scatter">
      <canvas ref=${canvas} role="img" aria-label=${text} onPointerMove=${locate} onPointerLeave=${() => setPlace("")}></canvas>
    </div>
    <p class="quiet place">
      ${place || `${text}, the first two principal components: ${explained} of the variance. A color is a class, a shape a device, a ring quarantine.`}
    </p>`;
}

export function Prototypes({ status }) {
  const [projection, setProjection] = useState(null);
  const [label, setLabel] = useState(null);
  const held = useMemo(
    () => new Set(status.quarantine.filter((each) => each.released_s === null).map((each) => each.device)),
    [status],
  );
  useEffect(() => {
    let isOver = false;
    refreshProjection().then((found) => !isOver && found && setProjection(found), () => {});
    return () => {
      isOver = true;
    };
  }, [status]);
  if (!projection?.x.length) return html`<p class="empty">No prototypes yet.</p>`;
  const used = [...new Set(projection.label)].sort((one, other) => one - other);
  return html`<div class="tools">
      <label>
        Class
        <select value=${label ?? ""} onChange=${(event) => setLabel(event.target.value === "" ? null : Number(event.target.value))}>
          <option value="">all</option>
          ${used.map((each) => html`<option value=${each}>${status.classes[each]}</option>`)}
        </select>
      </label>
      ${projection.devices.length < projection.of_devices && html`<span class="quiet">${projection.devices.length} of ${counted(projection.of_devices, "device")}</span>`}
    </div>
    <${Scatter} projection=${projection} held=${held} label=${label} classes=${status.classes} />
    <ul class="legend" aria-label="Colors of classes">
      ${used.slice(0, SHOWN_CLASSES).map((each) => html`<li key=${each}><i style=${{ background: classColor(each) }}></i>${status.classes[each]}</li>`)}
    </ul>
    ${projection.devices.length <= SIGNS.length &&
    html`<ul class="legend" aria-label="Shapes of devices">
      ${projection.devices.map((name, number) => html`<li key=${name}>${SIGNS[number]} ${name}</li>`)}
    </ul>`}`;
}
