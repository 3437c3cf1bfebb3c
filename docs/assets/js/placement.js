/* The placement grid on its page. The data of all placements is in placements.js, which docs_build/pages/placement.py
   makes; this script computes memory and bytes with the formulas of that module. A test compares all numbers. */
(function (root) {
  "use strict";
  const { document, minifsdpPlacements: data, minifsdpSliders: sliders } = root;
  const place = document.getElementById("placement");
  if (!place) return;
  const STATES = { parameter: "Parameter", gradient: "Gradient", optimizer: "Optimizer state" };
  const LEVELS = Object.keys(data.levels), SHORT = { replicated: "replicated", within: "machine", all: "all ranks" };
  const KINDS = { AG: "all-gather", RS: "reduce-scatter", AR: "all-reduce" };

  // --- numbers ---
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  function memory(levels, { parameters, perMachine, machines }) {
    const shards = { replicated: 1, within: perMachine, all: perMachine * machines };
    return Object.fromEntries(Object.entries(levels).map(([state, level]) => [state, (data.bytes[state] * parameters) / shards[level]]));
  }
  function sent({ kind, group, times }, { parameters, perMachine, machines }) {
    const ranks = { all: perMachine * machines, within: perMachine, between: machines }[group];
    const bytes = (4 * parameters * times) / (group === "between" ? perMachine : 1);
    const total = ((kind === "AR" ? 2 : 1) * bytes * (ranks - 1)) / ranks;
    const leaving = { all: machines > 1 ? 1 / perMachine : 0, within: 0, between: 1 }[group];
    return { within: total * (1 - leaving), between: total * leaving };
  }

  // --- the page ---
  function make(tag, props = {}, ...children) {
    const one = document.createElement(tag);
    for (const [key, value] of Object.entries(props)) key in one ? (one[key] = value) : one.setAttribute(key, value);
    one.append(...children);
    return one;
  }
  const bytes = (n) => sliders.inUnits(n, "B");
  const keyOf = (levels) => Object.values(levels).map((level) => level[0]).join("");
  const levelsOf = (key) => Object.fromEntries(Object.keys(STATES).map((state, n) => [state, LEVELS.find((level) => level[0] === key[n])]));

  const chosen = levelsOf("aaa"), sizes = { parameters: 7e9, perMachine: 8, machines: 8 };
  const selects = Object.fromEntries(Object.entries(STATES).map(([state]) => [state, make("select", { id: "placement-" + state },
    ...LEVELS.map((level) => make("option", { value: level, textContent: data.levels[level] })))]));
  const keeps = make("input", { type: "checkbox", id: "placement-keeps" });
  const box = make("label", { className: "is-box" }, keeps, "Keep parameters unsharded after forward");
  const scales = {
    parameters: ["Parameters", sliders.decades(1e8, 1e12), (value) => sliders.inUnits(value, "").trim().replace("G", "B")],
    perMachine: ["Ranks of a machine", sliders.powers(1, 64), String],
    machines: ["Machines", sliders.powers(1, 1024), (value) => `${value.toLocaleString("en")}, ${(value * sizes.perMachine).toLocaleString("en")} ranks`],
  };
  const ranges = Object.fromEntries(Object.entries(scales).map(([name, [label, scale, describe]]) =>
    [name, sliders.slider("placement-" + name, label, scale, describe, (value) => { sizes[name] = value; update(); })]));
  const cells = {};
  const grid = make("div", { className: "placement-scroll", tabIndex: 0, role: "region" }, table());
  grid.setAttribute("aria-label", "All placements");
  const key = make("p", { className: "placement-key" }, "Rows: the parameter. Columns: the gradient, and below it the optimizer state. Dashed: not consistent.");
  const verdict = make("p", { className: "placement-verdict slider-result", role: "status" }), result = make("div");
  place.replaceChildren(
    make("div", { className: "placement-choices" }, ...Object.entries(STATES).map(([state, label]) => make("label", {}, label, selects[state])), box),
    make("div", { className: "placement-sliders" }, ...Object.values(ranges).map((one) => one.element)), key, grid, verdict, result);
  for (const [state, select] of Object.entries(selects)) select.addEventListener("change", () => { chosen[state] = select.value; update(); });
  keeps.addEventListener("change", update);

  /* A row for each placement of the parameter; the columns are the gradient, and below it the optimizer state. */
  function table() {
    const head = (text, props = {}) => make("th", { scope: "col", ...props }, text);
    const rows = LEVELS.map((parameter) => make("tr", {}, make("th", { scope: "row" }, SHORT[parameter]),
      ...LEVELS.flatMap((gradient) => LEVELS.map((optimizer) => cell({ parameter, gradient, optimizer })))));
    return make("table", { className: "placement-grid" },
      make("thead", {},
        make("tr", {}, head("gradient"), ...LEVELS.map((level) => head(SHORT[level], { colSpan: 3, scope: "colgroup" }))),
        make("tr", {}, head("optimizer"), ...LEVELS.flatMap(() => LEVELS.map((level) => head(SHORT[level]))))),
      make("tbody", {}, ...rows));
  }
  function cell(levels) {
    const key = keyOf(levels), button = make("button", { type: "button" });
    button.addEventListener("click", () => { Object.assign(chosen, levels); update(); });
    cells[key] = button;
    return make("td", {}, button);
  }
  const factsOf = (key) => data.placements[key][Number(keeps.checked)];
  const words = (levels) => Object.entries(levels).map(([state, level]) => `${STATES[state].toLowerCase()} ${data.levels[level]}`).join(", ");

  function update() {
    for (const [name, one] of Object.entries(ranges)) one.show(sizes[name]);
    for (const [state, select] of Object.entries(selects)) select.value = chosen[state];
    box.hidden = chosen.parameter === "replicated";
    for (const [key, button] of Object.entries(cells)) {
      const facts = factsOf(key), text = facts.why ? "not consistent" : facts.name.split(",")[0] || "no name";
      button.textContent = text;
      button.classList.toggle("is-wrong", Boolean(facts.why));
      button.setAttribute("aria-pressed", String(key === keyOf(chosen)));
      button.setAttribute("aria-label", `${text}: ${words(levelsOf(key))}`);
    }
    // On a phone, the grid is wider than the screen.
    const cell_ = cells[keyOf(chosen)].parentElement;
    grid.scrollLeft = Math.min(grid.scrollLeft, cell_.offsetLeft);
    grid.scrollLeft = Math.max(grid.scrollLeft, cell_.offsetLeft + cell_.offsetWidth - grid.clientWidth);
    const facts = factsOf(keyOf(chosen)), held = memory(chosen, sizes);
    facts.why ? showWrong(facts, held) : showRight(facts, held);
  }

  function showWrong({ why, instead }, held) {
    const better = levelsOf(instead), saved = sum(Object.values(held)) - sum(Object.values(memory(better, sizes)));
    verdict.textContent = "This placement is not consistent.";
    const fix = make("button", { type: "button", className: "placement-fix", textContent: "Select the consistent placement" });
    fix.addEventListener("click", () => { Object.assign(chosen, better); update(); selects.parameter.focus(); });
    result.replaceChildren(make("ul", {}, ...why.map((reason) => make("li", {}, reason))),
      make("p", {}, `A rank stores ${bytes(sum(Object.values(held)))}. With ${words(better)}, it stores ${bytes(saved)} less.`), fix);
  }

  function showRight({ name, setting, note, collectives }, held) {
    const links = collectives.map((one) => sent(one, sizes)), total = (kind) => sum(links.map((link) => link[kind]));
    verdict.textContent = `${name || "No common name"}: a rank stores ${bytes(sum(Object.values(held)))}, and sends ${bytes(total("within"))} within its machine and ${bytes(total("between"))} to other machines.`;
    const minifsdp = setting ? `In minifsdp: ${setting}.` : data.noSetting;
    const row = (cells_) => make("tr", {}, make("th", { scope: "row" }, cells_[0]), ...cells_.slice(1).map((text) => make("td", {}, text)));
    const head = (...texts) => make("thead", {}, make("tr", {}, ...texts.map((text) => make("th", { scope: "col" }, text))));
    const traffic = make("table", { className: "placement-numbers placement-traffic" },
      head("collective", "of", "between", "within the machine", "to other machines"),
      make("tbody", {}, ...collectives.map((one, n) => row([KINDS[one.kind], `${one.state}, ${one.when}`, data.groups[one.group], bytes(links[n].within), bytes(links[n].between)]))));
    const most = sum(Object.values(held));
    const bar = make("div", { className: "placement-bar" }, ...Object.values(held).map((n, i) => {
      const part = make("span", { className: `placement-part placement-part-${i}` });
      part.style.width = (100 * n) / most + "%";
      return part;
    }));
    bar.setAttribute("aria-hidden", "true");
    const legend = make("p", { className: "placement-legend" }, ...Object.entries(held).map(([state, n], i) =>
      make("span", {}, make("i", { className: `placement-part placement-part-${i}` }), `${STATES[state].toLowerCase()}: `, make("b", {}, bytes(n)))));
    const scroll = make("div", { className: "placement-scroll", tabIndex: 0, role: "region" }, traffic);
    scroll.setAttribute("aria-label", "The collectives of a step");
    const above = make("p", { className: "placement-key" }, "The collectives of a step, and the bytes that each rank sends:");
    result.replaceChildren(make("p", { className: "placement-setting" }, minifsdp), ...(note ? [make("p", {}, note)] : []), above, scroll, bar, legend);
  }
  update();
})(window);
