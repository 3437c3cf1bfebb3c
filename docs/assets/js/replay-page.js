/* The panel below the player: sliders, and the step of the selected runs that replay.js computes. */
(function (root) {
  "use strict";
  const { document, minifsdpPlayer: player, minifsdpReplay: engine, minifsdpSliders: sliders } = root;
  const place = document.getElementById("replay"), source = document.getElementById("player");
  if (!place || !source) return;
  const { make, shape, tick } = player, { decades, inUnits, powers } = sliders;

  // --- settings ---
  // The rate of one rank in one direction. The recorded model is small, so a GPU is only busy with larger units.
  const STARTS = {
    cpus: {
      title: "CPUs", perMachine: 2, bandwidth: 1e9, between: 1e8, latency: 5e-5, speed: 1e10, rows: 32, size: 1, width: 4, ahead: false,
    },
    gpus: {
      title: "8 GPUs", ranks: 8, perMachine: 8, bandwidth: 4.5e11, between: 5e10, latency: 1e-5, speed: 4e14, rows: 8192, size: 1.3e4, width: 2, ahead: true,
    },
    machines: {
      title: "64 GPUs", ranks: 64, perMachine: 8, bandwidth: 4.5e11, between: 5e10, latency: 1e-5, speed: 4e14, rows: 8192, size: 1.3e4, width: 2, ahead: true,
    },
  };
  let runs = [], settings = {}, start = {};
  const largest = () => Math.max(1, ...runs.flatMap((run) => run.units.map((unit) => unit.bytes / 4)));
  const speedOf = (value) => inUnits(value, "B/s");
  const SCALES = {
    bandwidth: ["Bandwidth", decades(1e6, 1e12), speedOf],
    between: ["Between machines", decades(1e6, 1e12), speedOf],
    latency: ["Latency of a hop", decades(1e-7, 1e-2), (value) => inUnits(value, "s")],
    speed: ["Compute speed", decades(1e8, 1e15), (value) => inUnits(value, "FLOP/s")],
    ranks: ["Ranks", powers(1, 1024), String],
    perMachine: ["Ranks of a machine", powers(1, 64), String],
    rows: ["Batch of a rank", powers(1, 65536), (value) => `${value.toLocaleString("en")} rows`],
    size: ["Size of a unit", decades(1, 1e5), (value) => `${inUnits(largest() * value, "").trim()} parameters`],
  };

  // --- the panel ---
  const all = Object.fromEntries(Object.entries(SCALES).map(([name, [label, scale, describe]]) =>
    [name, sliders.slider("replay-" + name, label, scale, describe, (value) => change(name, value))]));
  const preset = make("select", { id: "replay-start" }, ...Object.entries(STARTS).map(([value, { title }]) => make("option", { value, textContent: title })));
  const width = make("select", { id: "replay-width" }, make("option", { value: 4, textContent: "float32" }), make("option", { value: 2, textContent: "bfloat16" }));
  const ahead = make("input", { id: "replay-ahead", type: "checkbox" });
  const reset = make("button", { type: "button", textContent: "Start values", onclick: () => begin() });
  const verdict = make("p", { class: "replay-verdict slider-result" }), drawings = make("div"), numbers = make("div", { class: "replay-scroll", tabIndex: 0 });
  const legend = make("p", { class: "replay-legend" });
  verdict.setAttribute("role", "status");
  numbers.setAttribute("role", "region");
  numbers.setAttribute("aria-label", "The step in numbers");
  place.append(
    make("div", { class: "replay-choices" }, make("label", {}, "Start from", preset), make("label", {}, "Parameters in", width),
      make("label", {}, ahead, "The CPU only issues (GPU)"), reset),
    make("div", { class: "replay-sliders" }, ...Object.values(all).map((one) => one.element)), verdict, drawings, legend, numbers);
  preset.addEventListener("change", () => begin());
  width.addEventListener("change", () => change("width", Number(width.value)));
  ahead.addEventListener("change", () => change("ahead", ahead.checked));

  const startValues = () => ({ ranks: Math.max(...runs.map((run) => run.ranks.length)), ...STARTS[preset.value] });
  /* Sets all settings to the start values. */
  function begin() {
    start = startValues();
    settings = { ...start };
    update();
  }
  function change(name, value) {
    settings[name] = value;
    update();
  }

  // --- the step ---
  function computed(run, values) {
    const moments = run.ranks[0];
    return engine.replay(moments, run.units, { ...values, ...engine.groupsFor(moments, values) });
  }
  const percent = (part, all_) => `${Math.round((100 * part) / all_)} %`;
  const seconds = (value) => inUnits(value, "s");

  function update() {
    for (const [name, one] of Object.entries(all)) one.show(settings[name]);
    width.value = settings.width;
    ahead.checked = settings.ahead;
    all.perMachine.element.hidden = settings.ranks === 1;
    all.between.element.hidden = settings.ranks <= settings.perMachine;
    const steps = runs.map((run) => computed(run, settings)), before = runs.map((run) => computed(run, start));
    const span = Math.max(...[...steps, ...before].map((one) => one.step));
    verdict.textContent = steps.map((one, n) => sentence(one, before[n], n)).join(" ");
    drawings.replaceChildren(...runs.map((run, n) => make("section", { class: "replay-run" },
      make("h3", {}, run.title), drawing(run, steps[n], before[n].step, span))));
    const kinds = [...new Set(steps.flatMap((one) => one.spans.map((s) => s.kind)))];
    legend.replaceChildren(...kinds.map((kind) => make("span", {}, make("i", { class: "swatch span-" + kind }), `${player.MEANING[kind][0]} (${kind})`)),
      make("span", {}, "dashed line: the step with the start values"));
    numbers.replaceChildren(table(steps));
  }
  function sentence(now, before, n) {
    const name = runs.length > 1 ? ["Left: a", "Right: a"][n] : "A", ratio = now.step / before.step;
    const compared = Math.abs(ratio - 1) < 0.005 ? "" : `, ${ratio.toLocaleString("en", { maximumSignificantDigits: 3 })} times the start value`;
    return `${name} step takes ${seconds(now.step)}${compared}; ${seconds(now.exposed)} of it (${percent(now.exposed, now.step)}) is exposed communication.`;
  }
  function table(steps) {
    const sent = (one) => player.sum(Object.values(one.sent));
    const line = (name, pick) => make("tr", {}, make("th", { scope: "row" }, name), ...steps.map((one) => make("td", {}, pick(one))));
    const head = runs.length > 1 ? [make("thead", {}, make("tr", {}, make("td"), ...runs.map((run) => make("th", { scope: "col" }, run.title))))] : [];
    return make("table", {}, ...head, make("tbody", {},
      line("step", (one) => seconds(one.step)),
      line("computation", (one) => seconds(one.computation)),
      line("exposed communication", (one) => `${seconds(one.exposed)}, ${percent(one.exposed, one.step)}`),
      line("sent by a rank", (one) => inUnits(sent(one), "B"))));
  }

  // --- the drawing ---
  const LANES = { compute: "compute", gather: "gather", reduce: "reduce", all_reduce: "all-reduce" };
  const ROW = 15, AXIS = 18;
  function drawing(run, { spans, step }, startStep, span) {
    const wide = Math.max(place.clientWidth - 30, 240), left = 64, x = (time) => left + ((wide - left - 12) * time) / (span || 1);
    const lanes = Object.keys(LANES).filter((lane) => lane === "compute" || spans.some((one) => one.stream === lane));
    const bottom = lanes.length * ROW + 4, height = bottom + AXIS;
    const svg = shape("svg", { width: wide, height, viewBox: `0 0 ${wide} ${height}`, role: "img", "aria-label": `${run.title}: a step of ${seconds(step)}` });
    const distance = tick(span || 1, wide < 520 ? 3 : 8);
    for (let n = 0; n * distance <= span; n++) {
      svg.append(shape("path", { class: "tick", d: `M${x(n * distance)},0 V${bottom + 4}` }));
      svg.append(shape("text", { x: x(n * distance), y: bottom + 14, "text-anchor": n ? "middle" : "start" }, n ? seconds(n * distance) : "0"));
    }
    lanes.forEach((lane, row) => {
      svg.append(shape("text", { x: left - 6, y: row * ROW + 13, "text-anchor": "end" }, LANES[lane]));
      spans.filter((one) => one.stream === lane).forEach(({ kind, unit, from, to }) => {
        const box = { x: x(from), y: row * ROW + 4, width: Math.max(x(to) - x(from), 0.5), height: ROW - 3 };
        svg.append(shape("rect", { class: "span span-" + kind, ...box }, shape("title", {}, `${kind} ${player.nameOf(run, unit)}, ${seconds(to - from)}`)));
      });
    });
    svg.append(shape("path", { class: "start", d: `M${x(startStep)},0 V${bottom}` }));
    return svg;
  }

  /* Other runs keep the settings. The number of ranks follows the recording, unless the user has changed it. */
  source.addEventListener("runs", ({ detail }) => {
    const isFirst = !runs.length, isMoved = settings.ranks !== start.ranks, kept = settings;
    runs = detail;
    if (isFirst) return begin();
    start = startValues();
    settings = { ...kept, ranks: isMoved ? kept.ranks : start.ranks };
    update();
  });
  let drawnWidth = 0;
  new ResizeObserver(() => {
    if (!runs.length || place.clientWidth === drawnWidth) return;
    drawnWidth = place.clientWidth;
    update();
  }).observe(place);
})(window);
