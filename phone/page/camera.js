// @ts-check
/** The phone's camera, and its frames. */

/** @typedef {import("./texts.js").Key} Key */
/** @typedef {"environment" | "user"} Facing */

const IDEAL = { width: { ideal: 1280 }, height: { ideal: 720 } };
const JPEG_QUALITY = 0.92;

/** @type {Record<string, Key>} */
const REASONS = {
  NotAllowedError: "camera_denied", NotFoundError: "camera_missing", NotReadableError: "camera_busy",
  OverconstrainedError: "camera_missing", // of WebKit, although nothing is required of the camera
};

/** @param {unknown} error @returns {{key: Key, reason: string}} why a camera could not be opened */
export function cameraProblem(error) {
  const { name = "", message = String(error) } = error instanceof Error || error instanceof DOMException ? error : {};
  return { key: REASONS[name] ?? "camera_failed", reason: message };
}

/**
 * Open a camera and show it in a video element.
 * @param {HTMLVideoElement} video
 * @param {Facing} facing
 * @returns {Promise<() => void>} closes it
 * @throws {DOMException} the camera is denied, missing or in use
 */
export async function openCamera(video, facing) {
  if (!navigator.mediaDevices) throw new DOMException("", "NotFoundError");
  const stream = await navigator.mediaDevices.getUserMedia({ video: { ...IDEAL, facingMode: facing }, audio: false });
  video.srcObject = stream;
  await video.play().catch(() => undefined); // interrupted by its end
  return () => {
    for (const track of stream.getTracks()) track.stop();
    video.srcObject = null;
  };
}

/**
 * Return the pixels of the frame that a video shows, null before the first one.
 * @param {HTMLVideoElement} video
 * @param {OffscreenCanvas} canvas reused between frames
 * @returns {ImageData | null}
 */
export function frameOf(video, canvas) {
  const context = draw(video, canvas);
  return context ? context.getImageData(0, 0, canvas.width, canvas.height) : null;
}

/**
 * Return the frame that a video shows as an image file, null before the first one.
 * @param {HTMLVideoElement} video
 * @param {OffscreenCanvas} canvas reused between frames
 * @returns {Promise<Blob | null>}
 */
export async function photographOf(video, canvas) {
  return draw(video, canvas) ? canvas.convertToBlob({ type: "image/jpeg", quality: JPEG_QUALITY }) : null;
}

/** @param {HTMLVideoElement} video @param {OffscreenCanvas} canvas */
function draw(video, canvas) {
  if (!video.videoWidth) return null;
  if (canvas.width !== video.videoWidth) canvas.width = video.videoWidth;
  if (canvas.height !== video.videoHeight) canvas.height = video.videoHeight;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context?.drawImage(video, 0, 0);
  return context;
}
