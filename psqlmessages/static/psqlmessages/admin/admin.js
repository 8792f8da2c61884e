/**
 * Admin: shows times in the reader's zone, selects all rows, and keeps fragments up to date.
 *
 * While the fragments cannot be updated, they are grey, and the elements with data-liveness say why.
 */

import { setText } from "../monitor/dom.js";
import { pollFragments, showFragments } from "../monitor/fragments.js";

// Django's label of the search field is an image: use its text.
const search = document.getElementById("searchbar");
search?.setAttribute("aria-label", search.labels[0]?.querySelector("img")?.alt ?? "Search");

/** Label a field of Select2 for screen readers: Select2 labels it only with its value, if it has one. */
function nameSelect(selection) {
  const [label] = selection.closest(".select2")?.previousElementSibling?.labels ?? [];
  const value = selection.querySelector(".select2-selection__rendered");
  if (!label || !value) return;
  label.id ||= `label-${value.id}`;
  selection.setAttribute("aria-labelledby", `${label.id} ${value.id}`);
  value.setAttribute("aria-label", label.textContent.trim());
}

// Django's own callback, which creates the fields, runs first.
globalThis.django?.jQuery?.(() => document.querySelectorAll(".select2-selection").forEach(nameSelect));

if (document.querySelector("[data-fragment]")) {
  pollFragments({
    onframe: showFragments,
    onliveness({ is, text }) {
      for (const element of document.querySelectorAll("[data-liveness]")) {
        element.dataset.is = is;
        setText(element, is === "live" ? "live" : is === "connecting" ? "" : `Not live. ${text}`);
      }
      for (const element of document.querySelectorAll("[data-fragment]")) {
        element.classList.toggle("stale", is !== "live" && is !== "connecting");
      }
    },
  });
}
