// @ts-check
/** The camera's picture on the page. */

import { html, useEffect, useRef, useState } from "../vendor/standalone.module.js";
import { cameraProblem, openCamera } from "./camera.js";
import { Notice } from "./notices.js";
import { t } from "./texts.js";

/**
 * Show the camera while the page is visible; `onVideo` gets the video element, and null at its end.
 * @param {{onVideo: (video: HTMLVideoElement | null) => void, children?: unknown}} props
 */
export function Viewfinder({ onVideo, children }) {
  const video = useRef(/** @type {HTMLVideoElement | null} */ (null));
  const [facing, setFacing] = useState(/** @type {import("./camera.js").Facing} */ ("environment"));
  const [problem, setProblem] = useState("");
  const [isVisible, setVisible] = useState(!document.hidden);

  useEffect(() => {
    const see = () => setVisible(!document.hidden);
    document.addEventListener("visibilitychange", see);
    return () => document.removeEventListener("visibilitychange", see);
  }, []);

  useEffect(() => {
    const shown = video.current;
    if (!isVisible || !shown) return undefined;
    let isOver = false;
    const opened = openCamera(shown, facing);
    opened.then(
      () => {
        if (isOver) return;
        setProblem("");
        onVideo(shown);
      },
      (error) => {
        const { key, reason } = cameraProblem(error);
        if (!isOver) setProblem(t(key, { reason }));
      },
    );
    return () => {
      isOver = true;
      onVideo(null);
      opened.then((close) => close(), () => undefined);
    };
  }, [facing, isVisible]);

  return html`<div class="viewfinder">
    <div class="camera" hidden=${Boolean(problem)}>
      <video ref=${video} playsinline muted aria-label=${t("camera_view")}></video>
      ${children}
      <button type="button" class="turn" onClick=${() => setFacing(facing === "user" ? "environment" : "user")}>${t("turn_camera")}</button>
    </div>
    ${problem && html`<${Notice} kind="bad" text=${problem} />`}
  </div>`;
}
