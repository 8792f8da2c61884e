/** Format: numbers, sizes and times for display. */

import { gettext, ngettext } from "./i18n.js";

// Dates are written 31 Dec 2000 in English, and times with 24 hours.
const language = document.documentElement.lang || "en";
const dateLanguage = language.startsWith("en") ? "en-GB" : language;
const whole = new Intl.NumberFormat(language, { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat(language, { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const clockFormat = new Intl.DateTimeFormat(dateLanguage, { timeStyle: "long" });
const dateFormat = new Intl.DateTimeFormat(dateLanguage, { dateStyle: "medium", timeStyle: "long" });

const zoneFormat = new Intl.DateTimeFormat("sv-SE", {
  year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit", timeZoneName: "short",
});

export const UNKNOWN = gettext("unknown");

/** A whole number. */
export const count = (number) => whole.format(number);

/** A number of messages. */
export const messagesText = (number) => ngettext("{number} message", "{number} messages", number, { number: count(number) });

/** A rate per second, with one decimal if it is below 100. */
export const rate = (number) => (number === 0 || number >= 100 ? whole : tenth).format(number);

/** A size in bytes. */
export function size(bytes) {
  if (bytes < 1000) return `${whole.format(bytes)} B`;
  for (const [unit, factor] of [["kB", 1e3], ["MB", 1e6]]) {
    if (bytes < factor * 999.5) return `${(bytes < factor * 99.5 ? tenth : whole).format(bytes / factor)} ${unit}`;
  }
  return `${tenth.format(bytes / 1e9)} GB`;
}

/** A duration in ms, s or min. */
export function duration(seconds) {
  if (seconds < 0.01) return `${tenth.format(seconds * 1000)} ms`;
  if (seconds < 1) return `${whole.format(seconds * 1000)} ms`;
  return seconds < 60 ? `${tenth.format(seconds)} s` : `${whole.format(seconds / 60)} min`;
}

/** An elapsed time in whole s, min, h or d. */
export function elapsed(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} d`;
}

/** The time since an event. */
export const age = (seconds) => (seconds < 1.5 ? gettext("now") : gettext("{time} ago", { time: elapsed(seconds) }));

/** The time of day of a Unix time, with the time zone. */
export const clock = (unix) => clockFormat.format(unix * 1000);

/** Date, time and time zone of a Unix time. */
export const date = (unix) => dateFormat.format(unix * 1000);

/** Date, time and time zone of a Unix time, all in digits. */
export const dateWithZone = (unix) => zoneFormat.format(unix * 1000);

/** A share from 0 to 1, in percent. */
export function percent(share) {
  const number = share * 100;
  if (number === 0) return "0 %";
  return number < 0.01 ? "< 0.01 %" : `${number.toFixed(number < 10 ? 2 : 0)} %`;
}
