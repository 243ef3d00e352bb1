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

// The rectangles of one picture; x is in ms, and the picture is as wide as its box.
function makePicture(label, width, height, rectangles) {
  const create = (tag) => document.createElementNS("http://www.w3.org/2000/svg", tag);
  const picture = create("svg");
  const set = (element, values) =>
    Object.entries(values).forEach(([name, value]) => element.setAttribute(name, value));
  set(picture, { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img",
    "aria-label": label });
  for (const [x, y, w, h, fill] of rectangles) {
    const rectangle = create("rect");
    set(rectangle, { x, y, width: w, height: h, fill });
    picture.append(rectangle);
  }
  return picture;
}

function drawStep(box, data) {
  const rows = ["main", ...[...new Set(Object.values(data.stages).flatMap((stage) =>
    stage.ranks.flatMap((rank) => rank.spans.map((span) => span[0]))))].sort()]
    .filter((row, number) => !number || row !== "main");
  const mib = (bytes) => (bytes / 2 ** 20).toFixed(1);
  const sum = (held) => Object.values(held).reduce((all, bytes) => all + bytes, 0);
  const most = Math.max(...Object.values(data.stages).flatMap((stage) =>
    stage.ranks.flatMap((rank) => rank.memory.map(([, held]) => sum(held)))));
  const name = (kind) => kind.replaceAll("_", " ");
  const places = [...Array(201).keys()];
  const stage = makeSelect("stage", Object.keys(data.stages), "3", redraw);
  const ms = (place) => data.stages[stage.chosen()].ms * place / 200;
  const time = makeSlider("time", places, 80, (place) => `${ms(place).toFixed(1)} ms`, update);
  const tracks = make("div", { class: "tracks" });
  const now = make("div");
  const cursor = make("div", { class: "cursor", "aria-hidden": "true" });
  // What a rank holds at a time: that of the newest moment.
  const heldAt = (rank, at) =>
    (rank.memory.findLast(([begin]) => begin <= at) ?? rank.memory[0])[1];

  function redraw() {
    const { ms: length, ranks } = data.stages[stage.chosen()];
    tracks.replaceChildren();
    ranks.forEach((rank, number) => {
      const bars = rank.spans.map(([row, phase, , begin, long]) =>
        [begin, rows.indexOf(row) * 10, Math.max(long, length / 1000), 8, data.phases[phase][1]]);
      tracks.append(make("p", {}, `rank ${number}`),
        makePicture(`timeline of rank ${number}`, length, rows.length * 10, bars));
    });
    const { memory } = ranks[0];
    const areas = memory.flatMap(([at, held], number) => {
      const begin = number ? at : 0;
      const end = number + 1 < memory.length ? memory[number + 1][0] : length;
      let top = most;
      return Object.entries(data.kinds).filter(([kind]) => held[kind]).map(([kind, colour]) => {
        top -= held[kind];
        return [begin, top / 2 ** 20, end - begin, held[kind] / 2 ** 20, colour];
      });
    });
    const area = makePicture("memory of rank 0 by kind", length, most / 2 ** 20, areas);
    area.classList.add("memory");
    tracks.append(make("p", {}, `memory of rank 0; the height is ${mib(most)} MiB`), area, cursor);
    time.tell();
    update();
  }

  function update() {
    const at = ms(time.chosen());
    const { ranks } = data.stages[stage.chosen()];
    cursor.style.left = `${time.chosen() / 2}%`;
    const doing = rows.map((row) => [row === "main" ? "computing" : "sending, " + name(row.split(".")[1]),
      ...ranks.map((rank) => {
        const span = rank.spans.find(([of, , , begin, long]) =>
          of === row && begin <= at && at <= begin + long);
        if (!span) return "–";
        const [work, colour] = data.phases[span[1]];
        return make("span", {}, makeSwatch(colour), `${work}, ${span[2] ? `unit ${span[2]}` : "the root"}`);
      })]);
    const held = ranks.map((rank) => heldAt(rank, at));
    const kinds = Object.entries(data.kinds).map(([kind, colour]) =>
      [make("span", {}, makeSwatch(colour), name(kind)), ...held.map((each) => mib(each[kind] ?? 0))]);
    now.replaceChildren(makeTable(["", ...ranks.map((_, number) => `rank ${number}`)],
      [...doing, ...kinds, ["together, MiB", ...held.map((each) => mib(sum(each)))]]));
  }
  redraw();
  const legend = Object.entries(Object.fromEntries(Object.values(data.phases)))
    .map(([work, colour]) => make("span", {}, makeSwatch(colour), work));
  box.append(make("form", {}, stage.element, time.element), tracks,
    make("p", { class: "note legend" }, ...legend), now);
}

// Cells of a matrix; those without a colour are empty, and one is outlined.
function makeCells(label, [rows, columns], colours, chosen) {
  const place = (number) => [number % columns, Math.floor(number / columns)];
  const cells = colours.map((colour, number) => {
    const [x, y] = place(number);
    return [x + 0.05, y + 0.05, 0.9, 0.9, colour ?? "transparent"];
  });
  const picture = makePicture(label, columns, rows, cells);
  const outline = picture.lastElementChild.cloneNode();
  const [x, y] = place(chosen);
  outline.setAttribute("x", x + 0.05);
  outline.setAttribute("y", y + 0.05);
  outline.setAttribute("fill", "none");
  outline.classList.add("chosen");
  picture.append(outline);
  return picture;
}

function drawOwner(box, data) {
  const [rows, columns] = data.shape;
  const [slice, copy, stale, own, mean] = Object.values(data.kinds);
  const stage = makeSelect("stage", Object.keys(data.stages), "3", update);
  const names = data.stages[3].map((each) => each.moment);
  const moment = makeSlider("moment", names, "its layer's backward", (name) => name, update);
  const element = makeSlider("element", [...Array(rows * columns).keys()], 13,
    (number) => `${number}: row ${Math.floor(number / columns)}, column ${number % columns}`, update);
  const result = make("div", { "aria-live": "polite" });

  // The begin and the end of the gradient's elements on a rank.
  const spanOf = (rank) => rank.grad === "own" ? [0, rows * columns] : rank.grads.length ? rank.owns : [0, 0];

  function update() {
    const number = element.chosen();
    const { ranks } = data.stages[stage.chosen()][names.indexOf(moment.chosen())];
    const within = ([begin, end], at = number) => begin <= at && at < end;
    const owners = ranks.flatMap((rank, at) => within(rank.owns) ? [at] : []);
    const grids = ranks.map((rank, at) => make("div", {}, make("p", {}, `rank ${at}`),
      makeCells(`weight on rank ${at}`, data.shape, rank.values.map((value, each) =>
        within(rank.owns, each) ? slice : value === null ? null : rank.full === "stale" ? stale : copy), number),
      makeCells(`gradient on rank ${at}`, data.shape, rank.values.map((_, each) =>
        within(spanOf(rank), each) ? (rank.grad === "own" ? own : mean) : null), number)));
    const table = ranks.map((rank, at) => {
      const value = rank.values[number];
      const is = within(rank.owns) ? "owner" : rank.full === "stale" ? "stale" : "copy";
      const grad = within(spanOf(rank)) ? `${rank.grads[number - spanOf(rank)[0]]} (${rank.grad})` : "–";
      return [`rank ${at}`, value === null ? "–" : `${value} (${is})`, grad, within(rank.owns) ? "yes" : "–"];
    });
    result.replaceChildren(
      make("p", {}, make("strong", {}, owners.length > 1 ? "Every rank" : `Rank ${owners[0]}`), ` updates element ${number}.`),
      make("div", { class: "grids" }, ...grids),
      makeTable(["", "weight", "gradient", "Adam's averages"], table));
  }
  update();
  const legend = Object.entries(data.kinds).map(([kind, colour]) => make("span", {}, makeSwatch(colour), kind));
  box.append(make("form", {}, stage.element, moment.element, element.element), result,
    make("p", { class: "note legend" }, ...legend),
    make("p", { class: "note" }, "Above is the weight, below its gradient. Empty cells are not on the rank."));
}

function drawMesh(box, data) {
  const parts = Object.keys(data.experts).map((key) => key.split("/"));
  const degrees = ["pp", "dp_replicate", "cp", "tp", "ep"].map((name, place) =>
    makeSelect(name, [...new Set(parts.map((each) => each[place]))], { cp: "2", tp: "2", ep: "4", pp: "2" }[name] ?? "1", update));
  const axis = makeSelect("axis shown", Object.keys(data.axes), "fsdp", update);
  const rank = makeSlider("rank", [...Array(16).keys()], 5, String, update);
  const result = make("div", { "aria-live": "polite" });

  function update() {
    // Only degrees that 16 ranks have can be chosen; of experts, those that the rest leaves.
    const chosen = degrees.map((each) => each.chosen());
    if (!(chosen.join("/") in data.experts)) degrees[4].select.value = chosen[4] = "1";
    degrees.forEach(({ select }, place) => {
      for (const option of select.options) {
        const key = chosen.with(place, option.value);
        option.disabled = !(key.join("/") in data.experts || key.with(4, "1").join("/") in data.experts && place < 4);
      }
    });
    const dense = data.dense[chosen.slice(0, 4).join("/")];
    const groups = { ...dense, ...data.experts[chosen.join("/")] };
    const shards = 16 / chosen.slice(0, 4).reduce((product, degree) => product * degree, 1);
    const now = rank.chosen();
    const membersOf = (name) => [...groups[name]].flatMap((group, at) => group === groups[name][now] ? [at] : []);
    const members = membersOf(axis.chosen());
    const cells = [...Array(16).keys()].map((at) => {
      const cell = make("span", {}, String(at));
      if (members.includes(at)) cell.classList.add("member");
      if (at === now) cell.classList.add("chosen");
      return cell;
    });
    const rows = Object.entries(data.axes).map(([name, [divides, sends]]) => {
      const ranks = membersOf(name);
      const machines = new Set(ranks.map((at) => Math.floor(at / 8))).size;
      return ranks.length < 2 ? [name, "alone", divides, "nothing"] :
        [name, ranks.join(", ") + (machines > 1 ? ", on two machines" : ""), divides, sends];
    });
    result.replaceChildren(
      make("p", {}, make("strong", {}, `dp_shard is ${shards}. `),
        `Along ${axis.chosen()}, rank ${now} is in a group with ${members.length > 1 ? members.filter((at) => at !== now).join(", ") : "no other rank"}.`),
      make("p", {}, "machine 0"), make("div", { class: "ranks" }, ...cells.slice(0, 8)),
      make("p", {}, "machine 1"), make("div", { class: "ranks" }, ...cells.slice(8)),
      make("p", {}, `Of the batch it has part ${parseInt(dense.part[now], 16)} (counted from 0), as have ranks ` +
        `${[...dense.part].flatMap((part, at) => part === dense.part[now] ? [at] : []).join(", ")}.`),
      makeTable(["axis", `group of rank ${now}`, "divides", "sends"], rows));
  }
  update();
  box.append(make("form", { class: "short" }, ...degrees.map((each) => each.element), axis.element, rank.element), result);
}

function drawBound(box, data) {
  const { tokens } = data;
  const [computing, waiting] = Object.values(data.kinds);
  const link = makeSelect("link", Object.keys(data.plans), "pcie5", update);
  const each = makeSlider("tokens per rank", tokens, 8192, (number) => number.toLocaleString("en"), update);
  const result = make("div", { "aria-live": "polite" });
  const sent = data.sent_bytes.reduce((sum, bytes) => sum + bytes, 0);

  function update() {
    const bound = sent / (6 * data.params) * data.flops_per_s / data.bytes_per_s[link.chosen()];
    const number = tokens.indexOf(each.chosen());
    const [step, waited] = data.plans[link.chosen()][number];
    const bars = data.plans[link.chosen()].flatMap(([whole, part], at) => [
      [at + 0.1, 100 * part / whole, 0.8, 100 - 100 * part / whole, computing],
      [at + 0.1, 0, 0.8, 100 * part / whole, waiting],
    ]);
    const picture = makePicture("share of a step that a rank waits, by tokens", tokens.length, 100,
      [...bars, [number + 0.1, 0, 0.8, 100, "none"]]);
    picture.classList.add("memory");
    picture.lastElementChild.classList.add("chosen");
    const line = make("div", { class: "cursor", "aria-hidden": "true",
      style: `width:2px;left:${100 * (Math.log2(bound / tokens[0]) + 0.5) / tokens.length}%` });
    const short = (count) => count < 1024 ? String(count) : `${count / 1024}k`;
    result.replaceChildren(
      make("p", {}, make("strong", {}, `${digits(data.bytes_per_s[link.chosen()] / 1e9)} GB/s: at least ` +
        `${Math.round(bound).toLocaleString("en")} tokens per rank.`),
        ` With ${each.chosen().toLocaleString("en")} ${each.chosen() < bound ? "sending takes longer than computing" : "computing hides what is sent"}.`),
      make("div", { class: "tracks" }, picture, line),
      make("div", { class: "scale", style: `grid-template-columns: repeat(${tokens.length}, minmax(0, 1fr))` },
        ...tokens.map((count) => make("span", {}, short(count)))),
      makeTable(["by the plan", "seconds", "share"], [
        ["step", digits(step), "100 %"],
        [make("span", {}, makeSwatch(computing), "computing"), digits(step - waited), `${Math.round(100 - 100 * waited / step)} %`],
        [make("span", {}, makeSwatch(waiting), "waiting for communication"), digits(waited), `${Math.round(100 * waited / step)} %`],
      ]));
  }
  update();
  box.append(make("form", {}, link.element, each.element), result,
    make("p", { class: "note" }, "Columns are plans by tokens per rank, each a whole step. The line is the bound by the formula."));
}

const box = document.querySelector("[data-picture]");
const draw = { accounting: drawAccounting, bound: drawBound, mesh: drawMesh, owner: drawOwner, step: drawStep };
draw[box.dataset.picture](box, JSON.parse(document.getElementById("picture-data").textContent));
