// Pictures that a reader changes. All numbers are in the page, written by Python.

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// A labelled list of choices, or a slider over values. `chosen()` is the value.
function makeSelect(label, values, value, changed) {
  const select = make("select", {}, ...values.map((each) => make("option", {}, each)));
  select.value = value;
  select.addEventListener("input", changed);
  return { element: make("label", {}, label, select), select, chosen: () => select.value };
}

function makeSlider(label, values, value, show, changed) {
  const shown = make("output");
  const range = make("input", { type: "range", min: 0, max: values.length - 1, step: 1 });
  range.value = values.indexOf(value);
  const tell = () => {
    shown.textContent = show(values[range.value]);
    range.setAttribute("aria-valuetext", shown.textContent);
  };
  range.addEventListener("input", () => { tell(); changed(); });
  tell();
  return { element: make("label", {}, label, range, shown), range, tell, chosen: () => values[range.value] };
}

function makeSwatch(colour) {
  return make("span", { class: "swatch", style: `background:${colour}`, "aria-hidden": "true" });
}

function makeBar(parts, whole) {
  return make("div", { class: "bar", "aria-hidden": "true" }, ...parts.map(([colour, size]) =>
    make("span", { style: `background:${colour};width:${(100 * size) / whole}%` })));
}

function makeTable(head, rows) {
  const line = (cells, tag) => make("tr", {}, ...cells.map((cell) => make(tag, {}, cell)));
  return make("div", { class: "table-wrapper", tabindex: 0 }, make("table", { class: "docutils" },
    make("thead", {}, line(head, "th")),
    make("tbody", {}, ...rows.map((row) => line(row, "td")))));
}

const count = (number) => [["T", 1e12], ["B", 1e9], ["M", 1e6]]
  .filter(([, unit]) => number >= unit).map(([name, unit]) => `${number / unit} ${name}`)[0];
const digits = (number) => number.toLocaleString("en", { maximumSignificantDigits: 4 });

function drawAccounting(box, data) {
  const kinds = Object.entries(data.kinds);
  const parts = Object.keys(data.rates).map((key) => key.split("/"));
  const values = (place) => [...new Set(parts.map((each) => each[place]))];
  const params = makeSlider("parameters", data.params, 7e9, count, update);
  const ranks = makeSlider("ranks", data.ranks, 8, String, update);
  const choices = [
    makeSelect("offload", values(0), "none", update),
    makeSelect("stage", values(1), "3", update),
    makeSelect("precision", values(2), "bf16", update),
    makeSelect("optimizer", values(3), "adamw", update),
  ];
  const [offload, stage, precision, optimizer] = choices;
  const form = make("form", {}, params.element, ranks.element, stage.element, precision.element,
    optimizer.element, offload.element);
  const result = make("div", { "aria-live": "polite" });
  const bytesOf = ([, , whole, ofSlice]) =>
    whole * params.chosen() + ofSlice * Math.ceil(params.chosen() / ranks.chosen());

  function update() {
    // Where Python says nothing of a stage with an offload, the stage cannot be chosen.
    for (const option of stage.select.options) {
      const key = [offload.chosen(), option.value, precision.chosen(), optimizer.chosen()];
      option.disabled = !(key.join("/") in data.rates);
    }
    if (stage.select.selectedOptions[0].disabled) stage.select.value = "3";
    const how = choices.map((each) => each.chosen());
    const rows = data.rates[how.join("/")];
    const all = data.rates[["none", "0", ...how.slice(2)].join("/")];
    const whole = all.reduce((sum, row) => sum + bytesOf(row), 0);
    result.replaceChildren();
    data.places.forEach((place, number) => {
      const here = rows.filter((row) => row[0] === number);
      const total = here.reduce((sum, row) => sum + bytesOf(row), 0);
      if (number && !here.length) return;
      result.append(
        make("p", {}, make("strong", {}, place),
          `: ${digits(total / 1e9)} GB = ${digits(total / 2 ** 30)} GiB`),
        makeBar(here.map((row) => [kinds[row[1]][1], bytesOf(row)]), whole));
    });
    result.append(makeTable(["kind", "place", "bytes each", "GB", "GiB"], rows.map((row) => {
      const [place, kind, ofAll, ofSlice] = row;
      const terms = [ofAll && digits(ofAll), ofSlice && `${digits(ofSlice)}/N`].filter(Boolean);
      const bytes = bytesOf(row);
      return [make("span", {}, makeSwatch(kinds[kind][1]), kinds[kind][0]), data.places[place],
        terms.join(" + "), digits(bytes / 1e9), digits(bytes / 2 ** 30)];
    })));
  }
  update();
  box.append(form, result,
    make("p", { class: "note" }, "A full bar is stage 0 without offload. " +
      "Bytes are per parameter of the model; N is the number of ranks."));
}

const box = document.querySelector("[data-picture]");
const draw = { accounting: drawAccounting };
draw[box.dataset.picture](box, JSON.parse(document.getElementById("picture-data").textContent));
