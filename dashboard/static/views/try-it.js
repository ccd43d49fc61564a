// Drop an image: the fleet's model answers in the browser.

import { html, useEffect, useState } from "../vendor/standalone.module.js";
import { predict } from "../model.js";
import { percent } from "../format.js";

const SHOWN = 5;

export function TryIt({ status }) {
  const [image, setImage] = useState(null);
  const [answer, setAnswer] = useState(null);
  const [isOver, setOver] = useState(false);
  useEffect(() => () => image && URL.revokeObjectURL(image.url), [image]);
  const head = status.heads.find((each) => each.version === status.rollout.current);
  if (!status.model_path || !head) {
    return html`<p class="empty">There is no model.onnx yet: a head is trained first.</p>`;
  }
  async function answerFor(file) {
    if (!file) return;
    setImage({ url: URL.createObjectURL(file), name: file.name });
    setAnswer({ text: "The model is loaded and run" });
    try {
      const classes = await predict(file, head.sha256);
      setAnswer({ classes, text: `${classes[0].name}, ${percent(classes[0].probability)}, by head ${head.version}` });
    } catch (error) {
      setAnswer({ problem: `This image has no answer: ${error.message}` });
    }
  }
  function drop(event) {
    event.preventDefault();
    setOver(false);
    answerFor(event.dataTransfer.files[0]);
  }
  return html`<div
    class="drop ${isOver ? "over" : ""}"
    onDragOver=${(event) => (event.preventDefault(), setOver(true))}
    onDragLeave=${() => setOver(false)}
    onDrop=${drop}
  >
    <label>
      Drop an image here, or choose one
      <input type="file" accept="image/*" onChange=${(event) => answerFor(event.target.files[0])} />
    </label>
    <p class="quiet">The model runs in this browser; the image is not uploaded.</p>
    ${image && html`<img src=${image.url} alt=${image.name} />`}
    <p role="status">${answer?.text}</p>
    ${answer?.problem && html`<p class="problem" role="alert">${answer.problem}</p>`}
    ${answer?.classes &&
    html`<ul class="bars" aria-label="Most probable classes">
      ${answer.classes.slice(0, SHOWN).map(
        ({ name, probability }) => html`<li key=${name}>
          <span class="name">${name}</span><meter min="0" max="1" value=${probability} aria-label=${name}></meter><span>${percent(probability)}</span>
        </li>`,
      )}
    </ul>`}
  </div>`;
}
