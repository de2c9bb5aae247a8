// Draws the charts of a report as SVG. Written by hand: a page needs line charts with three axes, a legend and a tooltip,
// which is 200 lines; a plotting library would put 50 kB to 4 MB into every page. Text is only ever set as text.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  // As tools/figures.py has them.
  const DASHES = ["", "6 4", "1.5 3.5", "7 3 1.5 3", "7 2 1.5 2 1.5 2"];
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const hidden = new Set();
  const state = { axis: null, logY: true };
  const LEFT = 52, RIGHT = 14, TOP = 12, BOTTOM = 40, HEIGHT = 290;

  function make(parent, name, attributes = {}, words = null) {
    const svg = ["svg", "g", "path", "line", "text", "circle", "rect"].includes(name);
    const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (words !== null) node.textContent = words;
    parent.append(node);
    return node;
  }

  function show(value) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-4) return value.toExponential(1).replace("e+", "e");
    return String(Number(value.toPrecision(4)));
  }

  // -- scales ------------------------------------------------------------------------------------

  function makeScale(values, log, from, to) {
    const kept = values.filter((v) => v !== null && Number.isFinite(v) && (!log || v > 0));
    if (!kept.length) return null;
    const bend = log ? Math.log10 : (v) => v;
    let low = Infinity, high = -Infinity;
    for (const v of kept) { low = Math.min(low, bend(v)); high = Math.max(high, bend(v)); }
    if (low === high) { const room = log ? 0.5 : Math.abs(low) / 2 || 1; low -= room; high += room; }
    const edge = (high - low) * 0.04;
    if (!log) { high += edge; low -= low >= 0 && low < edge ? low : edge; }
    const place = (v) =>
      v === null || (log && v <= 0) ? NaN : from + ((bend(v) - low) / (high - low)) * (to - from);
    return { place, ticks: log ? logTicks(low, high) : evenTicks(low, high) };
  }

  function evenTicks(low, high) {
    const rough = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(rough));
    const step = unit * [1, 2, 5, 10].find((n) => n * unit >= rough);
    const ticks = [];
    for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
    return ticks;
  }

  function logTicks(low, high) {
    if (high - low < 0.5) return evenTicks(10 ** low, 10 ** high);
    const digits = high - low < 1.6 ? [1, 2, 3, 5] : high - low < 3 ? [1, 3] : [1];
    const ticks = [];
    for (let e = Math.floor(low); e <= Math.ceil(high); e++)
      for (const digit of digits) {
        const value = digit * 10 ** e;
        if (Math.log10(value) >= low - 1e-9 && Math.log10(value) <= high + 1e-9) ticks.push(value);
      }
    return ticks;
  }

  // -- one chart ---------------------------------------------------------------------------------

  const axisOf = (chart) => chart.axes.find((axis) => axis.key === state.axis) || chart.axes[0];

  function line(xs, ys) {
    let path = "", pen = "M";
    xs.forEach((x, i) => {
      if (Number.isNaN(x) || Number.isNaN(ys[i])) { pen = "M"; return; }
      path += `${pen}${x.toFixed(1)} ${ys[i].toFixed(1)}`;
      pen = "L";
    });
    return path;
  }

  function area(xs, low, high) {
    const whole = xs.map((_, i) => i).filter((i) => ![xs[i], low[i], high[i]].some(Number.isNaN));
    if (whole.length < 2) return "";
    const there = whole.map((i) => `${xs[i].toFixed(1)} ${high[i].toFixed(1)}`);
    const back = whole.reverse().map((i) => `${xs[i].toFixed(1)} ${low[i].toFixed(1)}`);
    return `M${[...there, ...back].join("L")}Z`;
  }

  function draw(place, chart) {
    const axis = axisOf(chart), log = chart.log_y && state.logY;
    place.replaceChildren();
    place.dataset.axis = axis.key;
    const header = make(place, "header");
    make(header, "h3", {}, chart.title);
    addSwitches(header, chart, axis);
    const width = Math.max(260, place.clientWidth);
    const svg = make(place, "svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img" });
    svg.setAttribute("aria-label", `${chart.title} against ${axis.label}`);
    const shown = chart.curves.filter((curve) => !hidden.has(curve.name) && curve.x[axis.key]);
    const x = makeScale(shown.flatMap((c) => c.x[axis.key]), axis.log, LEFT, width - RIGHT);
    const y = makeScale(shown.flatMap((c) => [...c.y, ...c.low, ...c.high, ...c.faint]), log, HEIGHT - BOTTOM, TOP);
    if (x && y) {
      drawAxes(svg, x, y, width, axis, chart);
      for (const curve of shown) drawCurve(svg, x, y, curve, axis, chart.dots);
      follow(place, svg, shown, x, y, axis, width);
    } else make(svg, "text", { x: LEFT, y: HEIGHT / 2 }, "nothing to draw here");
    addLegend(place, chart);
    if (chart.about) make(place, "p", {}, chart.about);
  }

  function drawAxes(svg, x, y, width, axis, chart) {
    let last = -Infinity;
    for (const tick of x.ticks) {
      const at = x.place(tick);
      make(svg, "line", { x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM, class: "grid" });
      if (at - last < 34) continue;
      last = at;
      make(svg, "text", { x: at, y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" }, show(tick));
    }
    for (const tick of y.ticks) {
      const at = y.place(tick);
      make(svg, "line", { x1: LEFT, x2: width - RIGHT, y1: at, y2: at, class: "grid" });
      make(svg, "text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, show(tick));
    }
    const middle = (LEFT + width - RIGHT) / 2;
    make(svg, "text", { x: middle, y: HEIGHT - 6, "text-anchor": "middle", class: "x-label" }, axis.label);
    const turned = { transform: `translate(11 ${(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)` };
    make(svg, "text", { ...turned, "text-anchor": "middle" }, chart.y);
  }

  function drawCurve(svg, x, y, curve, axis, dots) {
    const colour = `var(--c${curve.colour})`;
    const xs = curve.x[axis.key].map(x.place), ys = curve.y.map(y.place);
    if (curve.low.length) {
      const band = area(xs, curve.low.map(y.place), curve.high.map(y.place));
      make(svg, "path", { d: band, style: `fill:${colour}`, "fill-opacity": 0.13 });
    }
    if (curve.faint.length) {
      const raw = { d: line(xs, curve.faint.map(y.place)), fill: "none", "stroke-opacity": 0.3 };
      make(svg, "path", { ...raw, style: `stroke:${colour}` });
    }
    const look = { fill: "none", "stroke-width": 2, "stroke-dasharray": DASHES[curve.dash], class: "curve" };
    make(svg, "path", { d: line(xs, ys), style: `stroke:${colour}`, ...look });
    xs.forEach((at, i) => {
      const seen = dots || i === xs.length - 1;
      if (seen && !Number.isNaN(at) && !Number.isNaN(ys[i]))
        make(svg, "circle", { cx: at, cy: ys[i], r: 3.5, style: `fill:${colour}` });
    });
  }

  // -- what a reader can do ----------------------------------------------------------------------

  function addSwitches(header, chart, axis) {
    const group = make(header, "div", { class: "switch" });
    if (chart.axes.length > 1)
      for (const one of chart.axes) {
        const button = make(group, "button", { type: "button", "data-axis": one.key }, one.button);
        button.setAttribute("aria-pressed", one.key === axis.key);
        button.addEventListener("click", () => { location.hash = `axis=${one.key}`; });
      }
    if (chart.log_y) {
      const button = make(group, "button", { type: "button", "data-log": "y" }, "log");
      button.setAttribute("aria-pressed", state.logY);
      button.addEventListener("click", () => { state.logY = !state.logY; drawAll(); });
    }
  }

  function addLegend(place, chart) {
    const legend = make(place, "div", { class: "legend" });
    for (const curve of chart.curves) {
      const button = make(legend, "button", { type: "button", title: "show or hide" });
      button.setAttribute("aria-pressed", !hidden.has(curve.name));
      const sample = make(button, "svg", { viewBox: "0 0 26 8" });
      const look = { x1: 0, x2: 26, y1: 4, y2: 4, "stroke-width": 2.5, "stroke-dasharray": DASHES[curve.dash] };
      make(sample, "line", { ...look, style: `stroke:var(--c${curve.colour})` });
      make(button, "span", {}, curve.name);
      button.addEventListener("click", () => {
        if (!hidden.delete(curve.name)) hidden.add(curve.name);
        drawAll();
      });
    }
  }

  function nearest(xs, at) {
    let best = -1, distance = Infinity;
    xs.forEach((x, i) => { if (Math.abs(x - at) < distance) { distance = Math.abs(x - at); best = i; } });
    return best;
  }

  function follow(place, svg, curves, x, y, axis, width) {
    const guide = make(svg, "line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "guide", visibility: "hidden" });
    const tip = make(place, "div", { class: "tip", hidden: "" });
    const placed = curves.map((curve) => curve.x[axis.key].map(x.place));
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const at = ((event.clientX - box.left) * width) / box.width;
      guide.setAttribute("x1", at); guide.setAttribute("x2", at); guide.setAttribute("visibility", "visible");
      tip.replaceChildren();
      curves.forEach((curve, i) => {
        const point = nearest(placed[i], at);
        if (point < 0 || curve.y[point] === null) return;
        const row = make(tip, "div");
        make(row, "span", { class: "swatch", style: `background:var(--c${curve.colour})` });
        make(row, "span", {}, `${curve.name}: ${show(curve.y[point])} at ${show(curve.x[axis.key][point])}`);
      });
      tip.hidden = !tip.childElementCount;
      tip.style.top = `${svg.offsetTop + TOP + 4}px`;
      tip.style.left = `${Math.max(0, Math.min(at + 12, place.clientWidth - tip.offsetWidth - 4))}px`;
    });
    svg.addEventListener("pointerleave", () => { tip.hidden = true; guide.setAttribute("visibility", "hidden"); });
  }

  // -- all of them -------------------------------------------------------------------------------

  const places = [...document.querySelectorAll(".chart")];
  const drawAll = () => places.forEach((place) => draw(place, charts[Number(place.dataset.chart)]));
  function readAddress() {
    state.axis = new URLSearchParams(location.hash.slice(1)).get("axis");
    drawAll();
  }
  let drawnAt = window.innerWidth;
  window.addEventListener("hashchange", readAddress);
  window.addEventListener("resize", () => {
    if (window.innerWidth !== drawnAt) { drawnAt = window.innerWidth; drawAll(); }
  });
  readAddress();
})();
