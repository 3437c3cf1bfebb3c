/* The calculator on its page: the form, the errors next to its fields, and the drawing of the results.
   calculator-inputs.js computes the inputs and results. */
(function (root) {
  "use strict";
  const { document, location, history, minifsdpCost: cost, minifsdpModels: models, minifsdpInputs: inputs, minifsdpSliders: sliders } = root;
  const place = document.getElementById("calculator");
  if (!place) return;
  const { GB, GIB, FIELDS, GROUPS } = inputs;

  // --- small things ---
  function make(tag, props = {}, ...children) {
    const one = document.createElement(tag);
    for (const [key, value] of Object.entries(props)) key in one ? (one[key] = value) : one.setAttribute(key, value);
    one.append(...children);
    return one;
  }
  const inWords = (n, steps) => {
    const [unit, factor] = steps.find(([, f]) => n >= f) || steps[steps.length - 1];
    return (n / factor).toLocaleString("en", { maximumSignificantDigits: 3 }) + " " + unit;
  };
  const bytes = (n) => (n < 1000 ? Math.round(n) + " B" : inWords(n, [["TB", 1e12], ["GB", GB], ["MB", 1e6], ["kB", 1e3]]));
  const gib = (n) => (n / GIB).toLocaleString("en", { maximumFractionDigits: 1 }) + " GiB";
  const seconds = (n) => (n ? inWords(n, [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) : "0 s");
  // Less than a tenth of the memory is not enough reserve: an allocator reserves more than it needs.
  const fits = ({ left }, memory) => (left < 0 ? `no, ${gib(-left)} too many` : left < memory / 10 ? `tight, ${gib(left)} left` : `yes, ${gib(left)} left`);

  // --- the form ---
  const controls = {}, parts = {}, ranges = {};
  function control(name, field) {
    const id = "calc-" + name;
    if (field.kind === "choice") return make("select", { id }, ...Object.entries(field.options).map(([value, text]) => make("option", { value, textContent: text, disabled: name === "preset" && !value })));
    if (field.kind === "box") return make("input", { id, type: "checkbox" });
    if (field.kind === "lines") return make("textarea", { id, rows: 4, spellcheck: false });
    return make("input", { id, type: "number", step: field.whole ? 1 : "any", min: field.min ?? 0, inputMode: "decimal" });
  }
  // A slider below a number. Its label is only for screen readers, because the number has the same label.
  function rangeOf(name, field) {
    if (!field.scale) return [];
    const id = `calc-${name}-slider`;
    ranges[name] = sliders.range(id, field.scale, (value) => `${field.label}: ${value}`);
    return [make("label", { className: "calc-hidden", htmlFor: id, textContent: `${field.label}, slider` }), ranges[name].input];
  }
  function row(name, field) {
    controls[name] = control(name, field);
    const hint = field.hint ? [make("small", { id: `calc-${name}-hint`, textContent: field.hint })] : [];
    const error = make("span", { id: `calc-${name}-error`, className: "calc-error", role: "alert" });
    const all = make("div", { className: "calc-field calc-is-" + field.kind }, make("label", { htmlFor: "calc-" + name, textContent: field.label }), controls[name], ...rangeOf(name, field), ...hint, error);
    parts[name] = { all, error, hint: hint.length ? hint[0].id : "" };
    return all;
  }
  const form = make("form", { className: "calc-form", onsubmit: () => false }, ...Object.entries(GROUPS).map(([title, fields]) =>
    make("fieldset", {}, make("legend", { textContent: title }), ...Object.entries(fields).map(([name, field]) => row(name, field)))));
  const facts = make("p", { className: "calc-facts" });
  const verdict = make("p", { className: "calc-verdict slider-result", role: "status" });
  const result = make("div", { className: "calc-result" });
  const link = make("a", { textContent: "Link to these inputs" });
  place.replaceChildren(form, facts, verdict, make("p", { className: "calc-link" }, link, " (the address above is the same)"), result);

  const texts = () => Object.fromEntries(Object.entries(controls).map(([name, one]) => [name, FIELDS[name].kind === "box" ? one.checked : one.value]));
  function fill(values) {
    for (const [name, one] of Object.entries(controls)) FIELDS[name].kind === "box" ? (one.checked = values[name]) : (one.value = values[name]);
  }

  // The error of a field is next to it, and screen readers read it with the field.
  function showErrors(errors, read) {
    for (const [name, { all, error, hint }] of Object.entries(parts)) {
      all.hidden = Boolean(FIELDS[name].when && !FIELDS[name].when(read));
      if (error.textContent !== (errors[name] || "")) error.textContent = errors[name] || "";
      controls[name].setAttribute("aria-invalid", String(Boolean(errors[name])));
      const described = [hint, errors[name] ? error.id : ""].filter(Boolean).join(" ");
      described ? controls[name].setAttribute("aria-describedby", described) : controls[name].removeAttribute("aria-describedby");
    }
  }

  // --- drawing --- Bars, one for each row, of parts that differ in pattern as well as in colour; the number is after
  // each bar.
  function chart(title, partNames, rows, limit) {
    const totals = rows.map((one) => cost.sum(one.parts));
    // Values far beyond the limit are truncated; otherwise values below the limit would be too small to see.
    const most = Math.min(1.02 * Math.max(...totals, limit || 0), 3 * limit || Infinity) || 1;
    const width = (n) => (100 * Math.min(n, most)) / most + "%";
    const legend = partNames.map((name, i) => (name ? make("span", {}, make("i", { className: "calc-part calc-part-" + i }), name) : ""));
    if (limit) legend.push(make("span", {}, make("i", { className: "calc-limit" }), gib(limit)));
    return make("figure", { className: "calc-chart" }, make("figcaption", {}, title), make("p", { className: "calc-legend", "aria-hidden": "true" }, ...legend),
      ...rows.map((one, number) => {
        let before = 0;
        const room = make("span", { className: "calc-room" + (totals[number] > most ? " is-cut" : ""), "aria-hidden": "true" }, ...one.parts.map((n, i) => {
          const part = make("i", { className: "calc-part calc-part-" + i });
          part.style.width = width(Math.min(n, most - before));
          before += Math.min(n, most - before);
          return part;
        }));
        for (const [at, className] of [[limit, "calc-limit"], [one.mark, "calc-mark"]]) {
          if (at) room.append(make("i", { className }));
          if (at) room.lastChild.style.left = width(at);
        }
        return make("div", { className: "calc-bar" + (one.chosen ? " is-chosen" : "") }, make("span", { className: "calc-name" }, (one.chosen ? "▸ " : "") + one.name), room, make("b", {}, one.text));
      }));
  }

  function charts({ strategies, memory, cluster }, own) {
    const each = (pick) => strategies.map((one) => ({ name: one.strategy, chosen: one === own, ...pick(one) }));
    const { priced } = own;
    const moments = [["stored", priced.stored], ["after backward", priced.afterBackward], ["peak of forward", priced.peakForward], ["peak of backward", priced.peakBackward], ["peak of the optimizer's step", priced.peakOptimizer]];
    if (priced.host) moments.push(["on the host", priced.host]);
    return [
      chart(`Memory of a rank with ${own.strategy}, moment by moment`, ["all that is there"], moments.map(([name, n]) => ({ name, parts: [n], text: bytes(n) })), memory),
      chart("Peak memory of a rank", ["stored", "gathered units and gradients", "activations"],
        each((one) => ({ parts: [one.priced.stored, one.peak - one.priced.stored - one.activations, one.activations], text: `${bytes(one.peak)}: ${fits(one, memory)}` })), memory),
      chart("Sent by a rank in a step", ["within its machine", "to other machines"],
        each((one) => ({ parts: [one.within, one.between], text: `${bytes(one.within)} + ${bytes(one.between)}` }))),
      // The second part again, on its own scale: the link is slower, so its bytes take more time.
      ...(own.job.numShards * own.job.numReplicas > cluster.perMachine
        ? [chart("Of these, sent to other machines", ["", "to other machines"], each((one) => ({ parts: [0, one.between], text: bytes(one.between) })))] : []),
      chart("Time of a step, at least: the thick mark if all overlaps, the whole bar if nothing does", ["compute", "communication"],
        each((one) => ({ parts: [one.time.compute, one.time.communication], mark: one.time.overlapped, text: `${seconds(one.time.overlapped)} to ${seconds(one.time.apart)}` }))),
    ];
  }

  function table({ strategies, memory }, own) {
    const line = (name, pick) => make("tr", {}, make("th", { scope: "row" }, name), ...strategies.map((one) => make("td", { className: one === own ? "is-chosen" : "" }, pick(one))));
    const kind = (name, key) => line(name, ({ priced, links }) => (priced.numCollectives[key] ? `${priced.numCollectives[key]}: ${bytes(links[key].within)} + ${bytes(links[key].between)}` : "none"));
    return make("div", { className: "calc-scroll", tabIndex: 0, role: "region", "aria-label": "All numbers by strategy" }, make("table", { className: "calc-table" },
      make("caption", {}, "For each rank and step. Sent bytes are those within a machine + those to other machines."),
      make("thead", {}, make("tr", {}, make("td", {}), ...strategies.map((one) => make("th", { scope: "col", className: one === own ? "is-chosen" : "" }, (one === own ? "▸ " : "") + one.strategy)))),
      make("tbody", {},
        line("stored", (one) => bytes(one.priced.stored)),
        line("after backward", (one) => bytes(one.priced.afterBackward)),
        line("activations", (one) => bytes(one.job.activations)),
        line("peak", (one) => bytes(one.peak)),
        line("fits in " + gib(memory), (one) => fits(one, memory)),
        line("sent in all", (one) => bytes(one.within + one.between)),
        line("sent within a machine", (one) => bytes(one.within)),
        line("sent to other machines", (one) => bytes(one.between)),
        kind("all-gathers", "AG"), kind("reduce-scatters", "RS"), kind("all-reduces", "AR"),
        line("step, if all overlaps", (one) => seconds(one.time.overlapped)),
        line("step, if nothing does", (one) => seconds(one.time.apart)))));
  }

  // The formulas for the time of the chosen strategy, with their numbers.
  function sums(own, cluster) {
    const { time, links, count } = own, speed = (n) => `${(n / GB).toLocaleString("en")} GB/s`;
    const lines = [`compute = ${count.toExponential(2)} operations / ${cluster.operations.toExponential(2)} a second = ${seconds(time.compute)}`];
    for (const [kind, name] of [["AG", "all-gathers"], ["RS", "reduce-scatters"], ["AR", "all-reduces"]]) {
      const { within, between } = links[kind];
      if (within + between) lines.push(`${name} = max(${bytes(within)} / ${speed(cluster.within)}, ${bytes(between)} / ${speed(cluster.between)}) = ${seconds(Math.max(within / cluster.within, between / cluster.between))}`);
    }
    lines.push(`if all overlaps: max(compute, ${bytes(own.within)} / ${speed(cluster.within)}, ${bytes(own.between)} / ${speed(cluster.between)}) = ${seconds(time.overlapped)}`);
    lines.push(`if nothing does: compute + collectives = ${seconds(time.apart)}`);
    return make("details", {}, make("summary", {}, `The sums behind the time of ${own.strategy}`), make("pre", {}, make("code", {}, lines.join("\n"))));
  }

  function draw(read) {
    const units = inputs.joined(read.model.units, read.blocks);
    const shapes = [...units, read.model.root], answer = inputs.answer(read);
    const own = answer.strategies.find((one) => one.strategy === read.strategy);
    const numel = cost.sum(shapes.map((unit) => cost.sum(unit.map(cost.numelOf))));
    const largest = Math.max(...units.map((unit) => cost.sum(unit.map(cost.numelOf))), 0);
    facts.textContent = `${numel.toLocaleString("en")} parameters in ${units.length} units; the largest unit has ${largest.toLocaleString("en")}.`
      + (own.count ? "" : " It has no matrices, so activations and compute are not estimated.");
    const all = gib(answer.memory), beside = own.left < 0 ? `does not fit in ${all}: ${gib(-own.left)} too many` : `fits in ${all}${own.left < answer.memory / 10 ? ", tightly" : ""}: ${gib(own.left)} left`;
    verdict.textContent = `${read.strategy} on ${read.ranks.toLocaleString("en")} ranks ${beside} at the peak, in ${own.worst}. `
      + `A step takes at least ${seconds(own.time.overlapped)} if all overlaps, ${seconds(own.time.apart)} if nothing does.`;
    result.replaceChildren(...charts(answer, own), table(answer, own), sums(own, answer.cluster));
  }

  function update() {
    controls.preset.value = models.nameOf(controls.lines.value);
    const said = texts(), { read, errors } = inputs.readAll(said), wrong = Object.keys(errors);
    showErrors(errors, read);
    for (const [name, one] of Object.entries(ranges)) if (name in read) one.show(read[name]);
    link.href = "#" + inputs.toAddress(said);
    // Only the part after the # changes, so this is allowed on a page opened from a disk, too.
    if (link.hash !== location.hash) history.replaceState(null, "", link.hash || location.pathname + location.search);
    if (!wrong.length) return draw(read);
    facts.textContent = "";
    verdict.textContent = "Fix this first: " + wrong.map((name) => FIELDS[name].label).join(", ") + ".";
    result.replaceChildren();
  }

  /* Writes the value of a slider into the number next to it. There are at least as many ranks as machines. */
  function slide(name) {
    controls[name].value = ranges[name].value();
    if (Number(controls.machines.value) <= Number(controls.ranks.value)) return;
    if (name === "ranks") controls.machines.value = controls.ranks.value;
    if (name === "machines") controls.ranks.value = controls.machines.value;
  }

  form.addEventListener("input", (event) => {
    const moved = Object.keys(ranges).find((name) => ranges[name].input === event.target);
    if (moved) slide(moved);
    if (event.target === controls.preset) controls.lines.value = models.PRESETS[controls.preset.value];
    update();
  });
  // The address of a heading on this page is not an address of the calculator.
  const isOurs = () => location.hash === "" || location.hash.includes("=");
  root.addEventListener("hashchange", () => {
    if (isOurs() && location.hash !== link.hash) { fill(inputs.fromAddress(location.hash)); update(); }
  });
  fill(inputs.fromAddress(isOurs() ? location.hash : ""));
  if (isOurs()) update();
  else { const there = location.hash; update(); history.replaceState(null, "", there); }
})(window);
