"use strict";
// Draws the pictures of a report. Names of runs are anybody's text: they enter the page
// through textContent and attributes only, never as markup.

const NUM_COLOURS = 7;
const DASHES = ["", "7 4", "2 4", "10 4 2 4", "14 5", "4 2 1 2"];
const MOST_LINES = 6; // shown at first; more are hard to tell apart
const HEIGHT = 260, WIDE_HEIGHT = 340;
const MARGIN = { left: 52, right: 14, top: 10, bottom: 40 };
const MOST_APART = 20; // ends of lines, before an axis of seconds or bytes is logarithmic
const MANY_INDICES = 250; // from here on an axis of indices is logarithmic

const SUPERSCRIPTS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

function html(name, attributes, text, parent) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function digits(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-3) {
    const [mantissa, power] = value.toExponential(1).split("e");
    const raised = [...String(Number(power))].map((c) => SUPERSCRIPTS[c]).join("");
    return (mantissa === "1.0" ? "" : `${mantissa}·`) + `10${raised}`;
  }
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

// A scale maps numbers to pixels. The ticks lie at 1, 2, 5 times powers of ten, or at
// powers of ten.
function linearScale(low, high, from, to, pixels) {
  const span = high - low || 1;
  const scale = (value) => from + ((value - low) / span) * (to - from);
  const count = Math.max(2, Math.abs(to - from) / pixels);
  const power = 10 ** Math.floor(Math.log10(span / count));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => span / s <= count);
  scale.ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++)
    scale.ticks.push(Number((k * step).toPrecision(12)));
  return scale;
}

function logScale(low, high, from, to) {
  const [a, b] = [Math.log10(low), Math.log10(high)];
  const span = b - a || 1;
  const scale = (value) => from + ((Math.log10(value) - a) / span) * (to - from);
  const most = Math.max(2, Math.abs(to - from) / 40);
  const every = Math.max(1, Math.ceil(span / most));
  scale.ticks = [];
  for (let k = Math.ceil(a - 1e-9); k <= b + 1e-9; k += every) scale.ticks.push(10 ** k);
  if (scale.ticks.length < 2) {
    const between = [];
    for (let k = Math.floor(a); k <= b; k++)
      for (const m of [1, 2, 5]) between.push(m * 10 ** k);
    scale.ticks = between.filter((v) => v >= low * 0.999 && v <= high * 1.001);
  }
  return scale;
}

// A picture: axes, lines with bands, and a rule that follows pointer and arrow keys.
class Chart {
  constructor(plot, options) {
    this.plot = plot;
    this.options = options; // label, xName, unit, logX, logY, height
    this.lines = [];
    this.place = null;
    this.tip = html("div", { class: "tip", hidden: "", "aria-live": "polite" });
    new ResizeObserver(() => this.draw()).observe(plot);
  }

  // lines: {name, colour, dash, x, mean, low, high}; domain: numbers to keep in sight.
  show(lines, domain) {
    this.lines = lines;
    this.domain = domain;
    const places = new Set();
    for (const line of lines)
      line.x.forEach((x, i) => isNumber(line.mean[i]) && places.add(x));
    this.places = [...places].sort((a, b) => a - b);
    if (this.place !== null && this.place >= this.places.length) this.place = null;
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    const focused = this.plot.contains(document.activeElement);
    const height = this.options.height;
    this.root = svg("svg", {
      viewBox: `0 0 ${width} ${height}`, height, tabindex: "0", role: "img",
      "aria-label": `${this.options.label}. Left and right arrow keys read values.`,
    });
    this.plot.replaceChildren(this.root, this.tip);
    if (!this.places.length) {
      const middle = { x: width / 2, y: height / 2, "text-anchor": "middle", class: "empty" };
      svg("text", middle, this.root).textContent = "nothing to show";
      this.tip.hidden = true;
      return;
    }
    this.scales(width, height);
    this.axes(width, height);
    for (const line of this.lines) this.band(line);
    for (const line of this.lines) for (const seed of line.seeds ?? []) this.line({ ...line, mean: seed }, "seed");
    for (const line of this.lines) this.line(line);
    this.follow(width, height);
    if (focused) this.root.focus({ preventScroll: true });
    if (this.place !== null) this.read();
  }

  scales(width, height) {
    const { logX, logY } = this.options;
    const values = [...this.domain.values].filter((v) => isNumber(v) && (!logY || v > 0));
    const [x0, x1] = this.domain.x;
    let [low, high] = [Math.min(...values), Math.max(...values)];
    if (logY) [low, high] = [low / 1.3, high * 1.3];
    else {
      const room = (high - low || Math.abs(high) || 1) * 0.06;
      const means = this.lines.flatMap((line) => [line.mean, ...(line.seeds ?? [])].flat()).filter(isNumber);
      // No room where no mean can be: below zero, or beyond 100 %.
      low = Math.min(...means) >= 0 ? Math.max(0, low - room) : low - room;
      high = this.options.unit === "%" && Math.max(...means) <= 100 ? Math.min(100.5, high + room) : high + room;
    }
    const right = width - MARGIN.right, bottom = height - MARGIN.bottom;
    const pad = x0 === x1 ? 0.5 : 0;
    this.x = (logX ? logScale : linearScale)(x0 - pad, x1 + pad, MARGIN.left, right, 70);
    this.y = (logY ? logScale : linearScale)(low, high, bottom, MARGIN.top, 35);
    // What lies outside, such as the end of an interval below zero, ends at the edge.
    const inside = this.y;
    this.y = Object.assign((v) => Math.min(bottom, Math.max(MARGIN.top, inside(v))), { ticks: inside.ticks });
  }

  axes(width, height) {
    const bottom = height - MARGIN.bottom, right = width - MARGIN.right;
    for (const tick of this.y.ticks) {
      const y = this.y(tick);
      svg("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y, y2: y }, this.root);
      const at = { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" };
      svg("text", at, this.root).textContent = digits(tick);
    }
    svg("line", { class: "axis", x1: MARGIN.left, x2: right, y1: bottom, y2: bottom }, this.root);
    for (const tick of this.x.ticks) {
      if (this.options.isCounted && !Number.isInteger(tick)) continue;
      const at = { x: this.x(tick), y: bottom + 17, "text-anchor": "middle" };
      svg("text", at, this.root).textContent = digits(tick);
    }
    const middle = { x: (MARGIN.left + right) / 2, y: height - 6, "text-anchor": "middle" };
    svg("text", middle, this.root).textContent = this.options.xName;
  }

  // Stretches of a line without gaps.
  pieces(line, columns) {
    const found = [];
    let piece = [];
    line.x.forEach((x, i) => {
      const values = columns.map((column) => column[i]);
      const good = values.every((v) => isNumber(v) && (!this.options.logY || v > 0));
      if (good) piece.push([this.x(x), ...values.map((v) => this.y(v))]);
      else if (piece.length) { found.push(piece); piece = []; }
    });
    if (piece.length) found.push(piece);
    return found;
  }

  band(line) {
    if (!line.low) return;
    // An end below a logarithmic axis' reach is drawn at its foot.
    const foot = this.domain.values.reduce((a, v) => (isNumber(v) && v > 0 && v < a ? v : a), Infinity);
    const low = this.options.logY ? line.low.map((v) => (isNumber(v) ? Math.max(v, foot) : v)) : line.low;
    for (const piece of this.pieces(line, [low, line.high])) {
      if (piece.length === 1) {
        const [x, y1, y2] = piece[0];
        svg("line", { class: "whisker", x1: x, x2: x, y1, y2, stroke: line.colour }, this.root);
        continue;
      }
      const up = piece.map(([x, , high]) => `${x.toFixed(1)},${high.toFixed(1)}`);
      const down = piece.map(([x, low]) => `${x.toFixed(1)},${low.toFixed(1)}`).reverse();
      svg("path", { class: "band", d: `M${[...up, ...down].join("L")}Z`, fill: line.colour }, this.root);
    }
  }

  line(line, kind = "line") {
    const pieces = this.pieces(line, [line.mean]);
    const few = pieces.reduce((sum, piece) => sum + piece.length, 0) <= 40;
    for (const piece of pieces) {
      const d = "M" + piece.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L");
      svg("path", { class: kind, d, stroke: line.colour, "stroke-dasharray": line.dash }, this.root);
      if (few || piece.length === 1)
        for (const [x, y] of piece) svg("circle", { cx: x, cy: y, r: kind === "line" ? 2.6 : 1.6, fill: line.colour }, this.root);
    }
  }

  follow(width, height) {
    this.rule = svg("line", { class: "rule", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" }, this.root);
    const nearest = (event) => {
      const x = ((event.clientX - this.root.getBoundingClientRect().left) / this.root.clientWidth) * width;
      const far = (i) => Math.abs(this.x(this.places[i]) - x);
      this.place = this.places.reduce((best, _, i) => (far(i) < far(best) ? i : best), 0);
      this.read();
    };
    this.root.addEventListener("pointermove", nearest);
    this.root.addEventListener("pointerdown", nearest);
    this.root.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.leave());
    this.root.addEventListener("blur", () => this.leave());
    this.root.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const last = this.places.length - 1;
    const now = this.place ?? -1;
    const moves = { ArrowRight: Math.min(last, now + 1), ArrowLeft: now < 0 ? last : Math.max(0, now - 1), Home: 0, End: last };
    if (event.key === "Escape") return this.leave();
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.place = moves[event.key];
    this.read();
  }

  leave() {
    this.place = null;
    this.tip.hidden = true;
    this.rule?.setAttribute("visibility", "hidden");
  }

  // What all lines say at the rule.
  read() {
    const at = this.places[this.place];
    const x = this.x(at);
    for (const [key, value] of Object.entries({ x1: x, x2: x, visibility: "visible" })) this.rule.setAttribute(key, value);
    const { xName, unit } = this.options;
    const rows = [];
    for (const line of this.lines) {
      const i = line.x.indexOf(at);
      if (i >= 0 && isNumber(line.mean[i])) rows.push([line, i]);
    }
    rows.sort(([a, i], [b, j]) => b.mean[j] - a.mean[i]);
    this.tip.replaceChildren(html("div", {}, `${xName} ${digits(at)}`));
    for (const [line, i] of rows) {
      const row = html("div", { class: "row" }, undefined, this.tip);
      html("span", { class: "dot", style: `background:${line.colour}` }, undefined, row);
      const text = html("span", {}, `${line.name}: `, row);
      html("b", {}, `${digits(line.mean[i])}${unit && " " + unit}`, text);
      if (line.seeds) text.append(` (${line.seeds.map((seed) => digits(seed[i])).join(", ")})`);
      if (line.low && isNumber(line.low[i])) text.append(` [${digits(line.low[i])}, ${digits(line.high[i])}]`);
    }
    this.tip.hidden = false;
    const half = this.root.clientWidth / 2;
    this.tip.style.left = x < half ? `${x + 12}px` : "";
    this.tip.style.right = x < half ? "" : `${this.root.clientWidth - x + 12}px`;
  }
}

// The runs of a section, the buttons that choose among them, and their pictures.
class Part {
  constructor(element, data) {
    this.element = element;
    this.data = data;
    this.on = this.first();
    this.charts = [];
    this.controls();
    element.querySelectorAll(".chart[data-metric]").forEach((figure) => this.metric(figure));
    const spectrum = element.querySelector(".spectrum");
    if (spectrum) this.spectrum(spectrum);
    this.show();
  }

  // All lines if they are few, else those of the last setting, and the first arms.
  first() {
    const { settings, arms, groups } = this.data;
    if (groups.length <= MOST_LINES) return { settings: settings.map(() => true), arms: arms.map(() => true) };
    return {
      settings: settings.map((_, i) => i === settings.length - 1),
      arms: arms.map((_, i) => i < MOST_LINES),
    };
  }

  visible() {
    return this.data.groups.filter((g) => this.on.settings[g.setting] && this.on.arms[g.arm]);
  }

  colour(group) {
    return `var(--c${group.arm % NUM_COLOURS})`;
  }

  dash(group) {
    return DASHES[group.setting % DASHES.length];
  }

  controls() {
    const box = this.element.querySelector(".controls");
    const { settings, arms } = this.data;
    if (settings.length > 1) this.chips(box, "setting", "settings", settings, (i) => [`var(--soft)`, DASHES[i % DASHES.length]]);
    if (arms.length > 1) this.chips(box, this.data.known ? "filter" : "run", "arms", arms, (i) => [`var(--c${i % NUM_COLOURS})`, ""]);
    box.hidden = !box.childElementCount;
  }

  chips(box, what, kind, names, style) {
    const row = html("div", { role: "group", "aria-label": what }, undefined, box);
    html("span", { class: "what" }, what, row);
    names.forEach((name, i) => {
      const chip = html("button", { type: "button", class: "chip", "aria-pressed": String(this.on[kind][i]) }, undefined, row);
      const [stroke, dash] = style(i);
      const sample = svg("svg", { width: 26, height: 8, "aria-hidden": "true" }, chip);
      svg("line", { x1: 0, x2: 26, y1: 4, y2: 4, stroke, "stroke-width": 3, "stroke-dasharray": dash }, sample);
      html("span", {}, name || "all", chip);
      chip.addEventListener("click", () => {
        this.on[kind][i] = !this.on[kind][i];
        chip.setAttribute("aria-pressed", String(this.on[kind][i]));
        this.show();
      });
    });
  }

  metric(figure) {
    const metric = this.data.metrics[Number(figure.dataset.metric)];
    const chart = new Chart(figure.querySelector(".plot"), {
      label: metric.title, xName: metric.along || this.data.time, unit: metric.unit, height: HEIGHT,
      isCounted: !metric.along, // epochs and steps, not seconds
    });
    this.charts.push(() => {
      const lines = this.visible().filter((g) => g.lines[metric.column]).map((g) => this.styled(g, g.lines[metric.column]));
      chart.options.logX = isWide(lines) && Boolean(metric.along);
      chart.show(lines, domain(lines));
    });
  }

  styled(group, line) {
    return { ...line, name: group.name, colour: this.colour(group), dash: this.dash(group) };
  }

  spectrum(figure) {
    const tracked = this.data.groups.filter((g) => g.spectra.length);
    const times = [...new Set(tracked.flatMap((g) => g.spectra.map((s) => s.time)))].sort((a, b) => a - b);
    const longest = Math.max(...tracked.flatMap((g) => g.spectra.map((s) => s.x.at(-1) ?? 1)));
    const chart = new Chart(figure.querySelector(".plot"), {
      label: "Spectrum", xName: "index of the direction", unit: "", logY: true,
      logX: longest > MANY_INDICES,
      height: figure.classList.contains("wide") ? WIDE_HEIGHT : HEIGHT,
    });
    const slider = figure.querySelector("input"), output = figure.querySelector("output");
    slider.max = String(times.length - 1);
    slider.value = slider.max; // the end of training, unless somebody moves it
    slider.parentElement.hidden = times.length < 2;
    const show = () => {
      const time = times[Number(slider.value)];
      const words = `${this.data.time} ${digits(time)} of ${digits(times.at(-1))}`;
      output.textContent = words;
      slider.setAttribute("aria-valuetext", words);
      const visible = this.visible();
      const lines = visible.flatMap((g) => g.spectra.filter((s) => s.time === time).map((s) => this.styled(g, s)));
      // The axes do not move with the slider, so that the lines are seen to.
      const all = visible.flatMap((g) => g.spectra.map((s) => this.styled(g, s)));
      chart.show(lines, domain(all, "mean"));
    };
    slider.addEventListener("input", show);
    this.charts.push(show);
  }

  show() {
    for (const draw of this.charts) draw();
  }
}

// Whether lines end at places so far apart that short ones would not be seen.
function isWide(lines) {
  const ends = lines.map((l) => l.x.at(-1));
  return Math.min(...ends) > 0 && Math.max(...ends) > MOST_APART * Math.min(...ends);
}

function domain(lines, only) {
  const values = lines.flatMap((l) => (only ? l[only] : [...l.mean, ...(l.low ?? []), ...(l.high ?? []), ...(l.seeds ?? []).flat()]));
  const x = lines.flatMap((l) => l.x.filter((_, i) => isNumber(l.mean[i])));
  const ends = x.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  return { values, x: ends };
}

function themeButton() {
  const button = document.getElementById("theme");
  const root = document.documentElement;
  const prefers = matchMedia("(prefers-color-scheme: dark)");
  const remembered = () => { try { return localStorage.getItem("dome-theme"); } catch { return null; } };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefers.matches);
  const label = () => {
    button.setAttribute("aria-pressed", String(isDark()));
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark() ? "Dark colours are on" : "Dark colours");
  };
  const stored = remembered();
  if (stored === "light" || stored === "dark") root.dataset.theme = stored;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("dome-theme", root.dataset.theme); } catch { /* a page opened from a file may not store */ }
    label();
  });
  prefers.addEventListener("change", label);
  label();
}

themeButton();
const parts = JSON.parse(document.getElementById("data").textContent);
document.querySelectorAll("[data-part]").forEach((element) => new Part(element, parts[Number(element.dataset.part)]));
