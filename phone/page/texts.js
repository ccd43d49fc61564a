// @ts-check
/** All texts of the page, in English and German. */

/** @typedef {"en" | "de"} Language */

const ENGLISH = {
  // Frame of the page
  join: "Join",
  teach: "Teach",
  answer: "Recognize",
  images: "Images",
  left: "Privacy",
  online: "connected",
  offline: "offline",
  stopped: "stopped",
  working: "Starting",

  // What the browser lacks
  insecure: "This page needs https://, or the address localhost: a browser gives neither camera nor keys to a page without encryption. Ask the person who sent the link for an address with https://.",
  no_ed25519: "This browser cannot sign with Ed25519. Use a newer one: Chrome 137, Safari 17 or Firefox 129.",
  no_storage: "This browser stores nothing for this page: leave the private window.",
  blurred_canvas: "This browser changes the pixels of images to protect you from tracking, so they cannot be recognized. Allow this page to read image data, or use another browser.",
  another_tab: "protofleet is open in another tab. Close that tab, or use it.",

  // Join
  join_title: "Join the fleet {fleet}",
  join_what: "This phone becomes a device of the fleet. You take images and name what they show. The images stay on this phone; it uploads averages of their features, and gets a classifier that all devices have made together.",
  join_no_link: "Open the link that you were given, scan its QR code, or paste it here.",
  link: "Link",
  name: "Name of this phone",
  name_rule: "1 to 64 letters, digits, - or _. The fleet's operator sees this name.",
  join_button: "Join",
  joining: "Joining",
  wrong_link: "This is not a link to a fleet: it has to contain #fleet=",

  // Camera
  camera_denied: "The camera is not allowed. Allow it in the browser's settings for this page, then reload the page.",
  camera_missing: "No camera was found.",
  camera_busy: "Another app uses the camera. Close it, then reload the page.",
  camera_failed: "The camera cannot be used: {reason}",
  turn_camera: "Other camera",
  camera_view: "Camera",

  // Teach
  teach_hint: "Tap the class that the camera shows. Hold to take several.",
  no_task: "The fleet has no task yet. This page continues when the aggregator has started one.",
  loading: "Loading the network that computes features: {percent}",
  missing: { one: "1 more until the next upload", other: "{count} more until the next upload" },
  enough: "enough for the next upload",
  taken: "{label}: image taken",
  undo: "Undo",
  undone: "Image deleted",
  choose_files: "Add image files",
  only_camera: "This browser may delete this page's data, so only images of the camera count, no files: an image that counted before must not count again.",
  unusable: "This image cannot be used: {reason}",

  // Images
  images_of: "{label}, {count}",
  no_images: "No images yet.",
  suspicious: "Check these: they resemble images of another class.",
  change_class: "Class",
  delete: "Delete",
  delete_note: "An average that was uploaded still contains the image.",
  close: "Close",
  open_image: "Image of {label}, {time}",
  held_out: "Held out: used to measure the classifier, never uploaded.",

  // Recognize
  no_head: "No classifier yet: it arrives when the fleet has enough images.",
  unsure: "unsure",
  unrecognized: "unrecognized",
  unsure_of: "unsure, perhaps {label}",
  head_version: "Classifier {version} of the fleet, computed on this phone. Works without a network.",
  speed: "{rate} per second",

  // Privacy
  left_title: "What has left this phone",
  left_none: "Nothing was uploaded yet.",
  left_bytes: "Uploaded",
  left_images: "Images averaged",
  left_kept: "Images on this phone",
  stays_title: "What stays on this phone",
  stays: "All images, the features of each image, and the key with which this phone signs.",
  leaves_title: "What leaves this phone",
  leaves: [
    "averages of the features of at least {min_images} images of a class",
    "the number of images of each class",
    "how many of the held-out images the classifier recognizes correctly",
    "the name of this phone, its network address, and when it is online",
  ],
  not_private: "An average does not show what an image looks like. It can show that an image of a known subject was among those averaged.",
  time: "Time",
  bytes: "Bytes",
  averages: "Averages",
  upload_waiting: "Upload waits for a connection",
  upload_sending: "Uploading: {percent}",
  upload_received: "Everything is uploaded",
  upload_idle: "No upload yet",
  leave_title: "Leave the fleet",
  leave_button: "Leave and delete all",
  leave_sure: "Delete all images and the key on this phone? The fleet keeps what was uploaded; its operator can delete that too.",
  cancel: "Cancel",

  // Problems and tasks that a phone does not take part in
  storage_full: "The storage of this browser is full: delete images, or free storage on this phone. Nothing was lost.",
  rounds: "This fleet trains in rounds, which this page cannot do yet.",
  statistics: "This fleet uploads statistics, which this page cannot do yet.",
  differential_privacy: "This fleet uses differential privacy, which this page cannot do yet.",
  perturbation: "This fleet perturbs prototypes, which this page cannot do yet.",
  several_backbones: "This fleet uses several backbones, which this page cannot do yet.",
  blocks: "This fleet uploads blocks, which this page cannot do yet.",
  revoked: "The fleet's operator has revoked this phone. It keeps its classifier, and uploads nothing more.",
  unknown_device: "The fleet does not know this phone. Ask for a new link.",
  signature: "The fleet's messages have an unknown signature. Ask for a new link.",
  expired: "The task has expired. Check date and time of this phone.",
  duplicate: "Another device uses this phone's key. This phone has stopped.",
  update: "A newer version of this page is ready.",
  reload: "Reload",
};

/** @type {typeof ENGLISH} */
const GERMAN = {
  join: "Beitreten",
  teach: "Lernen",
  answer: "Erkennen",
  images: "Bilder",
  left: "Privatsphäre",
  online: "verbunden",
  offline: "offline",
  stopped: "beendet",
  working: "Startet",

  insecure: "Diese Seite braucht https:// oder die Adresse localhost: Ohne Verschlüsselung gibt der Browser weder Kamera noch Schlüssel frei. Frage nach einer Adresse mit https://.",
  no_ed25519: "Dieser Browser kann nicht mit Ed25519 signieren. Nötig ist ein neuerer: Chrome 137, Safari 17 oder Firefox 129.",
  no_storage: "Dieser Browser speichert für diese Seite nichts: Verlasse das private Fenster.",
  blurred_canvas: "Dieser Browser verändert Bildpunkte als Schutz vor Verfolgung; so lassen sich Bilder nicht erkennen. Erlaube der Seite, Bilddaten zu lesen, oder nimm einen anderen Browser.",
  another_tab: "protofleet ist in einem anderen Tab offen. Schließe ihn oder benutze ihn.",

  join_title: "Der Flotte {fleet} beitreten",
  join_what: "Dieses Telefon wird ein Gerät der Flotte. Du nimmst Bilder auf und benennst, was sie zeigen. Die Bilder bleiben auf dem Telefon; es lädt Mittelwerte ihrer Merkmale hoch und erhält einen Klassifikator, den alle Geräte gemeinsam erzeugt haben.",
  join_no_link: "Öffne den Link, den du bekommen hast, scanne den QR-Code, oder füge den Link hier ein.",
  link: "Link",
  name: "Name dieses Telefons",
  name_rule: "1 bis 64 Buchstaben (a–z), Ziffern, - oder _. Der Betreiber der Flotte sieht den Namen.",
  join_button: "Beitreten",
  joining: "Tritt bei",
  wrong_link: "Das ist kein Link zu einer Flotte: Er muss #fleet= enthalten.",

  camera_denied: "Die Kamera ist nicht erlaubt. Erlaube sie in den Einstellungen des Browsers für diese Seite und lade die Seite neu.",
  camera_missing: "Keine Kamera gefunden.",
  camera_busy: "Eine andere App benutzt die Kamera. Schließe sie und lade die Seite neu.",
  camera_failed: "Die Kamera lässt sich nicht benutzen: {reason}",
  turn_camera: "Andere Kamera",
  camera_view: "Kamera",

  teach_hint: "Tippe auf die Klasse, die die Kamera zeigt. Halten nimmt mehrere Bilder auf.",
  no_task: "Die Flotte hat noch keine Aufgabe. Es geht weiter, sobald der Aggregator eine gestartet hat.",
  loading: "Das Netz für Merkmale wird geladen: {percent}",
  missing: { one: "noch 1 bis zum nächsten Upload", other: "noch {count} bis zum nächsten Upload" },
  enough: "genug für den nächsten Upload",
  taken: "{label}: Bild aufgenommen",
  undo: "Rückgängig",
  undone: "Bild gelöscht",
  choose_files: "Bilddateien hinzufügen",
  only_camera: "Dieser Browser kann die Daten dieser Seite löschen. Deshalb zählen nur Bilder der Kamera, keine Dateien: Ein Bild, das schon gezählt hat, darf nicht noch einmal zählen.",
  unusable: "Dieses Bild ist nicht verwendbar: {reason}",

  images_of: "{label}, {count}",
  no_images: "Noch keine Bilder.",
  suspicious: "Prüfe diese: Sie ähneln Bildern einer anderen Klasse.",
  change_class: "Klasse",
  delete: "Löschen",
  delete_note: "Ein hochgeladener Mittelwert enthält das Bild weiterhin.",
  close: "Schließen",
  open_image: "Bild von {label}, {time}",
  held_out: "Zurückgehalten: misst den Klassifikator und wird nie hochgeladen.",

  no_head: "Noch kein Klassifikator: Er kommt, sobald die Flotte genug Bilder hat.",
  unsure: "unsicher",
  unrecognized: "unbekannt",
  unsure_of: "unsicher, vielleicht {label}",
  head_version: "Klassifikator {version} der Flotte, auf diesem Telefon berechnet. Funktioniert ohne Netz.",
  speed: "{rate} pro Sekunde",

  left_title: "Was dieses Telefon verlassen hat",
  left_none: "Noch wurde nichts hochgeladen.",
  left_bytes: "Hochgeladen",
  left_images: "Gemittelte Bilder",
  left_kept: "Bilder auf diesem Telefon",
  stays_title: "Was auf diesem Telefon bleibt",
  stays: "Alle Bilder, die Merkmale jedes Bildes und der Schlüssel, mit dem das Telefon signiert.",
  leaves_title: "Was dieses Telefon verlässt",
  leaves: [
    "Mittelwerte der Merkmale von mindestens {min_images} Bildern einer Klasse",
    "die Anzahl der Bilder jeder Klasse",
    "wie viele zurückgehaltene Bilder der Klassifikator richtig erkennt",
    "der Name dieses Telefons, seine Netzadresse und wann es online ist",
  ],
  not_private: "Ein Mittelwert zeigt nicht, wie ein Bild aussieht. Er kann zeigen, dass ein Bild eines bekannten Motivs unter den gemittelten war.",
  time: "Zeit",
  bytes: "Bytes",
  averages: "Mittelwerte",
  upload_waiting: "Der Upload wartet auf eine Verbindung",
  upload_sending: "Wird hochgeladen: {percent}",
  upload_received: "Alles ist hochgeladen",
  upload_idle: "Noch kein Upload",
  leave_title: "Die Flotte verlassen",
  leave_button: "Verlassen und alles löschen",
  leave_sure: "Alle Bilder und den Schlüssel auf diesem Telefon löschen? Die Flotte behält, was hochgeladen wurde; auch das kann ihr Betreiber löschen.",
  cancel: "Abbrechen",

  storage_full: "Der Speicher dieses Browsers ist voll: Lösche Bilder oder schaffe Platz auf dem Telefon. Nichts ging verloren.",
  rounds: "Diese Flotte trainiert in Runden; das kann diese Seite noch nicht.",
  statistics: "Diese Flotte lädt Statistiken hoch; das kann diese Seite noch nicht.",
  differential_privacy: "Diese Flotte nutzt Differential Privacy; das kann diese Seite noch nicht.",
  perturbation: "Diese Flotte verrauscht Prototypen; das kann diese Seite noch nicht.",
  several_backbones: "Diese Flotte nutzt mehrere Backbones; das kann diese Seite noch nicht.",
  blocks: "Diese Flotte lädt Blöcke hoch; das kann diese Seite noch nicht.",
  revoked: "Der Betreiber der Flotte hat dieses Telefon gesperrt. Es behält seinen Klassifikator und lädt nichts mehr hoch.",
  unknown_device: "Die Flotte kennt dieses Telefon nicht. Frage nach einem neuen Link.",
  signature: "Die Nachrichten der Flotte haben eine unbekannte Signatur. Frage nach einem neuen Link.",
  expired: "Die Aufgabe ist abgelaufen. Prüfe Datum und Uhrzeit des Telefons.",
  duplicate: "Ein anderes Gerät benutzt den Schlüssel dieses Telefons. Dieses Telefon hat aufgehört.",
  update: "Eine neuere Version dieser Seite ist bereit.",
  reload: "Neu laden",
};

/** @typedef {keyof typeof ENGLISH} Key */

/** @type {Language} */
export const language = (globalThis.navigator?.language ?? "en").toLowerCase().startsWith("de") ? "de" : "en";

const TEXTS = { en: ENGLISH, de: GERMAN };

/** @type {Record<Language, Record<string, unknown>>} for tests: both have the same keys */
export const ALL = TEXTS;

/** @param {string} text @param {Record<string, string | number>} values */
const fill = (text, values) => text.replace(/\{(\w+)\}/g, (_, name) => String(values[name]));

/**
 * Return a text in the language of the browser. `count` chooses between one and several.
 * @param {Key} key
 * @param {Record<string, string | number>} [values]
 * @returns {string}
 */
export function t(key, values = {}) {
  const text = TEXTS[language][key];
  if (Array.isArray(text)) return fill(text.join(", "), values);
  if (typeof text === "string") return fill(text, values);
  return fill(values.count === 1 ? text.one : text.other, values);
}

/** @param {Key} key @param {Record<string, string | number>} [values] @returns {string[]} the lines of a list */
export function lines(key, values = {}) {
  const text = TEXTS[language][key];
  return Array.isArray(text) ? text.map((line) => fill(line, values)) : [t(key, values)];
}

/** @param {string} reason of a problem @returns {string} its text, or the reason itself */
export const problemText = (reason) => (reason in ENGLISH ? t(/** @type {Key} */ (reason)) : reason);

const number = new Intl.NumberFormat(language);
const share = new Intl.NumberFormat(language, { style: "percent", maximumFractionDigits: 0 });
const moment = new Intl.DateTimeFormat(language, { dateStyle: "short", timeStyle: "short" });

/** @param {number} value */
export const count = (value) => number.format(value);
/** @param {number} value from 0 to 1 */
export const percent = (value) => share.format(value);
/** @param {number} seconds since 1970 */
export const time = (seconds) => moment.format(1000 * seconds);
