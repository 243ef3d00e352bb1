// What a reader would see of each frame: whether it has to scroll sideways, which texts are hard to
// read, which lie over one another or beyond their picture. Written into the page as JSON.

function channels(colour) {
  const [r, g, b, a = 1] = colour.match(/[\d.]+/g).map(Number);
  return { rgb: [r, g, b], a };
}

function luminance(rgb) {
  const linear = rgb.map((c) => {
    const part = c / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

// The colour behind the middle of a text: of what lies under it there, or of the page. Null where
// the text is not to be seen, as it has to be scrolled to.
function behind(element, box, page) {
  const there = element.ownerDocument.elementsFromPoint(box.x + box.width / 2, box.y + box.height / 2);
  if (!there.includes(element)) return null;
  for (const each of there.slice(there.indexOf(element))) {
    if (each === element && element.ownerSVGElement) continue;
    const style = getComputedStyle(each);
    const isShape = each.ownerSVGElement && each.tagName !== "text";
    const paint = isShape ? style.fill : style.backgroundColor;
    const colour = paint.startsWith("rgb") ? channels(paint) : { a: 0 };
    if (colour.a > 0.9 && !(isShape && Number(style.fillOpacity) < 0.9)) return colour.rgb;
  }
  return page;
}

function look(frame) {
  const page = frame.contentDocument;
  const root = page.documentElement;
  for (const closed of page.querySelectorAll("details")) closed.open = true;
  const canvas = channels(getComputedStyle(page.body).backgroundColor);
  const isDark = frame.contentWindow.matchMedia("(prefers-color-scheme: dark)").matches;
  const paper = canvas.a ? canvas.rgb : isDark ? [18, 18, 18] : [255, 255, 255];
  const faint = [], crossing = [], cut = [];
  for (const element of page.body.querySelectorAll("*")) {
    const words = [...element.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data.trim()).join("");
    const isHidden = ["title", "desc", "style", "script"].includes(element.tagName.toLowerCase());
    const box = element.getBoundingClientRect();
    if (!words || isHidden || !box.width) continue;
    const style = getComputedStyle(element);
    const colour = channels(element.ownerSVGElement ? style.fill : style.color);
    const under = behind(element, box, paper);
    const ratio = under && contrast(colour.rgb, under);
    if (under && ratio < 4) faint.push([words, Number(ratio.toFixed(2))]);
  }
  for (const picture of page.querySelectorAll("svg")) {
    const whole = picture.getBoundingClientRect();
    const texts = [...picture.querySelectorAll("text")].map((t) => [t.textContent, t.getBoundingClientRect()]);
    texts.forEach(([words, box], number) => {
      if (box.left < whole.left - 1 || box.right > whole.right + 1 || box.bottom > whole.bottom + 1)
        cut.push(words);
      for (const [others, other] of texts.slice(number + 1)) {
        const across = Math.min(box.right, other.right) - Math.max(box.left, other.left);
        const down = Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top);
        if (across > 1 && down > 2) crossing.push([words, others]);
      }
    });
  }
  // Pictures that are cut and do not say that they scroll.
  const unsaid = [...page.querySelectorAll("figure")]
    .filter((f) => f.scrollWidth > f.clientWidth + 1 && !f.querySelector("figcaption")?.checkVisibility())
    .map((f) => f.textContent.slice(0, 40));
  return {
    scroll: root.scrollWidth - frame.contentWindow.innerWidth,
    isDark, faint, crossing, cut, unsaid,
    numTexts: page.body.innerText.length,
    requests: frame.contentWindow.performance.getEntriesByType("resource").map((e) => e.name),
  };
}

addEventListener("load", () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) found[frame.dataset.name] = look(frame);
  document.getElementById("found").textContent = JSON.stringify(found);
});
