/* The step player: shows one recorded training step, moment by moment.

   A run is a script that calls minifsdpRun(key, data). data.ranks has a list of moments for each rank:
   [kind, unit, begins, milliseconds, bytes, group, stack, states, phases, gradients, optimizer]
   where states has a letter for each unit: S sharded, G gathering, U unsharded. What a moment shows of a rank is what
   held right *before* it, so the state after moment n is that of moment n + 1. */
(function () {
  "use strict";
  const place = document.getElementById("player");
  if (!place) return;

  const CHOICES = {
    door: { label: "Front door", options: { fsdp1: "FullyShardedDataParallel", fsdp2: "fully_shard" } },
    strategy: {
      label: "Strategy",
      options: {
        full: "FULL_SHARD", zero2: "SHARD_GRAD_OP", none: "NO_SHARD", hybrid: "HYBRID_SHARD",
        hybrid2: "_HYBRID_SHARD_ZERO2", keep2: "reshard_after_forward=2",
      },
    },
    prefetch: {
      label: "Prefetch",
      options: { pre: "backward, before", post: "backward, after", off: "none", forward: "forward too", ahead: "two ahead, by a list" },
    },
    wrap: { label: "A unit is", options: { block: "a block", stage: "a stage of two blocks", whole: "the whole model" } },
    ranks: { label: "Ranks", options: { 2: "2", 4: "4" } },
  };
  const SECOND_DOOR = { full: "reshard_after_forward=True", zero2: "reshard_after_forward=False", hybrid: "2-D mesh, True", hybrid2: "2-D mesh, False" };
  const MEANING = {
    AG: ["all-gather", "is issued", "was waited for"], F: ["forward", "begins", "ends"], B: ["backward", "begins", "ends"],
    RS: ["reduce-scatter", "is issued", "is complete"], AR: ["all-reduce", "is issued", "is complete"],
    FREE: ["free", "gives the memory back", ""], STEP: ["optimizer step", "begins", "ends"],
  };
  const KEYS = Object.keys(CHOICES);
  const available = new Set(window.minifsdpRuns || []);
  const loaded = {};
  const choice = { door: "fsdp2", strategy: "full", prefetch: "pre", wrap: "block", ranks: "2" };
  let run = null, frames = [], at = 0, timer = null;

  const make = (tag, props = {}, ...children) => {
    const one = document.createElement(tag);
    Object.entries(props).forEach(([k, v]) => (k === "class" ? (one.className = v) : k in one ? (one[k] = v) : one.setAttribute(k, v)));
    one.append(...children);
    return one;
  };
  const bytes = (n) => (n >= 1e6 ? (n / 1e6).toFixed(2) + " MB" : n >= 1e4 ? (n / 1e3).toFixed(0) + " kB" : n >= 1e3 ? (n / 1e3).toFixed(1) + " kB" : n + " B");
  const nameOf = (data, unit) => (unit < 0 ? "" : data.units[unit].name || "root");
  const keyOf = (c) => KEYS.map((k) => c[k]).join("-");

  // --- the form ---
  const selects = {};
  const form = make("form", { class: "player-form", onsubmit: () => false });
  KEYS.forEach((key) => {
    selects[key] = make("select", { id: "player-" + key });
    selects[key].addEventListener("change", () => { choice[key] = selects[key].value; settle(key); load(); });
    form.append(make("label", {}, CHOICES[key].label + " ", selects[key]));
  });

  function exists(partial) {
    return [...available].some((name) => name.split("-").every((part, n) => !(KEYS[n] in partial) || partial[KEYS[n]] === part));
  }
  // Not every combination was recorded. The newest choice stands; the others give way to the first that fits it.
  function settle(fixed) {
    const kept = { [fixed]: choice[fixed] };
    KEYS.filter((k) => k !== fixed).forEach((key) => {
      const wanted = [choice[key], ...Object.keys(CHOICES[key].options)];
      choice[key] = wanted.find((value) => exists({ ...kept, [key]: value }));
      kept[key] = choice[key];
    });
  }
  function fillForm() {
    KEYS.forEach((key) => {
      selects[key].replaceChildren();
      Object.entries(CHOICES[key].options).forEach(([value, text]) => {
        // Shown if some run of this door has it; chosen without the others, it makes them give way.
        if (key !== "door" && !exists({ door: choice.door, [key]: value })) return;
        const shown = key === "strategy" && choice.door === "fsdp2" ? SECOND_DOOR[value] || text : text;
        selects[key].append(make("option", { value, textContent: shown }));
      });
      selects[key].value = choice[key];
    });
  }

  // --- the page ---
  const play = make("button", { type: "button", class: "player-button", textContent: "Play", title: "Space" });
  const back = make("button", { type: "button", class: "player-button", textContent: "\u2190", title: "One moment back" });
  const on = make("button", { type: "button", class: "player-button", textContent: "\u2192", title: "One moment on" });
  const slider = make("input", { type: "range", min: 0, value: 0, class: "player-slider" });
  slider.setAttribute("aria-label", "Moment");
  const clock = make("output", { class: "player-clock" });
  const headline = make("p", { class: "player-now" });
  headline.setAttribute("aria-live", "polite");
  const running = make("p", { class: "player-running" });
  const lanes = make("div", { class: "player-lanes" });
  const legend = make("p", { class: "player-legend" });
  const cards = make("div", { class: "player-cards" });
  const status = make("p", { class: "player-status" });
  place.append(form, make("div", { class: "player-controls" }, back, play, on, slider, clock), headline, running, lanes, legend, cards, status);

  // --- loading ---
  window.minifsdpRun = (key, data) => { loaded[key] = data; if (key === keyOf(choice)) start(data); };
  function load() {
    stop();
    fillForm();
    const key = keyOf(choice);
    history.replaceState(null, "", "#" + key);
    if (loaded[key]) return start(loaded[key]);
    status.textContent = "Loading " + key + " ...";
    const script = make("script", { src: place.dataset.runs + key + ".js" });
    script.onerror = () => { status.textContent = "The recording " + key + " could not be loaded."; };
    document.head.append(script);
  }

  function start(data) {
    run = data;
    // One list of frames from the clocks of all ranks.
    frames = [];
    data.ranks.forEach((moments, rank) => moments.forEach((moment, n) => frames.push({ rank, n, moment, ms: moment[3] })));
    frames.sort((a, b) => a.ms - b.ms);
    const seen = data.ranks.map(() => -1);
    frames.forEach((frame) => { seen[frame.rank] = frame.n; frame.seen = [...seen]; });
    slider.max = frames.length - 1;
    status.textContent = `${frames.length} moments on ${data.ranks.length} ranks, ${data.units.length} units.`;
    drawLanes();
    buildCards();
    show(0);
  }

  // --- the overview: what each rank's lanes did, with a line where we are ---
  const SVG = "http://www.w3.org/2000/svg";
  let cursor = null, span = 1;
  const W = 1000, LEFT = 52, ROW = 9;
  function drawLanes() {
    span = frames[frames.length - 1].ms || 1;
    const height = run.ranks.length * (3 * ROW + 8) + 4;
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${W} ${height}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    const add = (tag, attrs, text) => {
      const one = document.createElementNS(SVG, tag);
      Object.entries(attrs).forEach(([k, v]) => one.setAttribute(k, v));
      if (text) one.textContent = text;
      svg.append(one);
      return one;
    };
    const x = (ms) => LEFT + ((W - LEFT) * ms) / span;
    run.ranks.forEach((moments, rank) => {
      const top = rank * (3 * ROW + 8) + 4;
      add("text", { x: 6, y: top + 17, class: "lane-name" }, "rank " + rank);
      const open = {};
      moments.forEach((m) => {
        const id = m[0] + m[1];
        if (m[2]) open[id] = m;
        if (m[0] === "FREE") add("rect", { class: "mark-FREE", x: x(m[3]), y: top + ROW, width: 2, height: ROW });
        if (!m[2] && open[id]) {
          const lane = { AG: 1, RS: 2, AR: 2 }[m[0]] || 0;
          if (lane === 0 && m[1] >= 0 && nameOf(run, m[1]) === "root" && run.units.length > 1) return;
          add("rect", { class: "span-" + m[0], x: x(open[id][3]), y: top + lane * ROW, width: Math.max(x(m[3]) - x(open[id][3]), 1.5), height: ROW - 1.5 });
          delete open[id];
        }
      });
    });
    cursor = add("rect", { class: "cursor", x: LEFT, y: 0, width: 2, height });
    svg.addEventListener("pointerdown", (event) => {
      const box = svg.getBoundingClientRect();
      const ms = (((event.clientX - box.left) / box.width) * W - LEFT) / (W - LEFT) * span;
      stop();
      show(frames.findIndex((frame) => frame.ms >= ms));
    });
    lanes.replaceChildren(svg);
    const kinds = Object.keys(MEANING).filter((kind) => run.ranks.some((moments) => moments.some((m) => m[0] === kind)));
    legend.replaceChildren(...kinds.map((kind) => make("span", {}, make("i", { class: "legend-" + kind }), `${MEANING[kind][0]}${kind === "STEP" ? "" : " (" + kind + ")"}`)));
  }

  // --- the ranks ---
  let views = [];
  function buildCards() {
    cards.replaceChildren();
    const largest = Math.max(...run.units.map((unit) => unit.bytes));
    views = run.ranks.map((_, rank) => {
      const units = run.units.map((unit, n) => {
        const shard = make("span", { class: "bar-shard" });
        const whole = make("span", { class: "bar-whole" });
        const share = Math.max(Math.sqrt(unit.bytes / largest) * 100, 14);
        const bar = make("span", { class: "bar", style: `width:${share}%` }, shard, whole);
        shard.style.width = (100 * unit.shard) / unit.bytes + "%";
        const tag = make("span", { class: "unit-tag" });
        return { row: make("div", { class: "unit", title: `${unit.bytes.toLocaleString("en")} bytes whole, ${unit.shard.toLocaleString("en")} stored` }, make("span", { class: "unit-name" }, nameOf(run, n)), make("span", { class: "bar-room" }, bar), tag), bar, tag };
      });
      const lines = ["shards", "gathered", "in reduction", "gradient shards", "Adam"].map((text) => {
        const value = make("b");
        return { row: make("span", {}, text + " ", value), value };
      });
      const doing = make("p", { class: "card-doing" });
      const card = make("section", { class: "card" }, make("h3", {}, "rank " + rank), doing, ...units.map((u) => u.row), make("p", { class: "card-bytes" }, ...lines.map((l) => l.row)));
      cards.append(card);
      return { card, units, lines, doing };
    });
  }

  function flights(rank, upTo) {
    const open = new Map();
    run.ranks[rank].slice(0, upTo + 1).forEach((m) => {
      if (["AG", "RS", "AR", "F", "B"].includes(m[0])) m[2] ? open.set(m[0] + m[1], m) : open.delete(m[0] + m[1]);
    });
    return [...open.values()];
  }

  function drawRank(rank, n, isHere) {
    const moments = run.ranks[rank], view = views[rank];
    // After moment n holds what was noted before moment n + 1; at the very end, what was noted last.
    const held = moments[Math.min(n + 1, moments.length - 1)];
    const open = flights(rank, n);
    let gathered = 0;
    run.units.forEach((unit, u) => {
      const state = held[7][u];
      // A unit that nobody shares computes in its shard; nothing is gathered for it.
      if (state !== "S" && unit.shard < unit.bytes) gathered += unit.bytes;
      const { bar, tag } = view.units[u];
      bar.dataset.state = state;
      const now = open.filter((m) => m[1] === u).map((m) => m[0]);
      view.units[u].row.classList.toggle("is-computing", now.includes("F") || now.includes("B"));
      tag.textContent = now.filter((k) => k !== "F" && k !== "B").join(" ") || (now.includes("B") ? "B" : now.includes("F") ? "F" : "");
    });
    const inFlight = open.filter((m) => m[0] === "RS" || m[0] === "AR");
    const values = [
      run.units.reduce((sum, unit) => sum + unit.shard, 0), gathered, inFlight.reduce((sum, m) => sum + m[4], 0),
      held[9].reduce((a, b) => a + b, 0), held[10],
    ];
    view.lines.forEach((line, i) => { line.value.textContent = bytes(values[i]); });
    const last = n >= 0 ? moments[n] : null;
    view.doing.textContent = last ? sentence(last) : "not begun";
    view.card.classList.toggle("is-here", isHere);
  }

  function sentence(m) {
    const [what, begins, ends] = MEANING[m[0]] || [m[0], "", ""];
    const unit = m[1] < 0 ? "" : " of " + nameOf(run, m[1]);
    return `${what}${unit} ${m[2] ? begins : ends}`;
  }

  // --- moving ---
  function show(n) {
    at = Math.max(0, Math.min(n < 0 ? frames.length - 1 : n, frames.length - 1));
    const frame = frames[at], m = frame.moment;
    slider.value = at;
    slider.setAttribute("aria-valuetext", `moment ${at + 1}: ${sentence(m)}`);
    clock.textContent = `${at + 1} / ${frames.length} \u00b7 ${frame.ms.toFixed(1)} ms`;
    const others = m[5].map(String), last = others.pop();
    const who = others.length ? ` between ranks ${others.join(", ")} and ${last}` : "";
    const size = m[4] ? `, ${bytes(m[4])}` : "";
    headline.replaceChildren(make("strong", {}, "Rank " + frame.rank), ": " + sentence(m) + who + size);
    const stack = run.stacks[m[6]] || [];
    running.replaceChildren("Running: ");
    stack.forEach(([name, file, href, isHook], i) => running.append((i ? " \u2190 " : "") + (isHook ? "hook laid by " : ""), make("a", { href, title: file }, make("code", {}, name))));
    if (!stack.length) running.append("the training loop");
    if (cursor) cursor.setAttribute("x", LEFT + ((W - LEFT) * frame.ms) / span);
    frame.seen.forEach((n, rank) => drawRank(rank, n, rank === frame.rank));
  }
  function stop() { clearInterval(timer); timer = null; play.textContent = "Play"; }
  function toggle() {
    if (timer) return stop();
    if (at >= frames.length - 1) show(0);
    play.textContent = "Pause";
    timer = setInterval(() => (at >= frames.length - 1 ? stop() : show(at + 1)), 350);
  }
  play.addEventListener("click", toggle);
  back.addEventListener("click", () => { stop(); show(Math.max(at - 1, 0)); });
  on.addEventListener("click", () => { stop(); show(at + 1); });
  slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
  place.addEventListener("keydown", (event) => {
    if (event.target.tagName === "SELECT" || event.ctrlKey || event.metaKey || event.altKey) return;
    const onButton = event.target.tagName === "BUTTON";
    const moves = { ArrowLeft: () => show(Math.max(at - 1, 0)), ArrowRight: () => show(at + 1), Home: () => show(0), End: () => show(frames.length - 1) };
    if (event.key === " " && !onButton) { event.preventDefault(); toggle(); }
    else if (moves[event.key]) { event.preventDefault(); event.stopPropagation(); stop(); moves[event.key](); }
  });

  const asked = location.hash.slice(1);
  if (available.has(asked)) asked.split("-").forEach((part, n) => { choice[KEYS[n]] = part; });
  load();
})();
