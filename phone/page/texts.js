// @ts-check
/** All texts of the page, in English and German. */

/** @typedef {"en" | "de"} Language */

const ENGLISH = {
  // Frame of the page
  teach: "Teach",
  answer: "Recognize",
  images: "Images",
  left: "Privacy",
  online: "connected",
  offline: "offline",

  // What the browser lacks
  secure: "This page needs https://, or the address localhost: a browser gives neither camera nor keys to a page without encryption. Ask the person who sent the link for an address with https://.",
  ed25519: "This browser cannot sign with Ed25519. Use a newer one: Chrome 137, Safari 17 or Firefox 129.",
  storage: "This browser stores nothing for this page: leave the private window, and do not block cookies of this page.",
  wasm: "This browser runs no WebAssembly, which the classifier needs. On an iPhone, turn Lockdown Mode off for this page.",
  canvas: "This browser changes the pixels of images to protect you from tracking, so they cannot be recognized. Allow this page to read image data, or use another browser.",
  other_tab: "protofleet is open in another tab. Close that tab, and this one continues.",
  no_start: "The page cannot start: {reason}",

  // Join
  join_a_fleet: "Join a fleet",
  join_title: "Join the fleet {fleet}",
  join_what: "This phone becomes a device of the fleet. You take images and name what they show. The images stay on this phone; it uploads averages of numbers that describe them, and gets a classifier that all devices have made together.",
  join_no_link: "Open the link that you were given, scan its QR code, or paste it here.",
  link: "Link",
  name: "Name of this phone",
  name_rule: "1 to 64 letters, digits, - or _. The fleet's operator sees this name.",
  join_button: "Join",
  joining: "Joining",
  join_link: "This is no whole link to a fleet: copy all of it.",
  join_elsewhere: "Continue at {host}",
  join_name: "This name is not allowed: 1 to 64 letters, digits, - or _.",
  join_offline: "The fleet's server does not answer. Check the network, and try again.",
  join_refused: "The fleet's server refused: {detail}",
  join_link_spent: "This link has expired, was used, or is not whole. Ask for a new one.",
  join_link_damaged: "This link is damaged: copy all of it, or ask for a new one.",
  join_link_for_another_name: "This link is for another name. Open it again.",
  join_name_taken: "Another device of the fleet has this name. Choose another one.",
  join_fleet_full: "The fleet has as many devices as its operator allows.",
  join_too_many: "Too many devices join at this moment. Try again in a minute.",
  join_answer: "The answer is not from the fleet that the link names. Ask for a new link.",

  // Camera
  camera_denied: "The camera is not allowed. Allow it in the browser's settings for this page, then reload the page.",
  camera_missing: "No camera was found. Use a phone or computer with a camera.",
  camera_busy: "Another app uses the camera. Close it, then reload the page.",
  camera_failed: "The camera cannot be used: {reason}",
  turn_camera: "Other camera",
  camera_view: "Camera",

  // Teach
  teach_hint: "Tap the class that the camera shows. Hold to take several.",
  connecting: "Connecting",
  no_task: "The fleet has no task yet. This page continues when its operator has started one.",
  loading: "Loading the model that describes images: {percent}",
  missing: { one: "1 more until the next upload", other: "{count} more until the next upload" },
  images_taken: { one: "1 image", other: "{count} images" },
  enough: "enough for the next upload",
  taken: "{label}: image taken",
  undo: "Undo",
  choose_files: "Add image files",
  only_camera: "This browser may delete this page's data, so only images of the camera count, no files: an image that counted before must not count again.",
  unusable: "This image cannot be used: {reason}",

  // Images
  images_of: "{label}, {count}",
  no_images: "No images yet.",
  suspicious: "Check the images with a red frame: the classifier does not recognize them as their class.",
  resembles: "Resembles {label}.",
  resembles_none: "Resembles no class.",
  change_class: "Class",
  delete: "Delete",
  select: "Select images",
  select_all: "All",
  delete_images: { one: "Delete 1 image", other: "Delete {count} images" },
  averaged_with_others: "Images that were averaged with them count no longer for the fleet either.",
  averaged_with: {
    one: "Averaged with 1 other image: if you delete it or change its class, the other one counts no longer for the fleet either.",
    other: "Averaged with {count} other images: if you delete it or change its class, they count no longer for the fleet either.",
  },
  close: "Close",
  open_image: "Image of {label}, {time}",
  held_out: "Kept to test the classifier, never uploaded.",

  // Recognize
  no_head: "No classifier yet: it arrives when enough devices have uploaded.",
  unrecognized: "unrecognized",
  head_version: "Classifier {version} of the fleet, computed on this phone. Works without a network.",
  speed: "{rate} per second",

  // Privacy
  left_title: "What has left this phone",
  left_none: "Nothing was uploaded yet.",
  left_bytes: "Uploaded",
  left_images: "Images averaged",
  left_kept: "Images on this phone",
  stays_title: "What stays on this phone",
  stays: "All images, the numbers that describe each image, and this phone's secret key.",
  leaves_title: "What leaves this phone",
  leaves: [
    "averages, of at least {min_images} images of a class, of the numbers that describe them",
    "the number of images of each class",
    "how many of the images kept for tests the classifier recognizes correctly",
    "the name of this phone, its network address, and when it is online",
  ],
  not_private: "An average does not show what an image looks like. It can show that an image of a known subject was among those averaged.",
  taken_back: "An upload replaces the one before. It does not change when you delete images: the next upload is without them. If no image is left, ask the fleet's operator to delete the last upload.",
  time: "Time",
  bytes: "Bytes",
  bytes_of: "{count} bytes",
  averages: "Averages",
  upload_none: "No upload is due",
  upload_due: "The next upload follows in a few seconds",
  upload_building: "The next upload is made",
  upload_waiting: "The upload waits for a connection",
  upload_sending: "Uploading: {percent}",
  upload_received: "Everything is uploaded",
  leave_title: "Leave the fleet",
  leave_button: "Leave and delete all",
  leave_sure: "Delete all images and the key on this phone? The fleet keeps what was uploaded; its operator can delete that too.",
  cancel: "Cancel",

  // Tasks that a phone does not take part in
  rounds: "This fleet trains in rounds, which this page cannot do yet.",
  statistics: "This fleet uploads statistics, which this page cannot do yet.",
  privacy: "This fleet uses differential privacy, which this page cannot do yet.",
  perturbation: "This fleet perturbs prototypes, which this page cannot do yet.",
  several_backbones: "This fleet uses several backbones, which this page cannot do yet.",

  // Problems
  replaced: "Another device uses this phone's key. This phone has stopped.",
  revoked: "The fleet's operator has revoked this phone. It keeps its classifier, and uploads nothing more.",
  unknown_device: "The fleet does not know this phone. Leave the fleet, and ask for a new link.",
  name_taken: "Another device of the fleet has this phone's name. Leave the fleet, and join with another name.",
  not_enrolled: "The fleet does not know this phone's key. Leave the fleet, and ask for a new link.",
  wrong_fleet: "This address now serves another fleet. Leave the fleet, and ask for a new link.",
  too_many: "The fleet's server has too many connections. This phone tries again.",
  broker: "The fleet's server does not reach its broker. This phone tries again.",
  storage_full: "The storage of this browser is full: delete images, or free storage on this phone. Nothing was lost.",
  expired: "The fleet's task has expired. Check date and time of this phone.",
  download_damaged: "A file arrives damaged again and again. This phone tries again.",
  upload_refused: "The fleet's server refused the upload ({detail}). This phone tries again.",
  build_failed: "The upload cannot be made: {detail}",
  head_refused: "The newest classifier cannot be used ({detail}). This phone keeps the one before.",
  crashed: "The page has failed; reload it. {detail}",

  update: "A newer version of this page is ready.",
  reload: "Reload",
};

/** @type {typeof ENGLISH} */
const GERMAN = {
  teach: "Lernen",
  answer: "Erkennen",
  images: "Bilder",
  left: "Privat",
  online: "verbunden",
  offline: "offline",

  secure: "Diese Seite braucht https:// oder die Adresse localhost: Ohne Verschlüsselung gibt der Browser weder Kamera noch Schlüssel frei. Frage nach einer Adresse mit https://.",
  ed25519: "Dieser Browser kann nicht mit Ed25519 signieren. Nötig ist ein neuerer: Chrome 137, Safari 17 oder Firefox 129.",
  storage: "Dieser Browser speichert für diese Seite nichts: Verlasse das private Fenster und blockiere Cookies dieser Seite nicht.",
  wasm: "Dieser Browser führt kein WebAssembly aus, das der Klassifikator braucht. Auf einem iPhone: Schalte den Blockierungsmodus für diese Seite aus.",
  canvas: "Dieser Browser verändert Bildpunkte als Schutz vor Verfolgung; so lassen sich Bilder nicht erkennen. Erlaube der Seite, Bilddaten zu lesen, oder nimm einen anderen Browser.",
  other_tab: "protofleet ist in einem anderen Tab offen. Schließe ihn, dann geht es hier weiter.",
  no_start: "Die Seite kann nicht starten: {reason}",

  join_a_fleet: "Einer Flotte beitreten",
  join_title: "Der Flotte {fleet} beitreten",
  join_what: "Dieses Telefon wird ein Gerät der Flotte. Du nimmst Bilder auf und benennst, was sie zeigen. Die Bilder bleiben auf dem Telefon; es lädt Mittelwerte von Zahlen hoch, die sie beschreiben, und erhält einen Klassifikator, den alle Geräte gemeinsam erzeugt haben.",
  join_no_link: "Öffne den Link, den du bekommen hast, scanne den QR-Code, oder füge den Link hier ein.",
  link: "Link",
  name: "Name dieses Telefons",
  name_rule: "1 bis 64 Buchstaben (a–z), Ziffern, - oder _. Der Betreiber der Flotte sieht den Namen.",
  join_button: "Beitreten",
  joining: "Tritt bei",
  join_link: "Das ist kein vollständiger Link zu einer Flotte: Kopiere ihn ganz.",
  join_elsewhere: "Weiter bei {host}",
  join_name: "Dieser Name ist nicht erlaubt: 1 bis 64 Buchstaben (a–z), Ziffern, - oder _.",
  join_offline: "Der Server der Flotte antwortet nicht. Prüfe das Netz und versuche es noch einmal.",
  join_refused: "Der Server der Flotte hat abgelehnt: {detail}",
  join_link_spent: "Dieser Link ist abgelaufen, benutzt oder nicht vollständig. Frage nach einem neuen.",
  join_link_damaged: "Dieser Link ist beschädigt: Kopiere ihn ganz oder frage nach einem neuen.",
  join_link_for_another_name: "Dieser Link gilt für einen anderen Namen. Öffne ihn noch einmal.",
  join_name_taken: "Ein anderes Gerät der Flotte hat diesen Namen. Wähle einen anderen.",
  join_fleet_full: "Die Flotte hat so viele Geräte, wie ihr Betreiber erlaubt.",
  join_too_many: "Gerade treten zu viele Geräte bei. Versuche es in einer Minute wieder.",
  join_answer: "Die Antwort kommt nicht von der Flotte des Links. Frage nach einem neuen Link.",

  camera_denied: "Die Kamera ist nicht erlaubt. Erlaube sie in den Einstellungen des Browsers für diese Seite und lade die Seite neu.",
  camera_missing: "Keine Kamera gefunden. Nimm ein Gerät mit Kamera.",
  camera_busy: "Eine andere App benutzt die Kamera. Schließe sie und lade die Seite neu.",
  camera_failed: "Die Kamera lässt sich nicht benutzen: {reason}",
  turn_camera: "Andere Kamera",
  camera_view: "Kamera",

  teach_hint: "Tippe auf die Klasse, die die Kamera zeigt. Halten nimmt mehrere Bilder auf.",
  connecting: "Verbindet",
  no_task: "Die Flotte hat noch keine Aufgabe. Es geht weiter, sobald ihr Betreiber eine gestartet hat.",
  loading: "Das Modell, das Bilder beschreibt, wird geladen: {percent}",
  missing: { one: "noch 1 bis zum nächsten Upload", other: "noch {count} bis zum nächsten Upload" },
  images_taken: { one: "1 Bild", other: "{count} Bilder" },
  enough: "genug für den nächsten Upload",
  taken: "{label}: Bild aufgenommen",
  undo: "Rückgängig",
  choose_files: "Bilddateien hinzufügen",
  only_camera: "Dieser Browser kann die Daten dieser Seite löschen. Deshalb zählen nur Bilder der Kamera, keine Dateien: Ein Bild, das schon gezählt hat, darf nicht noch einmal zählen.",
  unusable: "Dieses Bild ist nicht verwendbar: {reason}",

  images_of: "{label}, {count}",
  no_images: "Noch keine Bilder.",
  suspicious: "Prüfe die Bilder mit rotem Rahmen: Der Klassifikator erkennt sie nicht als ihre Klasse.",
  resembles: "Ähnelt {label}.",
  resembles_none: "Ähnelt keiner Klasse.",
  change_class: "Klasse",
  delete: "Löschen",
  select: "Bilder auswählen",
  select_all: "Alle",
  delete_images: { one: "1 Bild löschen", other: "{count} Bilder löschen" },
  averaged_with_others: "Bilder, die mit ihnen gemittelt wurden, zählen auch nicht mehr für die Flotte.",
  averaged_with: {
    one: "Mit 1 anderen Bild gemittelt: Wird es gelöscht oder umbenannt, zählt auch das andere nicht mehr für die Flotte.",
    other: "Mit {count} anderen Bildern gemittelt: Wird es gelöscht oder umbenannt, zählen auch sie nicht mehr für die Flotte.",
  },
  close: "Schließen",
  open_image: "Bild von {label}, {time}",
  held_out: "Zum Prüfen des Klassifikators behalten, wird nie hochgeladen.",

  no_head: "Noch kein Klassifikator: Er kommt, sobald genug Geräte hochgeladen haben.",
  unrecognized: "unbekannt",
  head_version: "Klassifikator {version} der Flotte, auf diesem Telefon berechnet. Funktioniert ohne Netz.",
  speed: "{rate} pro Sekunde",

  left_title: "Was dieses Telefon verlassen hat",
  left_none: "Noch wurde nichts hochgeladen.",
  left_bytes: "Hochgeladen",
  left_images: "Gemittelte Bilder",
  left_kept: "Bilder auf diesem Telefon",
  stays_title: "Was auf diesem Telefon bleibt",
  stays: "Alle Bilder, die Zahlen, die jedes Bild beschreiben, und der geheime Schlüssel des Telefons.",
  leaves_title: "Was dieses Telefon verlässt",
  leaves: [
    "Mittelwerte der Zahlen, die Bilder beschreiben, über mindestens {min_images} Bilder einer Klasse",
    "die Anzahl der Bilder jeder Klasse",
    "wie viele der zum Prüfen behaltenen Bilder der Klassifikator richtig erkennt",
    "der Name dieses Telefons, seine Netzadresse und wann es online ist",
  ],
  not_private: "Ein Mittelwert zeigt nicht, wie ein Bild aussieht. Er kann zeigen, dass ein Bild eines bekannten Motivs unter den gemittelten war.",
  taken_back: "Ein Upload ersetzt den vorigen. Er ändert sich nicht, wenn du Bilder löschst: Erst der nächste ist ohne sie. Ist kein Bild mehr da, bitte den Betreiber der Flotte, den letzten Upload zu löschen.",
  time: "Zeit",
  bytes: "Bytes",
  bytes_of: "{count} Bytes",
  averages: "Mittelwerte",
  upload_none: "Kein Upload steht an",
  upload_due: "Der nächste Upload folgt in wenigen Sekunden",
  upload_building: "Der nächste Upload wird erzeugt",
  upload_waiting: "Der Upload wartet auf eine Verbindung",
  upload_sending: "Wird hochgeladen: {percent}",
  upload_received: "Alles ist hochgeladen",
  leave_title: "Die Flotte verlassen",
  leave_button: "Verlassen und alles löschen",
  leave_sure: "Alle Bilder und den Schlüssel auf diesem Telefon löschen? Die Flotte behält, was hochgeladen wurde; auch das kann ihr Betreiber löschen.",
  cancel: "Abbrechen",

  rounds: "Diese Flotte trainiert in Runden; das kann diese Seite noch nicht.",
  statistics: "Diese Flotte lädt Statistiken hoch; das kann diese Seite noch nicht.",
  privacy: "Diese Flotte nutzt Differential Privacy; das kann diese Seite noch nicht.",
  perturbation: "Diese Flotte verrauscht Prototypen; das kann diese Seite noch nicht.",
  several_backbones: "Diese Flotte nutzt mehrere Backbones; das kann diese Seite noch nicht.",

  replaced: "Ein anderes Gerät benutzt den Schlüssel dieses Telefons. Dieses Telefon hat aufgehört.",
  revoked: "Der Betreiber der Flotte hat dieses Telefon gesperrt. Es behält seinen Klassifikator und lädt nichts mehr hoch.",
  unknown_device: "Die Flotte kennt dieses Telefon nicht. Verlasse die Flotte und frage nach einem neuen Link.",
  name_taken: "Ein anderes Gerät der Flotte hat den Namen dieses Telefons. Verlasse die Flotte und tritt mit einem anderen Namen bei.",
  not_enrolled: "Die Flotte kennt den Schlüssel dieses Telefons nicht. Verlasse die Flotte und frage nach einem neuen Link.",
  wrong_fleet: "Unter dieser Adresse ist jetzt eine andere Flotte. Verlasse die Flotte und frage nach einem neuen Link.",
  too_many: "Der Server der Flotte hat zu viele Verbindungen. Dieses Telefon versucht es wieder.",
  broker: "Der Server der Flotte erreicht seinen Broker nicht. Dieses Telefon versucht es wieder.",
  storage_full: "Der Speicher dieses Browsers ist voll: Lösche Bilder oder schaffe Platz auf dem Telefon. Nichts ging verloren.",
  expired: "Die Aufgabe der Flotte ist abgelaufen. Prüfe Datum und Uhrzeit des Telefons.",
  download_damaged: "Eine Datei kommt immer wieder beschädigt an. Dieses Telefon versucht es wieder.",
  upload_refused: "Der Server der Flotte hat den Upload abgelehnt ({detail}). Dieses Telefon versucht es wieder.",
  build_failed: "Der Upload lässt sich nicht erzeugen: {detail}",
  head_refused: "Der neueste Klassifikator ist nicht verwendbar ({detail}). Dieses Telefon behält den vorigen.",
  crashed: "Die Seite ist abgestürzt; lade sie neu. {detail}",

  update: "Eine neuere Version dieser Seite ist bereit.",
  reload: "Neu laden",
};

/** @typedef {keyof typeof ENGLISH} Key */

/** @type {Language} */
export const language = (globalThis.navigator?.language ?? "en").toLowerCase().startsWith("de") ? "de" : "en";

const TEXTS = { en: ENGLISH, de: GERMAN };

/** @type {Record<Language, Record<string, unknown>>} for tests: both have the same keys */
export const ALL = TEXTS;

/** @param {string} key @returns {key is Key} */
export const hasText = (key) => key in ENGLISH;

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

/** @param {unknown} error */
export const reasonOf = (error) => (error instanceof Error ? error.message : String(error));

const number = new Intl.NumberFormat(language);
const share = new Intl.NumberFormat(language, { style: "percent", maximumFractionDigits: 0 });
const moment = new Intl.DateTimeFormat(language, { dateStyle: "short", timeStyle: "short" });

/** @param {number} value */
export const count = (value) => number.format(value);
/** @param {number} value from 0 to 1 */
export const percent = (value) => share.format(value);
/** @param {number} seconds since 1970 */
export const time = (seconds) => moment.format(1000 * seconds);
