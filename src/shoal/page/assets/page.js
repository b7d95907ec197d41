// Draws the snapshots of `shoal watch`. Every text goes through textContent: what a run says is never read as HTML.

const COLOURS = 6;
const PARTS = [
  ["work", "own work"], ["forward_backward", "forward and backward"], ["data", "waiting for data"], ["optimizer", "optimizer"],
  ["sync_exposed", "exposed sync"], ["checkpoint_stall", "checkpoint stall"], ["step", "whole step"],
];
const HOTTEST = { ranks: 0.5, experts: 2 };
const FALLS = [
  ["trained", "training that lasts"], ["data", "waiting for data"], ["stall", "checkpoint stall"], ["skipped", "skipped steps"],
  ["redone", "steps redone"], ["restarting", "restarting"], ["other", "evaluation and other"],
];

// --- numbers as people read them ---

const digits = (value, count = 4) => (Number.isFinite(value) ? String(Number(value.toPrecision(count))) : "not finite");
const loss = (value) => (Number.isFinite(value) ? value.toPrecision(4) : "not finite");
const percent = (share) => (Math.abs(share) >= 0.0995 ? `${(100 * share).toFixed(0)} %` : `${(100 * share).toFixed(1)} %`);
// Ticks that lie close together must not be rounded to the same label; nor must accuracies.
const exactPercent = (share) => (Number.isFinite(share) ? `${Number((100 * share).toPrecision(4))} %` : "not finite");
const tickLabel = (value) => (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-4)
  ? value.toExponential(3).replace(/\.?0*e\+?/, "e") : digits(value));
const whole = (value) => Math.round(value).toLocaleString("en");
const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;

function count(value) {
  for (const [bound, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= bound * 0.9995) return `${Number((value / bound).toPrecision(3))}${letter}`;
  }
  return digits(value, 3);
}

function memory(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let index = 0;
  for (; Math.abs(bytes) >= 999.5 && index < units.length - 1; index += 1) bytes /= 1024;
  return `${digits(bytes, 3)} ${units[index]}`;
}

function wire(bytes) {
  const text = count(bytes);
  return /[a-zA-Z]$/.test(text) ? `${text.slice(0, -1)} ${text.slice(-1)}B` : `${text} B`;
}

function seconds(value) {
  if (value === 0) return "0 s";
  if (value >= 120) return duration(value);
  return value >= 1 ? `${digits(value, 3)} s` : value >= 1e-3 ? `${digits(value * 1e3, 3)} ms` : `${digits(value * 1e6, 3)} µs`;
}

function duration(value) {
  const rounded = Math.round(value);
  if (rounded >= 86400) return `${Math.floor(rounded / 86400)} d ${Math.floor((rounded % 86400) / 3600)} h`;
  if (rounded >= 3600) return `${Math.floor(rounded / 3600)} h ${Math.floor((rounded % 3600) / 60)} min`;
  return rounded >= 60 ? `${Math.floor(rounded / 60)} min ${rounded % 60} s` : seconds(value);
}

// As the reader's clock shows it: the time of today, else with the day.
function moment(text) {
  const at = new Date(text);
  const time = at.toLocaleTimeString("en-GB");
  return at.toDateString() === new Date().toDateString() ? time : `${at.toLocaleDateString("en-GB", { day: "numeric", month: "short" })}, ${time}`;
}

// --- elements ---

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function drawn(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function table(columns, rows, name) {
  const head = element("tr", {}, ...columns.map((column) => element("th", { scope: "col" }, column)));
  const body = rows.map(([first, ...rest]) =>
    element("tr", {}, element("th", { scope: "row" }, first), ...rest.map((cell) => element("td", {}, cell))));
  const whole = element("table", { "aria-label": name }, element("thead", {}, head), element("tbody", {}, ...body));
  return element("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": name }, whole);
}

function section(title, lead, ...children) {
  return element("section", {}, element("h2", {}, title), lead ? element("p", { class: "lead" }, lead) : null, ...children);
}

const key = (run, text) => element("span", {}, swatch(run), text);
const swatch = (run) => element("i", { class: `swatch r${run % COLOURS}`, "aria-hidden": "true" });

// --- charts ---

class Axis {
  constructor(values, { zero = false, log = false, whole = false, binary = false, most = Infinity } = {}) {
    const found = values.filter((value) => Number.isFinite(value) && Math.abs(value) < 1e150).sort((a, b) => a - b);
    const edge = Math.floor(found.length / 50);
    let low = found.length ? found[0] : 0;
    let high = found.length ? found[found.length - 1] : 1;
    this.log = log && low > 0 && found[found.length - 1 - edge] / found[edge] > 12;
    if (zero && !this.log) low = Math.min(0, low);
    if (this.log) { const air = (high / low) ** 0.04; low /= air; high *= air; }
    else if (!whole) {
      const air = 0.06 * (high - low) || 0.06 * Math.abs(high) || 1;
      high = high <= most ? Math.min(most, high + air) : high + air;
      if (!(zero && low === 0)) low -= air;
    } else if (high === low) { low -= 1; high += 1; }
    this.low = low; this.high = high; this.whole = whole; this.binary = binary;
  }

  place(value) {
    const share = this.log
      ? Math.log(Math.max(value, this.low) / this.low) / Math.log(this.high / this.low)
      : (value - this.low) / (this.high - this.low);
    return Math.min(1, Math.max(0, share));
  }

  ticks(wanted = 4) {
    if (this.log) {
      const powers = [];
      const stride = Math.max(1, Math.ceil(Math.log10(this.high / this.low) / 6));
      for (let power = stride * Math.floor(Math.log10(this.low) / stride); power <= Math.ceil(Math.log10(this.high)); power += stride) {
        for (const factor of this.high / this.low > 300 ? [1] : [1, 2, 5]) powers.push(factor * 10 ** power);
      }
      return powers.filter((value) => value >= this.low && value <= this.high);
    }
    const unit = this.binary ? 1024 ** Math.max(0, Math.floor(Math.log2(this.high) / 10)) : 1;
    const rough = (this.high - this.low) / wanted / unit;
    const power = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.7);
    if (this.whole) step = Math.max(1, Math.round(step));
    step *= unit;
    const found = [];
    for (let index = Math.ceil(this.low / step - 1e-9); index * step <= this.high + 1e-9 * step; index += 1) found.push(index * step);
    return found;
  }
}

// One chart. A curve is {run, label, points: [[last step, mean, low, high], ...], dots}; arrow keys move its cursor.
class Chart {
  constructor(parent, title, options = {}) {
    this.title = title; this.options = options; this.at = null; this.steps = [];
    this.unit = element("span", { class: "unit" });
    this.readout = element("output", { class: "readout" });
    this.plot = element("div", { class: "plot", tabindex: "0", role: "img" });
    this.figure = element("figure", { class: `chart${options.large ? " large" : ""}` },
      element("figcaption", {}, element("h3", {}, title), this.unit, this.readout), this.plot);
    parent.append(this.figure);
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerdown", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.move(null));
    this.plot.addEventListener("blur", () => this.move(null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
  }

  update(curves, { unit = "", level = null, marks = [] } = {}) {
    const tells = this.options.nothing ? (point) => point[1] !== null && point[1] !== 0 : (point) => point[1] !== null;
    this.curves = curves.filter((curve) => curve.points.some(tells));
    this.figure.hidden = this.curves.length === 0;
    if (this.figure.hidden) return;
    const heights = this.curves.flatMap((curve) => curve.points.flatMap((point) => (point[1] === null ? [] : [point[2], point[3]])));
    if (level) heights.push(level.value);
    this.y = new Axis(heights, this.options);
    const places = this.curves.flatMap((curve) => curve.points.map((point) => point[0]));
    this.x = new Axis(places.concat(Math.min(...places) < 0.1 * Math.max(...places) ? [0] : []), { whole: true });
    this.steps = [...new Set(places)].sort((a, b) => a - b);
    this.level = level; this.marks = marks;
    this.unit.textContent = [unit, this.y.log ? "log scale" : ""].filter(Boolean).join(", ");
    this.draw();
  }

  draw() {
    const svg = drawn("svg", { viewBox: "0 0 1000 400", preserveAspectRatio: "none", "aria-hidden": "true" });
    const left = (step) => (1000 * this.x.place(step)).toFixed(1);
    const top = (value) => (400 * (1 - this.y.place(value))).toFixed(1);
    svg.append(drawn("path", { class: "rule", d: this.y.ticks().map((tick) => `M0,${top(tick)}h1000`).join("") }));
    const marks = this.marks.filter((step) => step >= this.x.low && step <= this.x.high);
    svg.append(drawn("path", { class: "mark", d: marks.map((step) => `M${left(step)},0v400`).join("") }));
    if (this.level) svg.append(drawn("path", { class: "level", d: `M0,${top(this.level.value)}h1000` }));
    for (const curve of this.curves) {
      const place = `r${curve.run % COLOURS}`;
      const known = curve.points.filter((point) => point[1] !== null);
      const lost = curve.points.filter((point) => point[1] === null);
      svg.append(drawn("path", { class: "lost", d: lost.map((point) => `M${left(point[0])},400v-40`).join("") }));
      if (curve.dots || known.length === 1) {
        const d = known.map((point) => `M${left(point[0])},${top(point[1])}h0`).join("");
        svg.append(drawn("path", { class: `dots ${place}`, d }));
        if (curve.dots) svg.append(drawn("path", { class: "dots ring", d }));
        continue;
      }
      for (const piece of pieces(curve.points)) {
        const upper = piece.map((point) => `${left(point[0])},${top(point[3])}`);
        const lower = piece.map((point) => `${left(point[0])},${top(point[2])}`).reverse();
        svg.append(drawn("path", { class: `band ${place}`, d: `M${upper.join("L")}L${lower.join("L")}z` }));
        svg.append(drawn("path", { class: `line ${place}`, d: `M${piece.map((point) => `${left(point[0])},${top(point[1])}`).join("L")}` }));
      }
    }
    this.cursor = drawn("path", { class: "cursor", d: "" });
    svg.append(this.cursor);
    const form = this.options.form ?? digits;
    const named = this.options.axis ?? this.options.form ?? tickLabel;
    const labels = this.y.ticks().map((tick) => {
      const label = element("span", { class: "y" }, named(tick));
      label.style.bottom = `${100 * this.y.place(tick)}%`;
      return label;
    });
    for (const tick of this.x.ticks(this.options.large ? 6 : 3)) {
      const label = element("span", { class: "x" }, count(tick));
      label.style.left = `${100 * this.x.place(tick)}%`;
      labels.push(label);
    }
    this.plot.replaceChildren(svg, ...labels);
    const said = this.curves.map((curve) => `${curve.label} ${form(curve.points[curve.points.length - 1][1] ?? NaN)}`);
    this.plot.setAttribute("aria-label", `${this.title} by step; newest: ${said.join(", ")}`);
    this.move(this.at);
  }

  // What the vertical lines mean, where there are any.
  legend() {
    const lost = this.curves.some((curve) => curve.points.some((point) => point[1] === null));
    return [...(this.marks.length ? [["mark", "restart"]] : []), ...(lost ? [["lost", "not finite"]] : [])];
  }

  point(event) {
    const box = this.plot.getBoundingClientRect();
    const step = this.x.low + ((event.clientX - box.left) / box.width) * (this.x.high - this.x.low);
    this.move(nearest(this.steps, step));
  }

  key(event) {
    const last = this.steps.length - 1;
    const index = this.at === null ? last : this.steps.indexOf(nearest(this.steps, this.at));
    const moved = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: last, PageUp: index - 20, PageDown: index + 20 }[event.key];
    if (event.key === "Escape") this.move(null);
    if (moved === undefined) return;
    event.preventDefault();
    this.move(this.steps[Math.min(last, Math.max(0, this.at === null ? last : moved))]);
  }

  move(step) {
    this.at = step;
    const form = this.options.form ?? digits;
    if (step === null) {
      this.cursor?.setAttribute("d", "");
      const legend = this.options.large && this.curves.length > 1 ? this.curves : [];
      this.readout.replaceChildren(...legend.map((curve) => key(curve.run, curve.label)));
      for (const [kind, text] of this.options.large ? this.legend() : []) {
        this.readout.append(element("span", {}, element("i", { class: `tick ${kind}`, "aria-hidden": "true" }), text));
      }
      if (this.level) this.readout.append(element("span", {}, `dashed: ${this.level.label} ${digits(this.level.value)}`));
      return;
    }
    this.cursor.setAttribute("d", `M${(1000 * this.x.place(step)).toFixed(1)},0v400`);
    const values = this.curves.flatMap((curve) => {
      const found = curve.points.find((point) => point[0] >= step);
      if (!found || (curve.dots && found[0] !== step)) return [];
      const range = found[1] !== null && found[2] !== found[3] ? ` (${form(found[2])} to ${form(found[3])})` : "";
      const text = `${curve.label} ${found[1] === null ? "not finite" : form(found[1])}${range}`.trim();
      return [this.curves.length > 1 ? key(curve.run, text) : element("span", {}, text)];
    });
    this.readout.replaceChildren(element("span", {}, `step ${whole(step)}`), ...values);
  }
}

function pieces(points) {
  const found = [[]];
  for (const point of points) {
    if (point[1] === null) found.push([]);
    else found[found.length - 1].push(point);
  }
  return found.filter((piece) => piece.length);
}

function nearest(sorted, value) {
  return sorted.reduce((best, one) => (Math.abs(one - value) < Math.abs(best - value) ? one : best), sorted[0]);
}

// --- heat maps ---

// Rows of cells on a canvas; arrow keys and the pointer choose a cell, and the readout says what it holds.
class HeatMap {
  constructor(parent, { hottest, say, name, short = false }) {
    this.hottest = hottest; this.say = say; this.at = null;
    this.readout = element("output", { class: "readout" });
    this.canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": name });
    this.cell = element("span", { class: "cell", hidden: true });
    this.map = element("div", { class: `map${short ? " short" : ""}` }, this.canvas, this.cell);
    parent.append(this.readout, this.map);
    const point = (event) => {
      const box = this.canvas.getBoundingClientRect();
      this.move(Math.floor(((event.clientY - box.top) / box.height) * this.rows.length),
        Math.floor(((event.clientX - box.left) / box.width) * this.steps.length));
    };
    this.canvas.addEventListener("pointermove", point);
    this.canvas.addEventListener("pointerdown", point);
    this.canvas.addEventListener("pointerleave", () => this.move(null));
    this.canvas.addEventListener("blur", () => this.move(null));
    this.canvas.addEventListener("keydown", (event) => {
      const [row, column] = this.at ?? [0, this.steps.length - 1];
      const moved = { ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1],
        Home: [row, 0], End: [row, this.steps.length - 1] }[event.key];
      if (event.key === "Escape") this.move(null);
      if (!moved) return;
      event.preventDefault();
      this.move(...(this.at ? moved : [row, column]));
    });
  }

  update(rows, steps, cells) {
    this.rows = rows; this.steps = steps; this.cells = cells;
    this.canvas.width = steps.length; this.canvas.height = rows.length;
    const context = this.canvas.getContext("2d");
    const [red, green, blue] = rgb(getComputedStyle(document.documentElement).getPropertyValue("--heat"));
    const image = context.createImageData(Math.max(1, steps.length), Math.max(1, rows.length));
    cells.forEach((row, y) => row.forEach((value, x) => {
      const strength = value === null ? 0 : Math.min(1, Math.max(0, value / this.hottest));
      image.data.set([red, green, blue, Math.round(255 * (value === null ? 0 : 0.04 + 0.96 * strength))], 4 * (y * steps.length + x));
    }));
    context.putImageData(image, 0, 0);
    for (const label of [...this.map.querySelectorAll("span:not(.cell)")]) label.remove();
    const stride = Math.ceil(rows.length / 8);
    rows.forEach((row, index) => {
      if (index % stride) return;
      const label = element("span", { class: "y" }, row);
      label.style.top = `${(100 * (index + 0.5)) / rows.length}%`;
      this.map.append(label);
    });
    if (steps.length) this.map.append(element("span", { class: "x first" }, "step 1"),
      element("span", { class: "x last" }, `step ${whole(steps[steps.length - 1])}`));
    this.move(...(this.at ?? [null]));
  }

  move(row, column) {
    const inside = row !== null && this.rows.length && this.steps.length;
    this.cell.hidden = !inside;
    if (!inside) { this.at = null; this.readout.textContent = ""; return; }
    row = Math.min(this.rows.length - 1, Math.max(0, row));
    column = Math.min(this.steps.length - 1, Math.max(0, column));
    this.at = [row, column];
    Object.assign(this.cell.style, { top: `${(100 * row) / this.rows.length}%`, left: `${(100 * column) / this.steps.length}%`,
      height: `${100 / this.rows.length}%`, width: `${100 / this.steps.length}%` });
    const first = column ? this.steps[column - 1] + 1 : 1;
    const last = this.steps[column];
    const when = first < last ? `steps ${whole(first)} to ${whole(last)}` : `step ${whole(last)}`;
    const value = this.cells[row][column];
    this.readout.textContent = `${this.rows[row]}, ${when}: ${value === null ? "nothing recorded" : this.say(value)}`;
  }
}

function rgb(colour) {
  const hex = colour.trim().replace("#", "");
  return [0, 2, 4].map((start) => parseInt(hex.slice(start, start + 2), 16));
}

// --- the page ---

const CURVES = [
  ["Loss", ["loss/train", "loss/eval"], { large: true, log: true, form: loss, axis: tickLabel }],
  ["Throughput", ["throughput/tokens_per_second", "throughput/samples_per_second"], { zero: true, form: count, one: true }],
  ["Held-out accuracy", ["accuracy/eval"], { form: exactPercent, most: 1 }],
  ["Step", ["time/step"], { zero: true, form: seconds }],
  ["Peak memory of the lead rank", ["memory/peak_bytes"], { zero: true, binary: true, form: memory }],
  ["Gradient norm", ["grad/norm"], { log: true }],
  ["Learning rate", ["lr"], { zero: true }],
  ["Sent by the lead rank in a step", ["wire/bytes_sent"], { zero: true, form: wire, nothing: true }],
  ["Sent to other hosts in a step", ["wire/between_bytes"], { zero: true, form: wire, nothing: true }],
  ["Speed-up against one rank", ["scaling/speed_up"], { zero: true }],
  ["Busiest expert over mean", ["moe/load_max_over_mean"], {}],
  ["Choices without room", ["moe/dropped_share"], { zero: true, form: percent, axis: exactPercent }],
  ["Codec error", ["codec/error"], { zero: true, form: percent, axis: exactPercent }],
  ["Gradient noise scale", ["noise/scale"], { log: true, form: count }],
  ["Weights that masks keep", ["sparsity/density"], { zero: true, form: exactPercent, most: 1 }],
  ["Parameters that were frozen", ["freeze/share"], { zero: true, form: exactPercent, most: 1 }],
  ["Moved to the device in a step", ["memory/to_device_bytes"], { zero: true, form: wire, nothing: true }],
  ["Moved to the host in a step", ["memory/to_host_bytes"], { zero: true, form: wire, nothing: true }],
  ["Stood still for these moves", ["memory/exposed_s"], { zero: true, form: seconds, nothing: true }],
];
const at = (id) => document.getElementById(id);
const page = { charts: new Map(), chosen: 0, detail: null, part: "work", snapshot: null };

function figures(run) {
  const last = run.last;
  const pace = ["tokens", "samples"].find((name) => Number.isFinite(last[`throughput/${name}_per_second`]));
  const goodput = run.waterfall && run.waterfall.whole_s > 0 ? run.waterfall.trained_s / run.waterfall.whole_s : null;
  const found = [
    ["training loss", "loss/train" in last ? loss(last["loss/train"] ?? NaN) : null, run.loss_unit],
    ["held-out loss", "loss/eval" in last ? loss(last["loss/eval"] ?? NaN) : null, run.baseline ? `${run.baseline[0]} ${loss(run.baseline[1])}` : ""],
    ["accuracy", "accuracy/eval" in last ? exactPercent(last["accuracy/eval"] ?? NaN) : null, "held out"],
    [`${pace}/s`, pace ? count(last[`throughput/${pace}_per_second`]) : null, "newest step"],
    ["step", Number.isFinite(last["time/step"]) ? seconds(last["time/step"]) : null, "newest"],
    ["goodput", goodput === null ? null : percent(goodput), "of the time since the first step, in steps that last"],
    ["peak memory", run.peak_bytes ? memory(run.peak_bytes) : null, run.peak_rank === null ? "" : `rank ${run.peak_rank}`],
    ["ranks", run.ranks ? whole(run.ranks) : null, run.attempts > 1 ? `started ${run.attempts} times` : ""],
    ["speed-up", Number.isFinite(last["scaling/speed_up"]) ? `${digits(last["scaling/speed_up"], 3)} ×` : null, `efficiency ${percent(last["scaling/efficiency"] ?? NaN)}`],
  ];
  const cells = found.filter((figure) => figure[1] !== null).map(([name, value, note]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value, element("small", {}, note))));
  return element("dl", { class: "figures" }, ...cells);
}

function card(run, index, several) {
  const of = run.total_steps ? ` of ${whole(run.total_steps)}` : "";
  const left = run.left_s ? `, ${duration(run.left_s)} left` : "";
  const bar = run.total_steps ? element("progress", { max: run.total_steps, value: Math.min(run.step, run.total_steps), "aria-label": "steps done" }) : null;
  const choose = several ? element("button", { "aria-label": `show ${run.name} in detail`, "aria-pressed": String(index === page.chosen), "data-run": index }) : null;
  choose?.addEventListener("click", () => { page.chosen = index; show(page.snapshot); });
  return element("article", { class: `run${several && index === page.chosen ? " chosen" : ""}`, "aria-label": run.name },
    element("div", { class: "head" }, several ? swatch(index) : null, several ? element("h2", {}, run.name) : null, element("span", { class: `state ${run.state}` }, run.state)),
    element("p", { class: "position" }, `step ${whole(run.step)}${of}${left}`), bar, figures(run), choose);
}

function showRuns(runs) {
  const focused = document.activeElement?.dataset?.run;
  at("runs").replaceChildren(...runs.map((run, index) => card(run, index, runs.length > 1)));
  if (focused !== undefined) document.querySelector(`[data-run="${focused}"]`)?.focus();
  at("title").textContent = runs.length === 1 ? runs[0].name : plural(runs.length, "run");
  document.title = `${runs.map((run) => run.name).join(", ")} · Shoal`;
}

function showNotices(runs) {
  const lines = runs.flatMap((run) => run.notices.map((notice) => {
    const who = runs.length > 1 ? `${run.name}: ` : "";
    return element("p", { class: `notice ${notice.level}` }, element("b", { class: notice.level }, notice.level),
      element("span", {}, who + notice.text), notice.at ? element("time", { datetime: notice.at }, moment(notice.at)) : null);
  }));
  at("notices").hidden = lines.length === 0;
  at("notices").replaceChildren(element("h2", {}, "Failures and warnings"), ...lines);
}

function showCurves(runs) {
  if (!page.charts.size) {
    const grid = element("div", { class: "grid" });
    at("curves").append(grid);
    for (const [title, names, options] of CURVES) page.charts.set(title, [new Chart(grid, title, options), names, options]);
  }
  for (const [chart, names, options] of page.charts.values()) {
    const shown = options.one ? names.filter((name) => runs.some((run) => name in run.curves)).slice(0, 1) : names;
    const curves = runs.flatMap((run, index) => shown.filter((name) => name in run.curves).map((name) => {
      const kind = name === "loss/eval" ? "held out" : name === "loss/train" && "loss/eval" in run.curves ? "training" : "";
      const dots = name === "loss/eval";
      return { run: runs.length > 1 ? index : Number(dots), label: [runs.length > 1 ? run.name : "", kind].filter(Boolean).join(" "), points: run.curves[name], dots };
    }));
    const isLoss = names[0] === "loss/train";
    const one = runs.length === 1 ? runs[0] : null;
    const level = isLoss && one?.baseline ? { label: one.baseline[0], value: one.baseline[1] } : null;
    const unit = isLoss ? [...new Set(runs.map((run) => run.loss_unit))].filter(Boolean).join(", ") : options.one ? (shown[0] ?? "").replace("throughput/", "").replace("_per_second", "/s") : "";
    const widths = runs.flatMap((run) => shown.map((name) => run.curve_width[name] ?? 1));
    const mean = isLoss && Math.max(1, ...widths) > 1 ? `mean and range of ${whole(Math.max(...widths))} steps` : "";
    chart.update(curves, { unit: [unit, mean].filter(Boolean).join(", "), level, marks: one ? one.restarts : [] });
  }
  at("curves").hidden = ![...page.charts.values()].some(([chart]) => !chart.figure.hidden);
}

// The parts that belong to one run are made once for it, and then updated: a focus or a chosen cell stays.
class Detail {
  constructor(run) {
    this.name = run.name;
    this.root = at("detail");
    this.root.replaceChildren();
    this.rankLead = element("p", { class: "lead" });
    this.rankBody = element("div");
    this.rankSection = element("section", { id: "ranks" }, element("h2", {}, "Ranks over time"), this.rankLead, this.choices(), this.rankBody);
    this.rankBody.append(element("p", { class: "scale" }, "as the median rank", element("i", { "aria-hidden": "true" }), "half a median step or more above it"));
    this.ranks = new HeatMap(this.rankBody, { hottest: HOTTEST.ranks, name: "Ranks over time",
      say: (value) => `${percent(Math.abs(value))} of a median step ${value < 0 ? "less" : "more"} than the median rank` });
    this.slow = element("div");
    this.rankSection.append(this.slow);
    this.falls = element("section", { id: "goodput" });
    this.wire = element("section", { id: "communication" });
    this.experts = element("section", { id: "experts" });
    this.expertMaps = new Map();
    this.root.append(this.rankSection, this.falls, this.wire, this.experts);
  }

  choices() {
    const made = PARTS.flatMap(([part, label]) => {
      const input = element("input", { type: "radio", name: "part", id: `part-${part}`, value: part, checked: part === page.part });
      input.addEventListener("change", () => { page.part = part; show(page.snapshot); });
      return [input, element("label", { for: `part-${part}` }, label)];
    });
    return element("fieldset", { class: "choices" }, element("legend", {}, "part of the step"), ...made);
  }

  update(run) {
    this.updateRanks(run);
    this.updateFalls(run);
    this.updateWire(run);
    this.updateExperts(run);
  }

  updateRanks(run) {
    this.rankSection.hidden = !run.heat || !run.heat.last_steps.length;
    if (this.rankSection.hidden) return;
    const grouped = run.heat.rows.length < run.ranks ? " Neighbouring ranks share a row, which shows the one that takes longest." : "";
    const slowest = run.slow[0];
    this.rankLead.textContent = (slowest
      ? `Rank ${slowest.rank} is the slowest now: ${percent(slowest.excess)} more work of its own than the median rank, most of it in ${label(slowest.part)}.`
      : "The ranks are even now: none has over 5 % more work of its own than the median rank.") + grouped;
    this.ranks.update(run.heat.rows, run.heat.last_steps, run.heat.excess[page.part]);
    this.slow.replaceChildren(...(run.slow.length ? [table(["slow rank", "more work", "most of it in", "since about step"],
      run.slow.map((one) => [String(one.rank), percent(one.excess), label(one.part), whole(one.since_step)]), "Slow ranks")] : []));
  }

  updateFalls(run) {
    const fall = run.waterfall;
    this.falls.hidden = !fall || !(fall.whole_s > 0);
    if (this.falls.hidden) return;
    let before = 0;
    const rows = FALLS.filter(([part]) => fall[`${part}_s`] >= 1e-4 * fall.whole_s).map(([part, name]) => {
      const value = fall[`${part}_s`];
      const bar = element("i", { class: part });
      bar.style.left = `${(100 * before) / fall.whole_s}%`;
      bar.style.width = `${(100 * value) / fall.whole_s}%`;
      before += value;
      return element("div", { class: "fall", "data-part": part }, element("span", {}, name), element("span", { class: "track", "aria-hidden": "true" }, bar),
        element("span", {}, element("b", {}, percent(value / fall.whole_s)), duration(value)));
    });
    const lead = `${percent(fall.trained_s / fall.whole_s)} of ${duration(fall.whole_s)} since the first step went into steps that last.`;
    this.falls.replaceChildren(element("h2", {}, "Goodput"), element("p", { class: "lead" }, lead), element("div", { class: "falls" }, ...rows));
  }

  updateWire(run) {
    const used = run.collectives.filter((one) => one.sent_bytes > 0 || one.exposed_s > 0);
    this.wire.hidden = !used.length;
    const levels = run.links.filter((one) => one.sent_bytes > 0).map((one) =>
      [one.level === "inside" ? "inside a host" : "between hosts", wire(one.sent_bytes), `${wire(one.bytes_s)}/s`]);
    this.wire.replaceChildren(element("h2", {}, "Communication"),
      element("p", { class: "lead" }, "The lead rank, mean of a step. Exposed: the rank stood still for it. Hidden: it computed meanwhile."),
      table(["collective", "sent", "exposed", "hidden"], used.map((one) =>
        [one.name.replaceAll("_", "-"), wire(one.sent_bytes), seconds(one.exposed_s), seconds(one.hidden_s)]), "Collectives"),
      ...(levels.length ? [table(["link", "sent", "mean rate"], levels, "Links")] : []));
  }

  updateExperts(run) {
    this.experts.hidden = !run.experts.length;
    if (this.experts.hidden) return;
    if (!this.expertMaps.size) {
      this.grid = element("div", { class: "grid" });
      this.experts.append(element("h2", {}, "Experts"),
        element("p", { class: "lead" }, "A row for each expert. The darker, the more tokens chose it; the darkest is twice the mean load."), this.grid);
    }
    for (const mixture of run.experts) {
      if (!this.expertMaps.has(mixture.name)) {
        const figure = element("figure", { class: "chart" }, element("figcaption", {}, element("h3", {}, mixture.name)));
        this.grid.append(figure);
        this.expertMaps.set(mixture.name, new HeatMap(figure, { hottest: HOTTEST.experts, short: true, name: `Load of the experts of ${mixture.name}`,
          say: (value) => `${digits(value, 3)} times the mean load` }));
      }
      this.expertMaps.get(mixture.name).update(mixture.loads.map((_, expert) => `expert ${expert}`), mixture.last_steps, mixture.loads);
    }
  }
}

const label = (part) => PARTS.find(([key]) => key === part)?.[1] ?? part;

function showKeys({ runs, differing }) {
  const keys = Object.entries(differing);
  at("keys").hidden = runs.length < 2;
  const heads = runs.map((run, index) => element("span", {}, swatch(index), run.name));
  const body = keys.length
    ? table(["key", ...heads], keys.map(([key, values]) => [element("code", {}, key), ...values.map((value) => (value === null ? "–" : JSON.stringify(value)))]), "Differing keys")
    : element("p", { class: "lead" }, "The run files are the same but for their names.");
  at("keys").replaceChildren(element("h2", {}, "Differing keys"), body);
}

function show(snapshot) {
  if (!snapshot || !snapshot.runs.length) return;
  page.snapshot = snapshot;
  const { runs } = snapshot;
  const unread = runs.reduce((sum, run) => sum + run.unread_bytes, 0);
  at("reading").hidden = !unread;
  at("reading").textContent = `Reading the events: ${wire(unread)} are left.`;
  showRuns(runs);
  showNotices(runs);
  showCurves(runs);
  const run = runs[Math.min(page.chosen, runs.length - 1)];
  if (page.detail?.name !== run.name) page.detail = new Detail(run);
  page.detail.update(run);
  showKeys(snapshot);
  document.body.dataset.version = snapshot.version;
}

function say(state, text) {
  at("link").className = `state ${state}`;
  at("link").textContent = text;
}

async function refresh() {
  const answer = await fetch("snapshot");
  if (!answer.ok) throw new Error(`${answer.status}`);
  show(await answer.json());
}

let busy = false;
let wanted = false;
async function newest() {
  wanted = true;
  if (busy) return;
  busy = true;
  while (wanted) {
    wanted = false;
    try { await refresh(); say("live", "connected"); } catch { say("lost", "not connected"); }
  }
  busy = false;
}

at("old").hidden = true;
const stream = new EventSource("events");
stream.addEventListener("message", newest);
stream.addEventListener("error", () => say("lost", "not connected"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(page.snapshot));
