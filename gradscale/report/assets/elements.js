"use strict";
// Elements, and numbers for people. Text from the log is only ever set as textContent.

const SVG = "http://www.w3.org/2000/svg";
const SUPERSCRIPTS = {"-": "\u207b", 0: "\u2070", 1: "\u00b9", 2: "\u00b2", 3: "\u00b3", 4: "\u2074", 5: "\u2075", 6: "\u2076", 7: "\u2077", 8: "\u2078", 9: "\u2079"};

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  for (const child of children) {
    if (child !== null && child !== undefined && child !== "") node.append(child);
  }
  return node;
}

function element(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function shape(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function power(exponent) {
  return "2" + String(exponent).replace(/[-0-9]/g, (sign) => SUPERSCRIPTS[sign]);
}

// The texts of Python write powers as 2**16.
function pretty(text) {
  return String(text).replace(/^2\*\*(-?\d+)$/, (_, exponent) => power(exponent));
}

function whole(number) {
  return number.toLocaleString("en-US");
}

function short(number) {
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size >= 1e6 || size < 1e-3) return number.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
  return String(Number(number.toPrecision(4)));
}

// Only nothing at all is 0 %, and only everything 100 %.
function share(part) {
  if (part > 0 && part < 0.001) return "<0.1 %";
  if (part > 0.999 && part < 1) return ">99.9 %";
  return (part * 100).toFixed(part === 0 || part === 1 ? 0 : 1) + " %";
}

// A heading that begins with # is one of numbers. On a narrow screen the cells of a row with `stack`
// stand below each other.
function table(headings, rows, label, stack) {
  const cell = (value, index) => {
    const heading = headings[index].replace("#", "");
    const style = headings[index] === heading ? null : "number";
    return index === 0 ? element("th", {scope: "row", class: style, "data-heading": heading}, value)
      : element("td", {class: style, "data-heading": heading}, value);
  };
  return element("div", {class: stack ? "scroll stack" : "scroll", tabindex: "0", role: "region", "aria-label": label},
    element("table", {},
      element("thead", {}, element("tr", {}, ...headings.map((heading) => element(
        "th", {scope: "col", class: heading.startsWith("#") ? "number" : null}, heading.replace("#", ""))))),
      element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell))))));
}

function onResize(box, draw) {
  let width = 0;
  const look = () => {
    if (box.clientWidth !== width) {
      width = box.clientWidth;
      draw();
    }
  };
  new ResizeObserver(() => requestAnimationFrame(look)).observe(box);
  look();
}
