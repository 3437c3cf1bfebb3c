/* Draws a run: timelines and memory over time, and a card for each rank. */
(function (root) {
  "use strict";
  const player = root.minifsdpPlayer;
  const { MEANING, LANES, bytes, nameOf, rankName } = player;

  function make(tag, props = {}, ...children) {
    const one = document.createElement(tag);
    Object.entries(props).forEach(([k, v]) => (k === "class" ? (one.className = v) : k in one ? (one[k] = v) : one.setAttribute(k, v)));
    one.append(...children);
    return one;
  }
  const SVG = "http://www.w3.org/2000/svg";
  function shape(tag, attrs, ...children) {
    const one = document.createElementNS(SVG, tag);
    Object.entries(attrs).forEach(([k, v]) => one.setAttribute(k, v));
    one.append(...children);
    return one;
  }

  /* Patterns, once for the whole page: reductions also differ from all-gathers without colour. */
  function patterns() {
    const tile = (id, size, ...lines) => shape("pattern", { id, width: size, height: size, patternUnits: "userSpaceOnUse" },
      shape("rect", { width: size, height: size, class: "tile-ground" }), ...lines);
    const line = (d) => shape("path", { d, class: "tile-line" });
    return shape("svg", { class: "player-patterns", "aria-hidden": "true" }, shape("defs", {},
      tile("player-RS", 6, line("M-1,7 L7,-1 M-1,1 L1,-1 M5,7 L7,5")),
      tile("player-AR", 6, line("M0,3 H6 M3,0 V6")),
      tile("player-reduced", 4, shape("circle", { cx: 2, cy: 2, r: 0.9, class: "tile-dot" }))));
  }

  // --- lanes ---
  const ROW = 12, GAP = 7, AXIS = 18;
  const PARTS = ["shards", "optimizer", "gathered", "whole", "reduced"];
  const NAMES = { shards: "shards", optimizer: "Adam", gathered: "gathered", whole: "whole gradients", reduced: "reduced gradients" };

  /* A drawing of the timelines of all ranks, as wide as its container. Runs next to each other have the same scales of
     time and bytes. */
  function lanes(run, { span, most, room, go }) {
    const place = make("div", { class: "player-lanes" });
    const MEMORY = room;
    let cursor, x, left;
    function draw() {
      const width = Math.max(place.clientWidth, 240), narrow = width < 520;
      left = narrow ? 52 : 104;
      x = (ms) => left + ((width - left - 8) * ms) / span;
      const block = 3 * ROW + MEMORY + GAP, height = run.ranks.length * block + AXIS;
      const says = `${run.title}: lanes and memory of ${run.ranks.length} ranks over ${span.toFixed(1)} ms`;
      const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": says });
      axis(svg, height - AXIS, width, narrow);
      run.ranks.forEach((_, rank) => rankLanes(svg, rank, rank * block + 4, narrow));
      cursor = svg.appendChild(shape("rect", { class: "cursor", x: left, y: 0, width: 2, height: height - AXIS }));
      svg.addEventListener("pointerdown", (event) => { point(event); svg.setPointerCapture(event.pointerId); });
      svg.addEventListener("pointermove", (event) => { if (event.buttons) point(event); });
      function point(event) {
        const box = svg.getBoundingClientRect();
        go((((event.clientX - box.left) * width) / box.width - left) / (width - left - 8) * span);
      }
      place.replaceChildren(svg);
    }
    function axis(svg, y, width, narrow) {
      const step = tick(span, narrow ? 4 : 9);
      for (let n = 0; n * step <= span; n++) {
        svg.append(shape("path", { class: "tick", d: `M${x(n * step)},0 V${y + 4}` }));
        const facts = { class: "tick-name", x: x(n * step), y: y + 15, "text-anchor": n ? "middle" : "start" };
        svg.append(shape("text", facts, +(n * step).toFixed(3) + (n ? "" : " ms")));
      }
    }
    function rankLanes(svg, rank, top, narrow) {
      const label = (text, y, kind = "track-name") => svg.append(shape("text", { class: kind, x: left - 6, y, "text-anchor": "end" }, text));
      if (!narrow) svg.append(shape("text", { class: "rank-name", x: 4, y: top + 10 }, rankName(run, rank)));
      const names = narrow ? ["r" + rankName(run, rank).slice(5) + " F B", "AG", "RS"] : ["compute", "gather", "reduce"];
      names.forEach((name, lane) => label(name, top + lane * ROW + 10));
      player.spans(run, rank).forEach(({ spans, rows }, lane) => spans.forEach((one) => {
        const high = (ROW - 1.5) / rows;
        const place = { x: x(one.from), y: top + lane * ROW + one.row * high };
        const size = { width: Math.max(x(one.to) - x(one.from), 1.5), height: high };
        const title = shape("title", {}, `${one.kind} ${nameOf(run, one.unit)}`);
        svg.append(shape("rect", { class: "span span-" + one.kind, ...place, ...size }, title));
      }));
      run.ranks[rank].forEach((m) => {
        if (m.kind === "FREE" || m.kind === "H2D" || m.kind === "D2H" || m.kind === "BCAST") {
          const [at, y] = [x(m.ms), top + LANES[m.kind] * ROW];
          svg.append(shape("path", { class: "mark mark-" + m.kind, d: `M${at - 3},${y} h6 l-3,5 z M${at},${y} v${ROW - 1.5}` }));
        }
      });
      memoryOver(svg, rank, top + 3 * ROW, label, narrow);
    }
    /* Stacked steps: each part is drawn above the parts below it. */
    function memoryOver(svg, rank, top, label, narrow) {
      const { stairs, peak } = player.memory(run, rank);
      const y = (n) => top + MEMORY - ((MEMORY - 3) * n) / most;
      const below = stairs.map(() => 0);
      PARTS.forEach((part) => {
        const above = stairs.map((one, n) => below[n] + (one[part] || 0));
        if (above.some((n, i) => n > below[i])) svg.append(shape("path", { class: "memory memory-" + part, d: outline(stairs, below, above, y) }));
        above.forEach((n, i) => { below[i] = n; });
      });
      const best = stairs[peak];
      svg.append(shape("path", { class: "peak", d: `M${x(best.ms) - 4},${top - 1} h8 l-4,5 z` }, shape("title", {}, `peak ${bytes(best.total)}`)));
      label(narrow ? "mem" : "memory", top + 11);
      label((narrow ? "" : "peak ") + bytes(best.total), top + 24, "track-name track-peak");
    }
    function outline(stairs, below, above, y) {
      const there = [], back = [];
      stairs.forEach((one, n) => {
        const to = x(n + 1 < stairs.length ? stairs[n + 1].ms : span);
        there.push(`${x(one.ms)},${y(above[n])} ${to},${y(above[n])}`);
        back.unshift(`${to},${y(below[n])} ${x(one.ms)},${y(below[n])}`);
      });
      return `M${there.join(" L")} L${back.join(" L")} Z`;
    }
    let now = 0;
    const move = (ms) => { now = ms; if (cursor) cursor.setAttribute("x", x(ms) - 1); };
    /* Call it when the drawing is in the page and has a width; when the width changes, it is drawn again. */
    function begin() {
      draw();
      new ResizeObserver(() => { draw(); move(now); }).observe(place);
    }
    return { element: place, begin, move };
  }

  /* A round distance of ticks, for about this number of ticks. */
  function tick(span, number) {
    const rough = span / number, power = 10 ** Math.floor(Math.log10(rough));
    return power * [1, 2, 5, 10].find((n) => n * power >= rough);
  }

  function legend(runs) {
    const moments = runs.flatMap((run) => run.ranks.flat());
    const kinds = Object.keys(MEANING).filter((kind) => moments.some((m) => m.kind === kind));
    const parts = PARTS.filter((part) => runs.some((run) => run.knows.held || part === "gathered"));
    const entry = (swatch, text) => make("span", {}, make("i", { class: swatch }), text);
    const peak = make("span", {}, make("i", { class: "swatch-peak" }, "\u25be"), "peak");
    return [...kinds.map((kind) => entry("swatch span-" + kind, MEANING[kind][0] + (kind === "STEP" ? "" : ` (${kind})`))),
      make("span", { class: "legend-break" }, "memory:"), ...parts.map((part) => entry("swatch memory-" + part, NAMES[part])), peak];
  }

  // --- cards ---
  /* The memory of each rank, as bars and in bytes. step(rank, by) goes to another moment of a rank, to(rank, n) to its
     moment n. */
  function cards(run, { step, to }) {
    const largest = Math.max(1, ...run.units.map((unit) => unit.bytes));
    const views = run.ranks.map((_, rank) => card(run, rank, largest, step, to));
    const element = make("div", { class: "player-cards" }, ...views.map((view) => view.element));
    return { element, show: (seen, here) => views.forEach((view, rank) => view.show(seen[rank], rank === here)) };
  }

  function card(run, rank, largest, step, to) {
    const name = rankName(run, rank), { stairs, peak } = player.memory(run, rank);
    const button = (text, label, action) => {
      const one = make("button", { type: "button", class: "card-button", textContent: text, title: label, onclick: action });
      one.setAttribute("aria-label", label);
      return one;
    };
    const doing = make("p", { class: "card-doing" });
    const rows = run.units.map((unit, u) => bar(run, rank, u, largest));
    const known = run.knows.held ? [...PARTS, "total"] : ["gathered"];
    const values = Object.fromEntries(known.map((part) => [part, make("b")]));
    const lines = known.map((part) => make("span", {}, make("i", { class: "swatch memory-" + part }), (NAMES[part] || "together") + " ", values[part]));
    const most = button(`peak ${bytes(stairs[peak].total)}`, `${name}: go to its peak, ${bytes(stairs[peak].total)}`, () => to(rank, peak));
    const element = make("section", { class: "card" },
      make("div", { class: "card-head" }, make("h3", {}, name),
        button("\u2039", `${name}: its moment before`, () => step(rank, -1)),
        button("\u203a", `${name}: its next moment`, () => step(rank, 1)), most),
      doing, ...rows.map((row) => row.element), make("p", { class: "card-bytes" }, ...lines));

    /* After moment n of this rank; -1 is before its first moment. */
    function show(n, isHere) {
      const moments = run.ranks[rank], last = n < 0 ? null : moments[n];
      const states = last ? last.after.states : run.units.map(() => "S").join("");
      const open = player.inFlight(run, rank, n);
      rows.forEach((row, u) => row.show(states[u], open.filter((m) => m.unit === u).map((m) => m.kind)));
      const held = last ? stairs[n] : { ...stairs[0], total: stairs[0].total - stairs[0].gathered, gathered: 0 };
      Object.entries(values).forEach(([part, value]) => { value.textContent = bytes(held[part] || 0); });
      doing.textContent = last ? player.sentence(run, last) : "not begun";
      element.classList.toggle("is-here", isHere);
    }
    return { element, show };
  }

  /* One unit: the position of its shard in the unsharded parameters, and the allocated part. */
  function bar(run, rank, u, largest) {
    const unit = run.units[u], share = Math.max(Math.sqrt(unit.bytes / largest) * 100, 14);
    const pieces = run.pieces ? run.pieces[rank][u] : [];
    const whole = make("span", { class: "bar", style: `width:${share}%` }, make("span", { class: "bar-whole" }),
      ...pieces.map(([from, until]) => make("span", { class: "bar-shard", style: `left:${100 * from}%;width:${100 * (until - from)}%` })));
    const tag = make("span", { class: "unit-tag" });
    const title = `${unit.bytes.toLocaleString("en")} bytes whole` + (unit.shard === null ? "" : `, ${unit.shard.toLocaleString("en")} stored`);
    const element = make("div", { class: "unit", title },
      make("span", { class: "unit-name" }, nameOf(run, u)), make("span", { class: "bar-room" }, whole), tag);
    function show(state, kinds) {
      whole.dataset.state = state;
      element.classList.toggle("is-computing", kinds.includes("F") || kinds.includes("B"));
      const sent = kinds.filter((kind) => kind !== "F" && kind !== "B");
      tag.textContent = [...sent, ...kinds.filter((kind) => !sent.includes(kind))].join(" ");
    }
    return { element, show };
  }

  Object.assign(player, { make, shape, tick, patterns, lanes, legend, cards });
})(window);
