// The values of every layer by their size, against the range of the format: a row for every layer, a
// column for every binade.

const ZONES = ["lost", "imprecise", "fits", "over"];

function size(exponent) {
  return short(2 ** exponent);
}

// The columns: the whole range of a narrow format and some columns beyond, and what the data has.
function columns(rows, format) {
  let low = Infinity, high = -Infinity;
  for (const row of rows) {
    if (!row.counts.length) continue;
    low = Math.min(low, row.low);
    high = Math.max(high, row.low + row.counts.length - 1);
  }
  if (low > high) [low, high] = [-4, 4];
  if (format.largest - format.smallest <= 48) {
    low = Math.max(Math.min(low, format.smallest - 7), format.smallest - 20);
    high = Math.min(Math.max(high, format.largest + 7), format.largest + 12);
  } else {
    [low, high] = [Math.max(low - 2, high - 60), high + 2];
  }
  return {low, high, count: high - low + 1};
}

function zone(exponent, format) {
  if (exponent < format.smallest) return "lost";
  if (exponent < format.normal) return "imprecise";
  return exponent > format.largest ? "over" : "fits";
}

// The middle of a long name says least: layers differ at the end.
function fitted(name, characters) {
  if (name.length <= characters) return name;
  const head = Math.max(1, Math.floor((characters - 1) * 0.35));
  return name.slice(0, head) + "\u2026" + name.slice(name.length - (characters - 1 - head));
}

function heatmap(part, format, label) {
  const rows = part.rows;
  const range = columns(rows, format);
  // One cell before the columns for zeros, one after them for what is not finite, each two wide.
  const cells = range.count + 6;
  const readout = element("p", {class: "readout quiet", "aria-live": "polite"}, "Point at a cell or use the arrow keys to read it.");
  const box = element("div", {class: "figure", tabindex: "0", role: "group", "aria-label":
    `${label}, ${rows.length} layers. Use the arrow keys to move through layers and magnitudes. The table below has the numbers.`});
  let svg, width, left, top, cell, rowHeight, strip, cursor = null;

  const column = (index) => left + (index === -1 ? 0 : index === range.count ? range.count + 4 : index + 3) * cell;
  const breadth = (index) => (index === -1 || index === range.count ? 2 : 1) * cell;
  const foot = () => top + rows.length * rowHeight;

  // The share of a row in one of its cells; the outermost columns hold what lies beyond them.
  function content(row) {
    const found = new Array(range.count).fill(0);
    row.counts.forEach((count, index) => {
      found[Math.min(range.count - 1, Math.max(0, row.low + index - range.low))] += count;
    });
    const flushed = row.flushed || 0;
    return {zeros: (row.zeros - flushed) / row.numel, flushed: flushed / row.numel,
      bins: found.map((count) => count / row.numel), bad: (row.infs + row.nans) / row.numel};
  }
  const contents = rows.map(content);
  // What is darkest: the fullest cell of all.
  const most = Math.max(1e-9, ...contents.map((each) => Math.max(each.zeros, each.flushed, each.bad, ...each.bins)));

  function tell(row, index) {
    const {name, zeros, flushed, numel, infs, nans} = rows[row];
    const exponent = range.low + index;
    if (index === -1) {
      return `${name}: ${share(zeros / numel)} of the values are exactly 0` +
        (flushed === null ? "." : `; ${whole(flushed)} of these ${whole(zeros)} are 0 only because they are too small for ${format.name}.`);
    }
    if (index === range.count) return `${name}: ${whole(infs)} values are infinite and ${whole(nans)} are NaN, of ${whole(numel)}.`;
    const words = {lost: `lost: below the smallest ${format.name}`, imprecise: "stored with fewer digits", fits: `fits in ${format.name}`, over: `overflow: above the largest ${format.name}`};
    const edge = index === 0 ? " or smaller" : index === range.count - 1 ? " or larger" : "";
    return `${name}: ${share(contents[row].bins[index])} of the values are from ${size(exponent)} to ${size(exponent + 1)} ` +
      `(${power(exponent)}${edge}): ${words[zone(exponent, format)]}.`;
  }

  function line(exponent) {
    return column(exponent - range.low);
  }

  function drawZones() {
    const edges = {lost: [range.low, format.smallest], imprecise: [format.smallest, format.normal],
      fits: [format.normal, format.largest + 1], over: [format.largest + 1, range.high + 1]};
    const words = {lost: "lost", imprecise: "fewer digits", fits: `fits in ${format.name}`, over: "overflow"};
    const end = column(range.count - 1) + cell;
    for (const name of ZONES) {
      const from = Math.max(edges[name][0], range.low), to = Math.min(edges[name][1], range.high + 1);
      if (to <= from) continue;
      const x1 = line(from), x2 = to > range.high ? end : line(to);
      svg.append(shape("rect", {class: name, x: x1, y: top - 14, width: Math.max(0, x2 - x1 - 1), height: 5}));
      const text = x2 - x1 > words[name].length * 6.2 ? words[name] : name === "imprecise" ? "digits" : name === "over" ? "inf" : "";
      svg.append(shape("text", {class: "zone strong", x: (x1 + x2) / 2, y: top - 20, "text-anchor": "middle"}, text));
    }
    svg.append(shape("text", {class: "zone strong", x: column(-1) + cell, y: top - 20, "text-anchor": "middle"}, "0"),
      shape("rect", {class: "zero", x: column(-1), y: top - 14, width: 2 * cell, height: 5}),
      shape("text", {class: "zone strong", x: column(range.count) + cell, y: top - 20, "text-anchor": "middle"}, "\u221e"),
      shape("rect", {class: "over", x: column(range.count), y: top - 14, width: 2 * cell, height: 5}));
  }

  // The limits of the format as lines through all rows, with what they are in words.
  function drawLimits() {
    const wide = width >= 700;
    const limits = [
      [format.smallest, wide ? `smallest: ${size(format.smallest)}` : size(format.smallest)],
      [format.normal, wide ? `all digits from ${size(format.normal)}` : size(format.normal)],
      [format.largest + 1, wide ? `largest: ${String(Number(format.max.toPrecision(6)))}` : String(Number(format.max.toPrecision(6)))],
    ];
    for (const [exponent, text] of limits) {
      if (exponent < range.low || exponent > range.high) continue;
      const px = line(exponent) - 0.5;
      svg.append(shape("line", {class: "limit", x1: px, x2: px, y1: top - 36, y2: foot() + 4}),
        shape("text", {class: "strong", x: px, y: top - 41, "text-anchor": "middle"}, text));
    }
  }

  function drawAxis() {
    const step = cell * 4 > 34 ? 4 : 8;
    for (let exponent = Math.ceil(range.low / step) * step; exponent <= range.high; exponent += step) {
      svg.append(shape("text", {x: line(exponent) + cell / 2, y: foot() + 18, "text-anchor": "middle"}, power(exponent)));
    }
    const [from, to] = [column(0), column(range.count - 1) + cell];
    const words = width >= 700 ? "magnitude of a value: each column is twice the previous one" : "magnitude of a value";
    svg.append(shape("text", {class: "strong", x: from, y: foot() + 38}, "\u2190 smaller"),
      shape("text", {class: "strong", x: (from + to) / 2, y: foot() + 38, "text-anchor": "middle"}, words),
      shape("text", {class: "strong", x: to, y: foot() + 38, "text-anchor": "end"}, "larger \u2192"));
  }

  function draw() {
    width = box.clientWidth;
    const narrow = width < 560;
    left = narrow ? 0 : Math.min(250, Math.max(...rows.map((row) => row.name.length)) * 7.1 + 12);
    cell = (width - left) / cells;
    strip = narrow ? 13 : 16;
    rowHeight = narrow ? 33 : 19;
    top = 62;
    svg = shape("svg", {viewBox: `0 0 ${width} ${foot() + 46}`, height: foot() + 46, "aria-hidden": "true"});
    const line_of = (index) => top + index * rowHeight + (narrow ? 15 : 1);
    contents.forEach((content_, index) => {
      const py = line_of(index);
      const paint = (x, breadth_, part_, style) => {
        if (part_) svg.append(shape("rect", {class: style, "fill-opacity": (0.15 + 0.85 * Math.sqrt(part_ / most)).toFixed(3),
          x: x.toFixed(2), y: py, width: (breadth_ - 0.6).toFixed(2), height: strip}));
      };
      svg.append(shape("rect", {class: "zero", "fill-opacity": 0.07, x: column(0), y: py, width: range.count * cell, height: strip}));
      paint(column(-1), cell, content_.zeros, "zero");
      paint(column(-1) + cell, cell, content_.flushed, "lost");
      content_.bins.forEach((part_, at) => paint(column(at), cell, part_, zone(range.low + at, format)));
      paint(column(range.count), 2 * cell, content_.bad, "over");
    });
    drawZones();
    drawLimits();
    drawAxis();
    rows.forEach((row, index) => {
      const py = line_of(index);
      svg.append(shape("text", {class: "label", x: narrow ? 0 : left - 10, y: narrow ? py - 4 : py + 12,
        "text-anchor": narrow ? "start" : "end"}, shape("title", {}, row.name), fitted(row.name, Math.floor((narrow ? width : left - 10) / 7.1))));
    });
    box.replaceChildren(svg);
    if (cursor) select(...cursor);
  }

  function select(row, index) {
    cursor = [Math.min(rows.length - 1, Math.max(0, row)), Math.min(range.count, Math.max(-1, index))];
    svg.querySelectorAll(".cursor").forEach((node) => node.remove());
    svg.append(shape("rect", {class: "cursor", x: column(cursor[1]), width: breadth(cursor[1]), height: strip,
      y: top + cursor[0] * rowHeight + (width < 560 ? 15 : 1)}));
    readout.textContent = tell(...cursor);
  }

  const point = (event) => {
    const corner = box.getBoundingClientRect();
    const row = Math.floor((event.clientY - corner.top - top) / rowHeight);
    if (row < 0 || row >= rows.length || event.clientX - corner.left < left) return;
    const at = (event.clientX - corner.left - left) / cell;
    select(row, at < 2.5 ? -1 : at >= range.count + 3.5 ? range.count : Math.floor(at - 3));
  };
  box.addEventListener("pointermove", point);
  box.addEventListener("pointerdown", point);
  box.addEventListener("keydown", (event) => {
    const moves = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -999], End: [0, 999]};
    if (!(event.key in moves)) return;
    event.preventDefault();
    const [down, right] = moves[event.key];
    if (cursor) select(cursor[0] + down, cursor[1] + right); else select(0, Math.floor(range.count / 2));
  });
  onResize(box, draw);
  return element("div", {}, box, readout);
}

function heatmapKey(format) {
  const entries = [
    ["lost", `lost: below the smallest ${format.name} (${size(format.smallest)}), becomes 0`],
    ["imprecise", `fewer digits: below ${size(format.normal)}`],
    ["fits", `fits in ${format.name}`],
    ["over", `overflow: above the largest ${format.name} (${String(Number(format.max.toPrecision(6)))}), becomes infinite`],
    ["zero", `0: exactly zero (red: zero only because it is too small for ${format.name})`],
  ];
  return element("ul", {class: "key"}, ...entries.map(([style, words]) => element("li", {},
    element("span", {class: "swatch " + style, "aria-hidden": "true"}), words)));
}
