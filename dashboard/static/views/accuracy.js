// Accuracy on held-out images: of each head, by class and over devices.

import { html, useEffect, useRef } from "../vendor/standalone.module.js";
import { percent } from "../format.js";
import { color } from "./colors.js";

const SHOWN_CLASSES = 30;
const SHOWN_CONFUSED = 15;
const BINS = 10;
const SHOWN_NAMES = 3;

const SERIES = [
  ["All images", "--series-1", (head) => head.held_out.accuracy],
  ["Balanced accuracy", "--series-2", (head) => head.held_out.balanced],
  ["Mean device", "--series-3", (head) => head.held_out.spread?.mean],
  ["Worst 10 % of devices", "--series-4", (head) => head.held_out.spread?.worst],
  ["Best 10 % of devices", "--series-5", (head) => head.held_out.spread?.best],
];

function dataOf(status) {
  const heads = status.heads.filter((head) => head.held_out.devices);
  return [
    heads.map((head) => head.version),
    ...SERIES.map(([, , value]) => heads.map((head) => value(head) ?? null)),
  ];
}

/** Return the tenths below and above the lines. */
function rangeOf(_, low, high) {
  return low === null ? [0, 1] : [Math.max(0, Math.ceil(10 * low) - 1) / 10, Math.min(10, Math.floor(10 * high) + 1) / 10];
}

/** Show the newest head in the legend while the pointer is elsewhere. */
function showNewest(chart) {
  if (chart.legend.idx === null) chart.setLegend({ idx: chart.data[0].length - 1 }, false);
}

function optionsOf(width) {
  const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
  return {
    width,
    height: 260,
    scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: { range: rangeOf } },
    axes: [
      { ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] },
      { ...axis, size: 60, values: (_, values) => values.map((value) => `${Math.round(100 * value)} %`) },
    ],
    series: [
      { label: "Head" },
      ...SERIES.map(([label, name]) => ({
        label,
        stroke: color(name),
        width: 2,
        points: { show: true, size: 6 },
        value: (_, value) => percent(value),
      })),
    ],
    hooks: { ready: [showNewest], setData: [showNewest], setLegend: [showNewest] },
  };
}

function Chart({ data }) {
  const place = useRef();
  useEffect(() => {
    const draw = () => {
      place.current.chart?.destroy();
      place.current.chart = new uPlot(optionsOf(place.current.clientWidth), place.current.data ?? data, place.current);
    };
    const fit = new ResizeObserver(() => {
      const { chart, clientWidth } = place.current;
      if (clientWidth !== chart.width) chart.setSize({ width: clientWidth, height: 260 });
    });
    draw();
    fit.observe(place.current);
    window.addEventListener("themechange", draw);
    const { current } = place;
    return () => {
      window.removeEventListener("themechange", draw);
      fit.disconnect();
      current.chart.destroy();
    };
  }, []);
  useEffect(() => {
    place.current.data = data;
    place.current.chart.setData(data);
  }, [data]);
  const last = data[0].length - 1;
  const label = `Accuracy of ${data[0].length} heads. Of head ${data[0][last]}: ${SERIES.map(([name], number) => `${name} ${percent(data[number + 1][last])}`).join(", ")}`;
  return html`<div class="chart" role="img" aria-label=${label} ref=${place}></div>`;
}

/** Return the points that twice as many images should bring to a class, or to all. */
function gainOf(status, label, before = " ↑ ") {
  const found = status.forecast.find((each) => each.label === label);
  return found ? `${before}${(100 * found.least).toFixed(1)} to ${(100 * found.most).toFixed(1)}` : "";
}

function Classes({ status, head }) {
  const rows = Object.entries(head.held_out.by_class)
    .map(([name, { correct, incorrect }]) => ({ name, total: correct + incorrect, accuracy: correct / (correct + incorrect) }))
    .sort((one, other) => one.accuracy - other.accuracy);
  return html`<h3>By class, lowest first</h3>
    <ul class="bars">
      ${rows.slice(0, SHOWN_CLASSES).map(
        (row) => html`<li key=${row.name}>
          <span class="name">${row.name}</span>
          <meter min="0" max="1" value=${row.accuracy} aria-label=${row.name}></meter>
          <span>${percent(row.accuracy)} of ${row.total}${gainOf(status, row.name)}</span>
        </li>`,
      )}
    </ul>
    ${status.forecast.length > 0 && html`<p class="quiet">↑: points that twice as many images should bring${gainOf(status, "", "; to all classes together ")}.</p>`}
    ${rows.length > SHOWN_CLASSES && html`<p class="quiet">${SHOWN_CLASSES} of ${rows.length} classes.</p>`}`;
}

function DeviceBins({ devices }) {
  const bins = Array.from({ length: BINS }, () => []);
  for (const { device, accuracy } of devices) {
    if (accuracy !== null) bins[Math.min(BINS - 1, Math.floor(accuracy * BINS))].push(device);
  }
  const most = Math.max(1, ...bins.map((names) => names.length));
  return html`<h3>By device</h3>
    <ul class="bars" aria-label="Devices by accuracy">
      ${bins.map(
        (names, number) => html`<li key=${number}>
          <span class="name">${number * 10} to ${number * 10 + 10} %</span>
          <meter min="0" max=${most} value=${names.length} aria-label=${`${number * 10} to ${number * 10 + 10} %`}></meter>
          <span>${names.length}${names.length ? `: ${names.slice(0, SHOWN_NAMES).join(", ")}${names.length > SHOWN_NAMES ? " …" : ""}` : ""}</span>
        </li>`,
      )}
    </ul>`;
}

/** Show which classes are confused: as a matrix, or as a list where there are many classes. */
function Confusion({ status, head }) {
  const { confused: pairs, by_class } = head.held_out;
  if (!pairs.length) return null;
  const worst = pairs[0];
  const caption = `Most often: ${worst.label} as ${worst.predicted}, ${worst.images} of ${worst.of}.`;
  if (status.classes.length > SHOWN_CONFUSED) {
    return html`<h3>Confused classes</h3>
      <ul>${pairs.slice(0, SHOWN_CONFUSED).map((each) => html`<li>${each.label} as ${each.predicted}: ${each.images} of ${each.of}</li>`)}</ul>`;
  }
  const known = new Map(Object.entries(by_class));
  const images = (label, predicted) =>
    label === predicted
      ? (known.get(label)?.correct ?? 0)
      : (pairs.find((each) => each.label === label && each.predicted === predicted)?.images ?? 0);
  const cell = (label, predicted) => {
    const count = images(label, predicted);
    const { correct, incorrect } = known.get(label) ?? { correct: 0, incorrect: 0 };
    const share = count / Math.max(1, correct + incorrect);
    const kind = label === predicted ? "correct" : "incorrect";
    return html`<td class=${`number ${count ? kind : "quiet"}`} style=${`--share: ${Math.round(60 * share)}%`}>${count}</td>`;
  };
  return html`<h3>Confused classes</h3>
    <p>${caption}</p>
    <div class="scroll" tabindex="0" role="region" aria-label="Confusion matrix">
      <table class="confusion">
        <thead><tr><th scope="col">Class</th>${status.classes.map((name) => html`<th scope="col" class="number">${name}</th>`)}</tr></thead>
        <tbody>
          ${status.classes.map((label) => html`<tr><th scope="row">${label}</th>${status.classes.map((predicted) => cell(label, predicted))}</tr>`)}
        </tbody>
      </table>
    </div>`;
}

export function Accuracy({ status }) {
  const data = dataOf(status);
  if (!data[0].length) return html`<p class="empty">No device has evaluated a head yet.</p>`;
  const head = status.heads.find((each) => each.version === status.rollout.current);
  return html`<${Chart} data=${data} />
    <div class="columns">
      ${head && html`<div><${Classes} status=${status} head=${head} /></div>`}
      <div><${DeviceBins} devices=${status.devices} /></div>
    </div>
    ${head && html`<${Confusion} status=${status} head=${head} />`}`;
}
