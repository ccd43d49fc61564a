"use strict";
// The token is in the address behind `#`; the images come as blobs, because their requests need it, too.
const token = location.hash.slice(1);
const byId = (id) => document.getElementById(id);
const KEYS = "123456789abcdefghijklmnopqrstvwxyz"; // without u, which undoes
const images = new Map();
let content, kind, place = 0;
let isMoving = false; // a key moves the image that is shown, once
const NO_TOKEN = "Open the whole address that `edge-client review` printed last, with the part behind #.";

async function request(path, method = "GET") {
  const answer = await fetch(path, { method, headers: { Authorization: `Bearer ${token}` } });
  if (answer.status === 401) throw new Error(NO_TOKEN);
  if (!answer.ok) throw new Error((await answer.json()).error);
  return answer;
}

function report(error) {
  byId("error").textContent = error ? error.message : "";
}

const ofKind = (name) => content.findings.map((each, number) => ({ ...each, number })).filter((each) => each.kind === name);
const current = () => ofKind(kind)[place];
const percent = (value) => `${(100 * value).toFixed(1)} %`;

function imageOf(number) {
  if (!images.has(number)) {
    images.set(number, request(`/review/image?finding=${number}`).then((answer) => answer.blob()).then(URL.createObjectURL));
  }
  return images.get(number);
}

async function show(element, number) {
  element.dataset.finding = number;
  try {
    const source = await imageOf(number);
    if (element.dataset.finding !== String(number)) return;
    element.src = source;
    if (element.id === "image") element.decode().catch(() => {}).then(() => {
      if (element.dataset.finding === String(number)) byId("current").ariaBusy = "false";
    });
  } catch (error) {
    images.delete(number);
    report(error);
  }
}

function button(text, onClick, key) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  if (key) {
    const hint = document.createElement("kbd");
    hint.textContent = key;
    made.append(" ", hint);
  }
  made.addEventListener("click", onClick);
  return made;
}

function describe(finding) {
  const best = Object.entries(finding.scores).slice(0, 3).map(([name, score]) => `${name} ${percent(score)}`);
  const parts = [finding.image];
  if (finding.labeled !== null) parts.push(`labeled ${finding.labeled}`);
  if (finding.held_out) parts.push("held out");
  parts.push(`the head finds ${finding.answer} (${best.join(", ")})`);
  if (finding.same_as.length) parts.push(`the same as ${finding.same_as.join(", ")}`);
  if (finding.kept) parts.push("kept");
  if (finding.moved_to) parts.push(`moved to ${finding.moved_to}`);
  return parts.join(" · ");
}

function drawCurrent() {
  const finding = current();
  byId("current").hidden = !finding;
  if (!finding) return;
  byId("image").alt = `Image ${finding.image}`;
  byId("caption").textContent = describe(finding);
  byId("current").ariaBusy = "true";
  show(byId("image"), finding.number);
  const focused = [...byId("classes").children].indexOf(document.activeElement);
  byId("classes").replaceChildren(
    ...content.classes.map((name, label) => {
      const made = button(name, () => move(label), KEYS[label]);
      if (name === finding.labeled) made.setAttribute("aria-current", "true");
      return made;
    }),
    ...(content.has_others ? [button("None of these", () => move(content.classes.length), "0")] : []),
  );
  byId("classes").children[focused]?.focus();
  byId("before").disabled = place === 0;
  byId("after").disabled = place === ofKind(kind).length - 1;
  for (const [at, each] of [...byId("thumbnails").children].entries()) {
    each.firstChild.toggleAttribute("aria-current", at === place);
  }
}

function drawKind() {
  byId("kinds").replaceChildren(...Object.entries(content.titles).map(([name, title]) => {
    const made = button(`${title}: ${ofKind(name).length}`, () => choose(name));
    made.setAttribute("aria-pressed", name === kind);
    return made;
  }));
  byId("thumbnails").replaceChildren(...ofKind(kind).map((finding, at) => {
    const item = document.createElement("li");
    const made = button("", () => { place = at; drawCurrent(); });
    const image = document.createElement("img");
    image.alt = `${finding.image}${finding.moved_to ? ", moved" : ""}`;
    made.append(image);
    made.classList.toggle("moved", finding.moved_to !== null);
    item.append(made);
    seen.observe(image);
    image.dataset.finding = finding.number;
    return item;
  }));
  drawCurrent();
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries.filter((each) => each.isIntersecting)) {
    seen.unobserve(entry.target);
    show(entry.target, Number(entry.target.dataset.finding));
  }
});

function choose(name) {
  kind = name;
  place = 0;
  drawKind();
}

function step(by) {
  place = Math.max(0, Math.min(place + by, ofKind(kind).length - 1));
  drawCurrent();
}

// Sends a change, and shows the finding that `next` chooses.
async function change(path, next) {
  if (isMoving) return;
  isMoving = true;
  report();
  try {
    const before = content;
    content = await (await request(path, "POST")).json();
    next(before);
    place = Math.max(0, Math.min(place, ofKind(kind).length - 1));
    drawKind();
  } catch (error) {
    report(error);
  }
  isMoving = false;
}

const move = (label) => change(`/review/move?finding=${current().number}&class=${label}`, () => { place += 1; });
const keep = () => change(`/review/keep?finding=${current().number}`, () => { place += 1; });
const undo = () => change("/review/undo", (before) => {
  const number = content.findings.findIndex((each, at) => each.moved_to !== before.findings[at].moved_to);
  if (number < 0) return;
  kind = content.findings[number].kind;
  place = ofKind(kind).findIndex((each) => each.number === number);
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || !content) return;
  if (event.key === "ArrowRight") step(1);
  else if (event.key === "ArrowLeft") step(-1);
  if (event.repeat) return;
  const label = KEYS.indexOf(event.key);
  if (event.key === "u") undo();
  else if (!current() || byId("current").ariaBusy === "true") return;
  else if (event.key === ".") keep();
  else if (label >= 0 && label < content.classes.length) move(label);
  else if (event.key === "0" && content.has_others) move(content.classes.length);
  else if (event.key === "0") report(new Error("Start `edge-client review` with --unlabeled FOLDER, into which images of none of the classes are moved."));
});
byId("after").addEventListener("click", () => step(1));
byId("before").addEventListener("click", () => step(-1));
byId("keep").addEventListener("click", keep);
byId("undo").addEventListener("click", undo);

(async () => {
  try {
    content = await (await request("/review/findings")).json();
  } catch (error) {
    report(error);
    return;
  }
  const accuracy = content.held_out ? ` · ${content.correct} of ${content.held_out} held-out images correct` : "";
  byId("summary").textContent = `${content.images} images${accuracy}`;
  choose(Object.keys(content.titles).find((name) => ofKind(name).length) || "label");
})();
