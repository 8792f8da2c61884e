"""What can be said of every page: how wide it is, and whether its text can be read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

NARROW = {"width": 400, "height": 800}

# The text with too little contrast to what is behind it: WCAG's ratio, 4.5, or 3 for large text.
PALE_TEXT = r"""
() => {
  const parse = (text) => {
    const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number);
    return { r, g, b, a };
  };
  const over = (top, under) => ({
    r: top.r * top.a + under.r * (1 - top.a),
    g: top.g * top.a + under.g * (1 - top.a),
    b: top.b * top.a + under.b * (1 - top.a),
    a: 1,
  });
  const canvas = matchMedia("(prefers-color-scheme: dark)").matches
    ? { r: 18, g: 18, b: 18, a: 1 } : { r: 255, g: 255, b: 255, a: 1 };
  const ground = (element) => {
    const chain = [];
    for (let e = element; e; e = e.parentElement) {
      chain.push(parse(getComputedStyle(e).backgroundColor));
    }
    return chain.reverse().reduce((under, top) => over(top, under), canvas);
  };
  const light = ({ r, g, b }) => {
    const [x, y, z] = [r, g, b].map((c) => c / 255)
      .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim();
    const element = walker.currentNode.parentElement;
    const isDrawn = element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
    const unread = "svg, script, style, noscript, option, [disabled]";
    if (!text || !isDrawn || element.closest(unread)) continue;
    const style = getComputedStyle(element);
    const behind = ground(element);
    const [a, b] = [light(over(parse(style.color), behind)), light(behind)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (isLarge ? 3 : 4.5)) found.push(`${ratio.toFixed(2)}: ${text.slice(0, 40)}`);
  }
  return found;
}
"""
# Elements that reach out of the page, for whoever has to mend it.
TOO_WIDE = """
() => document.documentElement.scrollWidth <= innerWidth ? [] :
  [...document.querySelectorAll("body *")]
    .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
    .slice(0, 5).map((e) => `${e.tagName}.${e.className}: ${e.textContent.trim().slice(0, 30)}`)
    .concat([`the page is ${document.documentElement.scrollWidth} wide`])
"""


def pale_text(page: Page) -> list[Any]:
    """The visible text that can hardly be read, with its contrast."""
    return page.evaluate(PALE_TEXT)


def too_wide(page: Page) -> list[Any]:
    """What makes the page scroll sideways; empty where it does not."""
    # Before its styles are there, any page is wide.
    page.wait_for_load_state("load")
    return page.evaluate(TOO_WIDE)
