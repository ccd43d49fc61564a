// Numbers and times as text.

import { fleet } from "./fleet.js";

export function percent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`;
}

export function bytes(value) {
  if (!value) return "0 B";
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log10(value) / 3));
  return `${(value / 1000 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

export function counted(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

/** The title of a column of prototypes. */
export function prototypesOf(status) {
  return status.counted === "images" ? "Images in prototypes" : "Prototypes";
}

/** The server's time, in unix seconds. */
export function now() {
  return Date.now() / 1000 + fleet.skew_s;
}

export function duration(seconds) {
  const value = Math.max(0, Math.round(seconds));
  if (value < 100) return `${value} s`;
  if (value < 6000) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86400)} d`;
}

export function ago(unix_s) {
  return unix_s === null || unix_s === undefined ? "never" : `${duration(now() - unix_s)} ago`;
}

export function moment(unix_s) {
  return new Date(unix_s * 1000).toLocaleString();
}

/** Return the count of a class, whose name may be that of a property which every object has. */
export function countOf(counts, name) {
  return Object.hasOwn(counts, name) ? counts[name] : 0;
}
