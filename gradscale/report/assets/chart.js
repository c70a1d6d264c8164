// A curve over the steps of one run or two, with the skipped steps as ticks below it.

const LEFT = 58, RIGHT = 14, TOP = 12, PLOT = 150, STRIP = 14, BOTTOM = 24;

function niceStep(span, count, integral) {
  const rough = span / count;
  const base = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * base).find((each) => each >= rough);
  return integral ? Math.max(1, Math.ceil(step)) : step;
}

function ticks(low, high, count, integral) {
  const step = niceStep(high - low || 1, count, integral);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle + 1; else high = middle;
  }
  if (low > 0 && step - points[low - 1][0] <= points[low][0] - step) low--;
  return low;
}

// What a person reads first: where a curve begins, ends, and how far it goes.
function inWords(series, text) {
  const points = series.points;
  let low = points[0], high = points[0];
  for (const point of points) {
    if (point[1] < low[1]) low = point;
    if (point[1] > high[1]) high = point;
  }
  const end = points[points.length - 1];
  return `${series.name ? series.name + ": " : ""}${text(points[0][1])} at step ${whole(points[0][0])}, ` +
    `${text(end[1])} at step ${whole(end[0])}; lowest ${text(low[1])}, highest ${text(high[1])}.`;
}

function chart(spec) {
  const series = spec.series.filter((each) => each.points.length);
  if (!series.length) return element("p", {class: "quiet"}, spec.empty);
  const readout = element("p", {class: "readout quiet", "aria-live": "polite"});
  const summary = series.map((each) => inWords(each, spec.text)).join(" ");
  const box = element("div", {class: "figure", tabindex: "0", role: "group",
    "aria-label": `${spec.label}. ${summary} Use the left and right arrow keys to read it step by step.`});
  const position = (value) => spec.log ? Math.log2(value) : value;
  let low = Infinity, high = -Infinity;
  for (const each of series) {
    for (const point of each.points) {
      const value = position(point[1]);
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (spec.zero) low = Math.min(low, 0);
  if (spec.top !== undefined) high = Math.max(high, spec.top);
  const margin = spec.log ? Math.max(1, (high - low) * 0.08) : (high - low || Math.abs(high) || 1) * 0.08;
  if (!(spec.zero && low === 0)) low -= margin;
  if (spec.top === undefined || high > spec.top) high += margin;
  let width = 0, chosen = null, svg = null;
  const [first, last] = spec.steps;
  const x = (step) => LEFT + (last > first ? (step - first) / (last - first) : 0.5) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (position(value) - low) / (high - low)) * PLOT;

  function path(each) {
    let text = "", before = null;
    for (const [step, value] of each.points) {
      const px = x(step).toFixed(1), py = y(value).toFixed(1);
      if (before === null) text += `M${px} ${py}`;
      else if (spec.stairs) text += `H${px}V${py}`;
      else text += `L${px} ${py}`;
      before = py;
    }
    return text + (each.points.length === 1 ? "h4" : "");
  }

  function draw() {
    width = box.clientWidth;
    const height = TOP + PLOT + STRIP + BOTTOM;
    svg = shape("svg", {viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true"});
    const foot = TOP + PLOT;
    for (const tick of ticks(low, high, 4, spec.log)) {
      const py = TOP + (1 - (tick - low) / (high - low)) * PLOT;
      svg.append(shape("line", {class: "grid", x1: LEFT, x2: width - RIGHT, y1: py, y2: py}),
        shape("text", {x: LEFT - 8, y: py + 4, "text-anchor": "end"}, spec.log ? power(tick) : (spec.tick || spec.text)(Number(tick.toPrecision(12)))));
    }
    const steps = last > first ? ticks(first, last, width < 560 ? 3 : 7, true) : [first];
    for (const tick of steps) {
      const near = x(tick) > width - 40;
      svg.append(shape("text", {x: near ? width - RIGHT : x(tick), y: foot + STRIP + 18,
        "text-anchor": near ? "end" : "middle"}, whole(tick)));
    }
    svg.append(shape("text", {x: 0, y: foot + STRIP + 18}, "step"));
    for (const each of series) {
      const marks = each.skips.map((skip) => `M${x(skip[0]).toFixed(1)} ${foot + 4}v9`).join("");
      if (marks) svg.append(shape("path", {class: "skips " + (series.length > 1 ? each.style : ""), d: marks}));
      svg.append(shape("path", {class: "curve " + each.style, d: path(each)}));
    }
    box.replaceChildren(svg);
    if (chosen !== null) mark(chosen);
  }

  function mark(step) {
    chosen = step;
    svg.querySelectorAll(".cross, .dot").forEach((node) => node.remove());
    const said = [];
    let shown = step;
    series.forEach((each, index) => {
      const point = each.points[nearest(each.points, step)];
      if (index === 0) shown = point[0];
      const near = each.skips.length ? each.skips[nearest(each.skips, step)] : null;
      const skip = near && Math.abs(x(near[0]) - x(step)) < 4
        ? ` \u2014 step ${whole(near[0])} skipped: ${near[2]}${near[3] ? ` (${near[3]})` : ""}` : "";
      said.push((series.length > 1 ? `${each.name}, step ${whole(point[0])}: ` : "") + spec.text(point[1]) + skip);
      svg.append(shape("circle", {class: "dot " + each.style, cx: x(point[0]), cy: y(point[1]), r: 4}));
    });
    svg.prepend(shape("line", {class: "cross", x1: x(shown), x2: x(shown), y1: TOP, y2: TOP + PLOT + STRIP}));
    readout.textContent = (series.length > 1 ? "" : `step ${whole(shown)}: `) + said.join("; ");
  }

  function unmark() {
    chosen = null;
    svg.querySelectorAll(".cross, .dot").forEach((node) => node.remove());
    readout.textContent = "";
  }

  const point = (event) => {
    const at = (event.clientX - box.getBoundingClientRect().left - LEFT) / (width - LEFT - RIGHT);
    mark(first + Math.min(1, Math.max(0, at)) * (last - first));
  };
  box.addEventListener("pointermove", point);
  box.addEventListener("pointerdown", point);
  box.addEventListener("pointerleave", unmark);
  box.addEventListener("blur", unmark);
  box.addEventListener("keydown", (event) => {
    const points = series[0].points;
    const moves = {ArrowLeft: -1, ArrowRight: 1, PageUp: 20, PageDown: -20, Home: -points.length, End: points.length};
    if (!(event.key in moves)) return;
    event.preventDefault();
    const from = chosen === null ? points.length - 1 : nearest(points, chosen) + moves[event.key];
    mark(points[Math.min(points.length - 1, Math.max(0, from))][0]);
  });
  onResize(box, draw);
  return element("div", {}, box, readout);
}
