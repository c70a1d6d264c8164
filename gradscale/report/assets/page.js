// The page: findings first, then what shows them.

function findingCard(found) {
  const seen = [found.step === null ? "" : `first at step ${whole(found.step)}`, found.rank === null ? "" : `rank ${found.rank}`];
  return element("article", {class: "finding"},
    element("h3", {}, found.title, found.where ? ": " : "", found.where ? element("span", {class: "name"}, found.where) : ""),
    element("p", {}, found.evidence),
    element("p", {}, element("span", {class: "todo"}, "What to do: "), found.remedy),
    element("p", {class: "quiet small"}, [found.kind, ...seen].filter(Boolean).join(", ")));
}

function findings(data) {
  const section = element("section", {"aria-labelledby": "findings"}, element("h2", {id: "findings"}, "Findings"));
  const groups = data.findings.filter((group) => group.findings.length);
  if (!groups.length) {
    section.append(element("article", {class: "finding calm"}, element("h3", {}, "No findings"),
      element("p", {}, "gradscale found no problem in these steps.")));
  }
  for (const group of groups) {
    if (group.title) section.append(element("h3", {}, group.title));
    section.append(...group.findings.map(findingCard));
  }
  return section;
}

function facts(data) {
  return element("div", {class: "facts"}, ...data.facts.map(([name, value, remark]) => element("dl", {class: "fact"},
    element("dt", {}, name), element("dd", {}, pretty(value)), remark && value !== "-"
      ? element("dd", {}, remark.replace(/2\*\*(-?\d+)/, (_, n) => power(n))) : value === "-" ? element("dd", {}, "not measured") : "")));
}

function comparison(data) {
  const [head, ...rows] = data.rows;
  return table(head.map((name, index) => (index ? "#" : "") + name), rows.map((row) => row.map(pretty)), "The two runs in numbers");
}

function chartSection(data, id, title, text, spec) {
  const series = data.runs.map((run, index) => ({
    name: data.runs.length > 1 ? run.name : "", style: index ? "second" : "first", points: run.curves[spec.curve], skips: run.skips}));
  const steps = [Math.min(...data.runs.map((run) => run.first)), Math.max(...data.runs.map((run) => run.last))];
  return element("section", {"aria-labelledby": id}, element("h2", {id}, title), element("p", {class: "quiet small"}, text),
    chart({...spec, series, steps, label: title}));
}

function key(data) {
  const entries = data.runs.length > 1
    ? data.runs.map((run, index) => [index ? "second" : "first", run.name + " (ticks below the curves: skipped steps)"])
    : data.runs[0].skipped ? [["bad", "ticks below the curves: skipped steps"]] : [];
  return entries.length ? element("ul", {class: "key"}, ...entries.map(([style, words]) => element("li", {},
    element("span", {class: "swatch " + style, "aria-hidden": "true"}), words))) : "";
}

function skips(data) {
  const section = element("section", {"aria-labelledby": "skips"}, element("h2", {id: "skips"}, "Skipped steps"));
  for (const run of data.runs) {
    if (data.runs.length > 1) section.append(element("h3", {class: "name"}, run.name));
    if (!run.skips.length) {
      section.append(element("p", {class: "quiet"}, "No step was skipped."));
      continue;
    }
    if (run.skips.length < run.skipped) {
      section.append(element("p", {class: "quiet small"},
        `The first ${whole(run.skips.length / 2)} and the last ${whole(run.skips.length / 2)} of ${whole(run.skipped)} skipped steps.`));
    }
    section.append(table(["#step", "#scale", "why", "which gradients were not finite"],
      run.skips.slice(-300).reverse().map(([step, scale, why, who]) => [whole(step), pretty(scale), why, element("span", {class: "name"}, who || "not recorded")]),
      "Skipped steps, latest first", true));
    if (run.skips.length > 300) section.append(element("p", {class: "quiet small"}, "The table shows the last 300."));
  }
  return section;
}

function buttons(label, names, pick) {
  const all = names.map(([value, text]) => {
    const button = element("button", {type: "button", "aria-pressed": "false"}, text);
    button.addEventListener("click", () => choose(value));
    return [value, button];
  });
  function choose(value) {
    for (const [each, button] of all) button.setAttribute("aria-pressed", String(each === value));
    pick(value);
  }
  return [element("div", {class: "controls", role: "group", "aria-label": label}, ...all.map(([, button]) => button)), choose];
}

function layerTable(part) {
  const bad = part.rows.filter((row) => row.lost || row.imprecise || row.overflowed || row.nan);
  if (!bad.length) return element("p", {class: "quiet"}, "All values of all layers fit.");
  const rows = bad.sort((a, b) => b.lost - a.lost || b.imprecise - a.imprecise).map((row) => {
    const bar = element("div", {class: "bar", "aria-hidden": "true"}, element("span", {class: "lost"}), element("span", {class: "imprecise"}));
    bar.children[0].style.width = `${row.lost * 100}%`;
    bar.children[1].style.width = `${row.imprecise * 100}%`;
    return [element("span", {class: "name"}, row.name), bar, share(row.lost), share(row.imprecise), share(row.overflowed + row.nan)];
  });
  return table(["layer", "lost and imprecise", "#lost", "#fewer digits", "#not finite"], rows, "Underflow by layer, worst first", true);
}

function layers(data) {
  const section = element("section", {"aria-labelledby": "layers"}, element("h2", {id: "layers"}, "Do the values fit?"));
  const runs = data.runs.filter((run) => run.samples.length);
  if (!runs.length) {
    section.append(element("p", {class: "quiet"}, "This log has no samples of tensors. gradscale.torch.Inspector(model, scaler) records them."));
    return section;
  }
  const picture = element("div", {}), below = element("div", {}), where = element("span", {class: "small", "aria-live": "polite"});
  const slider = element("input", {type: "range", min: "0", "aria-label": "Which sampled step"});
  const previous = element("button", {type: "button", "aria-label": "Earlier sample"}, "\u2190 earlier");
  const next = element("button", {type: "button", "aria-label": "Later sample"}, "later \u2192");
  let run = runs[0], kind = null;

  function show() {
    const sample = run.samples[Number(slider.value)];
    const part = sample.kinds[kind];
    slider.setAttribute("aria-valuetext", `step ${sample.step}`);
    where.textContent = `step ${whole(sample.step)} (sample ${Number(slider.value) + 1} of ${run.samples.length})`;
    previous.disabled = slider.value === "0";
    next.disabled = slider.value === slider.max;
    if (!part) {
      picture.replaceChildren(element("p", {class: "quiet"}, `Step ${whole(sample.step)} has no sample of ${data.kinds[kind]}.`));
      below.replaceChildren();
      return;
    }
    const scales = new Set(part.rows.map((row) => row.scale));
    const scaled = scales.size === 1 && !scales.has("1") ? ` Values are those of the backward pass, multiplied by the scale, ${pretty([...scales][0])}.` : "";
    const some = part.rows.length < part.all ? ` The figure shows ${part.rows.length} of ${part.all} layers: those with the largest share of lost or overflowing values.` : "";
    const broke = sample.first ? element("p", {}, "The first values that were not finite at this step: ", element("span", {class: "name"}, sample.first[0]), `, in the ${sample.first[1]} pass.`) : "";
    picture.replaceChildren(
      element("p", {class: "quiet small"}, `Each row is a layer, and each column is a range of magnitudes, from small (left) to large (right). A stronger colour means more values. ` +
        `Blue values fit the format.${scaled}${some}`),
      heatmapKey(part.format), broke, heatmap(part, part.format, `${data.kinds[kind]} at step ${sample.step}`));
    below.replaceChildren(element("h3", {}, "Underflow by layer"), element("p", {class: "quiet small"},
      `${data.kinds[kind]} at step ${whole(sample.step)}, as shares of the values that would be nonzero without underflow; worst layer first.`), layerTable(part));
  }

  const step = (by) => {
    slider.value = String(Number(slider.value) + by);
    show();
  };
  slider.addEventListener("input", show);
  previous.addEventListener("click", () => step(-1));
  next.addEventListener("click", () => step(1));
  const kindBox = element("div", {});

  function pickRun(picked) {
    run = picked;
    slider.max = String(run.samples.length - 1);
    slider.value = slider.max;
    const there = Object.keys(data.kinds).filter((name) => run.samples.some((sample) => name in sample.kinds));
    if (!there.length) {
      kindBox.replaceChildren();
      picture.replaceChildren(element("p", {class: "quiet"}, "The samples of this log contain no tensors."));
      below.replaceChildren();
      return;
    }
    const [box, choose] = buttons("Which tensors", there.map((name) => [name, data.kinds[name]]), (name) => {
      kind = name;
      show();
    });
    kindBox.replaceChildren(box);
    choose(there.includes(kind) ? kind : there[0]);
  }
  if (runs.length > 1) {
    const [box, choose] = buttons("Which run", runs.map((each) => [each, each.name]), pickRun);
    section.append(box);
    choose(run);
  } else {
    pickRun(run);
  }
  if (run.samples.length > 1 || runs.length > 1) section.append(kindBox, element("div", {class: "controls"}, previous, slider, next, where));
  else section.append(kindBox, element("p", {}, where));
  section.append(picture, below);
  const all = runs.filter((each) => each.all_samples > each.samples.length);
  for (const each of all) section.append(element("p", {class: "quiet small"}, `${each.samples.length} of ${each.all_samples} samples are in this page.`));
  return section;
}

function folded(title, content) {
  return element("details", {}, element("summary", {}, element("strong", {}, title)), content);
}

function events(run, title) {
  const rows = [...run.events].reverse().map(([step, name, scale, loss]) => [whole(step), name, pretty(scale), loss]);
  const some = run.all_events > run.events.length ? element("p", {class: "quiet small"}, `The last ${whole(run.events.length)} of ${whole(run.all_events)}.`) : "";
  return folded(`Events${title} (${whole(run.all_events)})`, rows.length
    ? element("div", {}, some, table(["#step", "event", "#scale", "loss"], rows, "Events, latest first"))
    : element("p", {class: "quiet"}, "No events except skipped steps."));
}

function build(data) {
  const page = document.getElementById("page");
  const lines = data.runs.map((run) => {
    const points = Math.max(...Object.values(run.curves).map((curve) => curve.length));
    return points < run.lines ? `${run.name}: ${whole(run.lines)} steps are logged. A curve on this page has at most ${whole(points)} points: the lowest and the highest of each group of neighbours.` : "";
  }).filter(Boolean);
  page.append(
    element("header", {}, element("h1", {}, data.title), data.rows.length ? comparison(data) : facts(data)),
    findings(data),
    chartSection(data, "scale", "Scale", "The factor by which the loss is multiplied before the backward pass. It falls when gradients overflow and grows while they do not.", {
      curve: "scale", log: true, stairs: true, text: (value) => Number.isInteger(Math.log2(value)) ? `${power(Math.log2(value))} = ${short(value)}` : short(value),
      empty: "No scale was recorded."}),
    key(data),
    chartSection(data, "headroom", "Headroom", "How many times the largest gradient can double before it overflows. At 0 it overflows; 1 to 6 is a good range.", {
      curve: "headroom", zero: true, text: (value) => short(value), empty: "Headroom was not measured in this run."}),
    skips(data),
    layers(data),
    chartSection(data, "underflow", "Underflow", "The share of gradients that are so small that they lose digits or become zero.", {
      curve: "underflow", zero: true, text: share, tick: (value) => `${short(value * 100)} %`, empty: "Underflow was not measured in this run: GradScaler(underflow_every=100) measures it at every 100th step."}),
    chartSection(data, "loss", "Loss", "The unscaled loss.", {
      curve: "loss", text: short, empty: "No loss was recorded."}),
    element("h2", {}, "Details"));
  for (const run of data.runs) {
    const title = data.runs.length > 1 ? ` of ${run.name}` : "";
    page.append(events(run, title), folded(`Settings${title}`, run.settings.length
      ? table(["setting", "value"], run.settings, "Settings") : element("p", {class: "quiet"}, "No settings were recorded.")));
  }
  page.append(element("footer", {}, ...lines.map((text) => element("p", {class: "quiet small"}, text)),
    element("p", {class: "quiet small"}, `gradscale ${data.gradscale}`)));
}

build(JSON.parse(document.getElementById("data").textContent));
