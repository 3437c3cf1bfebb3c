/* The step player on its page: the shown runs, the current moment, and the controls. A run of the site is a script that
   calls minifsdpRun(key, data). player-run.js explains runs, player-file.js reads the user's recordings, player-draw.js
   and player-source.js draw. The address stores runs and moment: #key/30, or #key+key/30 for two runs next to each
   other. */
(function (root) {
  "use strict";
  const player = root.minifsdpPlayer;
  const place = document.getElementById("player");
  if (!place) return;
  const { make, bytes } = player;

  const CHOICES = {
    api: { label: "API", options: { fsdp1: "FullyShardedDataParallel", fsdp2: "fully_shard", torch1: "torch's FullyShardedDataParallel", torch2: "torch's fully_shard" } },
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
  const FSDP2_NAMES = { full: "reshard_after_forward=True", zero2: "reshard_after_forward=False", hybrid: "2-D mesh, True", hybrid2: "2-D mesh, False" };
  const KEYS = Object.keys(CHOICES);
  const DEFAULT = "fsdp2-full-pre-block-2";
  const BASE = 350; // milliseconds for a moment at speed 1
  const available = new Set(root.minifsdpRuns || []);
  const loaded = {}, waiting = new Set();

  const keyOf = (choice) => KEYS.map((k) => choice[k]).join("-");
  const choiceOf = (key) => Object.fromEntries(key.split("-").map((part, n) => [KEYS[n], part]));
  const option = (choice, key) => (key === "strategy" && choice.api.endsWith("2") && FSDP2_NAMES[choice[key]]) || CHOICES[key].options[choice[key]];
  const titleOf = (choice) => ["api", "strategy", "prefetch", "wrap"].map((key) => option(choice, key)).join(" \u00b7 ");

  // --- selecting a run ---
  const exists = (partial) => [...available].some((name) => name.split("-").every((part, n) => !(KEYS[n] in partial) || partial[KEYS[n]] === part));
  /* Not every combination was recorded. The newest choice is kept, and the others change to the first recorded
     combination. */
  function settle(choice, fixed) {
    const kept = { [fixed]: choice[fixed] };
    KEYS.filter((k) => k !== fixed).forEach((key) => {
      const wanted = [choice[key], ...Object.keys(CHOICES[key].options)];
      choice[key] = wanted.find((value) => exists({ ...kept, [key]: value }));
      kept[key] = choice[key];
    });
  }

  /* A form for one of the runs: a recorded run of the site, or a file. */
  function chooser(number) {
    const one = { choice: choiceOf(DEFAULT), file: null, selects: {} };
    const id = (key) => "player-" + key + (number ? "-" + (number + 1) : "");
    const file = make("input", { type: "file", id: id("file"), class: "player-file", accept: ".json,application/json", tabindex: -1 });
    file.setAttribute("aria-label", "A recording of your own");
    file.addEventListener("change", () => { if (file.files[0]) open(one, file.files[0]); file.value = ""; });
    one.name = make("span", { class: "player-name" });
    const leave = () => { one.file = null; load(); };
    one.back = make("button", { type: "button", class: "player-button player-back", textContent: "Recorded runs", onclick: leave });
    one.form = make("form", { class: "player-form", onsubmit: () => false });
    one.form.setAttribute("aria-label", number ? "Second run" : "First run");
    KEYS.forEach((key) => {
      one.selects[key] = make("select", { id: id(key) });
      one.selects[key].addEventListener("change", () => { one.choice[key] = one.selects[key].value; settle(one.choice, key); load(); });
      one.form.append(make("label", {}, CHOICES[key].label, one.selects[key]));
    });
    const pick = make("button", { type: "button", class: "player-button player-open", textContent: "Open\u2026", onclick: () => file.click() });
    pick.title = "A recording of your own: a trace by train_gpt.py --trace; it can be dropped onto the page, too";
    one.form.append(one.name, one.back, pick, file);
    return one;
  }
  function fill({ choice, selects, form, file, name, back }) {
    KEYS.forEach((key) => {
      selects[key].replaceChildren();
      Object.keys(CHOICES[key].options).forEach((value) => {
        // Shown if some run of this api has this value; selecting it can change the other choices.
        if (!exists(key === "api" ? { api: value } : { api: choice.api, [key]: value })) return;
        selects[key].append(make("option", { value, textContent: option({ ...choice, [key]: value }, key) }));
      });
      selects[key].value = choice[key];
    });
    form.classList.toggle("has-file", Boolean(file));
    name.textContent = file ? file.title : "";
    name.hidden = back.hidden = !file;
  }
  const both = [chooser(0), chooser(1)];
  let number = 1;
  const shown = () => both.slice(0, number);

  // --- the page ---
  const button = (text, title, action, kind = "") => make("button", { type: "button", class: "player-button " + kind, textContent: text, title, onclick: action });
  const beside = button("Compare two runs", "Shows a second run on the same axis", () => {
    number = 3 - number;
    if (number === 2) {
      // Two equal runs show no difference, so the second one has another strategy.
      const choice = both[1].choice = { ...both[0].choice, strategy: both[0].choice.strategy === "full" ? "zero2" : "full" };
      settle(choice, "strategy");
    }
    load();
  }, "player-beside");
  /* The same model with torch on the left, and with this package on the right. */
  const versus = button("Compare with torch", "Shows torch's FSDP on the left and this package on the right", () => {
    const { api, strategy } = both[0].choice, rest = `${api.slice(-1)}-${strategy === "zero2" ? strategy : "full"}-pre-block-2`;
    number = 2;
    ["torch", "fsdp"].forEach((library, n) => Object.assign(both[n], { choice: choiceOf(library + rest), file: null }));
    load();
  }, "player-versus");
  const play = button("Play", "Space", toggle, "player-play");
  const back = button("\u2190", "Previous event", () => { stop(); show(at - 1); });
  const on = button("\u2192", "Next event", () => { stop(); show(at + 1); });
  back.setAttribute("aria-label", back.title);
  on.setAttribute("aria-label", on.title);
  const slider = make("input", { type: "range", min: 0, value: 0, class: "player-slider" });
  slider.setAttribute("aria-label", "Moment");
  const speed = make("select", { class: "player-speed", id: "player-speed" }, ...[0.25, 0.5, 1, 2, 5, 20].map((value) => make("option", { value, textContent: value + "\u00d7" })));
  speed.value = 1;
  const clock = make("output", { class: "player-clock" });
  const headline = make("p", { class: "player-now" });
  const status = make("p", { class: "player-status" });
  status.setAttribute("role", "status");
  const legend = make("p", { class: "player-legend" });
  const source = player.sourcePanel(place.dataset.runs + "source.js");
  const stage = make("div", { class: "player-stage" });
  const choosers = make("div", { class: "player-choosers" }, both[0].form, both[1].form, make("div", { class: "player-pairs" }, versus, beside));
  place.append(player.patterns(), choosers,
    make("div", { class: "player-controls" }, back, play, on, slider, clock, make("label", { class: "player-speeds" }, "Speed", speed)),
    headline, stage, status, legend);

  // --- loading ---
  let frames = [], views = [], runs = [], at = 0, timer = null, wanted = 0;
  root.minifsdpRun = (key, data) => {
    loaded[key] = player.fromSite(key, titleOf(choiceOf(key)), data);
    waiting.delete(key);
    if (shown().every((one) => runOf(one))) begin();
  };
  const runOf = (one) => one.file || loaded[keyOf(one.choice)];

  function load(moment = 0) {
    stop();
    wanted = moment;
    choosers.dataset.runs = number;
    both[1].form.hidden = number === 1;
    versus.hidden = number === 2;
    beside.textContent = number === 1 ? "Compare two runs" : "Show only the first";
    both.forEach(fill);
    const missing = shown().filter((one) => !runOf(one)).map((one) => keyOf(one.choice));
    if (!missing.length) return begin();
    say("Loading " + missing.join(" and ") + " \u2026");
    missing.filter((key) => !waiting.has(key)).forEach((key) => {
      waiting.add(key);
      const script = make("script", { src: place.dataset.runs + key + ".js" });
      script.onerror = () => { waiting.delete(key); say(`The recording ${key} could not be loaded.`, true); };
      document.head.append(script);
    });
  }
  function say(text, isError = false) {
    status.textContent = text;
    status.classList.toggle("is-error", isError);
    // An error is shown at the top, where the user selected the file.
    isError ? headline.before(status) : stage.after(status);
  }

  function open(one, file) {
    const reader = new FileReader();
    reader.onload = () => {
      try {
        one.file = player.readTrace(file.name, reader.result);
      } catch (error) {
        return say(error.message, true);
      }
      load();
    };
    reader.onerror = () => say(`${file.name} could not be read: ${reader.error.message}`, true);
    reader.readAsText(file);
  }

  function begin() {
    runs = shown().map(runOf);
    frames = player.frames(runs);
    const span = frames[frames.length - 1].ms || 1;
    const peakOf = (run, rank) => { const { stairs, peak } = player.memory(run, rank); return stairs[peak].total; };
    const most = Math.max(1, ...runs.flatMap((run) => run.ranks.map((_, rank) => peakOf(run, rank))));
    // With few ranks, each gets more space.
    const room = runs.length * Math.max(...runs.map((run) => run.ranks.length)) > 2 ? 30 : 58;
    views = runs.map((run, r) => {
      const go = (ms) => { stop(); show(frames.findIndex((frame) => frame.ms >= ms), -1); };
      const lanes = player.lanes(run, { span, most, room, go });
      const cards = player.cards(run, { step: (rank, by) => step(r, rank, by), to: (rank, n) => goTo(r, rank, n) });
      const title = make("h2", { class: "player-title", textContent: run.title });
      return { lanes, cards, element: make("section", { class: "player-run", "data-slot": r }, title, lanes.element, cards.element) };
    });
    stage.dataset.runs = runs.length;
    stage.dataset.ranks = Math.max(...runs.map((run) => run.ranks.length));
    stage.replaceChildren(...views.map((view) => view.element), source.element);
    views.forEach((view) => view.lanes.begin());
    legend.replaceChildren(...player.legend(runs));
    slider.max = frames.length - 1;
    const about = (run) => `${run.ranks.flat().length} moments on ${run.ranks.length} ranks, ${run.units.length} units. ${run.remark}`.trim();
    say(runs.map(about).join(" Beside it: "));
    // replay-page.js computes the step of these runs on other machines.
    place.dispatchEvent(new CustomEvent("runs", { detail: runs }));
    show(Math.min(wanted, frames.length - 1));
  }

  // --- moving ---
  /* Moment n of all ranks; a number after the last moment means the last one, and -1 the state before the first. */
  function show(n, behind = 0) {
    at = n < 0 ? (behind < 0 ? frames.length - 1 : 0) : Math.min(n, frames.length - 1);
    const { r, rank, moment: m, ms, seen } = frames[at], run = runs[r];
    slider.value = at;
    slider.setAttribute("aria-valuetext", `moment ${at + 1}: ${player.sentence(run, m)}`);
    clock.textContent = `${at + 1} / ${frames.length} \u00b7 ${ms.toFixed(1)} ms`;
    const others = m.group.map(String), last = others.pop();
    const who = others.length ? ` between ranks ${others.join(", ")} and ${last}` : "";
    const side = runs.length > 1 ? ["Left, ", "Right, "][r] : "";
    const name = side + (side ? "r" : "R") + player.rankName(run, rank).slice(1);
    headline.replaceChildren(make("strong", {}, name), `: ${player.sentence(run, m)}${who}${m.bytes ? ", " + bytes(m.bytes) : ""}`);
    views.forEach((view, v) => {
      view.lanes.move(ms);
      view.cards.show(seen[v], v === r ? rank : -1);
    });
    source.show(run, m);
    keep();
  }
  /* To the next or the previous moment of one rank. */
  function step(r, rank, by) {
    const here = frames[at].seen[r][rank];
    const isAt = frames[at].r === r && frames[at].rank === rank;
    const goal = by > 0 || isAt ? here + by : here;
    goTo(r, rank, goal);
  }
  function goTo(r, rank, n) {
    stop();
    const found = frames.findIndex((f) => f.r === r && f.rank === rank && f.n === n);
    if (found >= 0) show(found);
  }
  function stop() {
    clearTimeout(timer);
    timer = null;
    play.textContent = "Play";
    headline.setAttribute("aria-live", "polite");
  }
  function toggle() {
    if (timer) return stop();
    if (at >= frames.length - 1) show(0);
    play.textContent = "Pause";
    // A screen reader cannot read texts this fast.
    headline.setAttribute("aria-live", "off");
    const next = () => {
      if (at >= frames.length - 1) return stop();
      show(at + 1);
      timer = setTimeout(next, BASE / speed.value);
    };
    timer = setTimeout(next, BASE / speed.value);
  }
  slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });

  // --- the address --- With a delay, because a browser refuses an address that changes too often.
  let keeping = null;
  function keep() {
    clearTimeout(keeping);
    keeping = setTimeout(() => {
      const hash = shown().some((one) => one.file) ? "" : "#" + runs.map((run) => run.key).join("+") + "/" + (at + 1);
      if (location.hash !== hash) history.replaceState(null, "", hash || location.pathname + location.search);
    }, 250);
  }
  /* Reads the runs from the address; returns false if it contains none. */
  function follow() {
    const [, keys, moment] = /^#([^/]*)(?:\/(\d+))?$/.exec(location.hash) || [];
    const asked = keys ? keys.split("+") : [];
    if (!asked.length || asked.length > 2 || !asked.every((key) => available.has(key))) return false;
    number = asked.length;
    asked.forEach((key, n) => { both[n].choice = choiceOf(key); both[n].file = null; });
    load(Math.max(Number(moment || 1) - 1, 0));
    return true;
  }
  root.addEventListener("hashchange", follow);

  // --- keys ---
  const isInSight = () => { const box = place.getBoundingClientRect(); return box.bottom > 120 && box.top < innerHeight / 2; };
  const moves = { ArrowLeft: () => show(at - 1), ArrowRight: () => show(at + 1), Home: () => show(0), End: () => show(frames.length - 1) };
  document.addEventListener("keydown", (event) => {
    const { target, key } = event;
    if (!frames.length || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    // Before the first click, keys belong to the page; the player handles them while it is visible.
    if (!(place.contains(target) || (target === document.body && isInSight()))) return;
    if (target.tagName === "SELECT" || target.closest(".source-box")) return;
    const digit = /^Digit(\d)$/.exec(event.code);
    let done = true;
    if (key === " " && target.tagName !== "BUTTON" && target.tagName !== "A") toggle();
    else if (moves[key]) { stop(); moves[key](); }
    else if (digit && Number(digit[1]) < runs[0].ranks.length) step(0, Number(digit[1]), event.shiftKey ? -1 : 1);
    else done = false;
    if (done) { event.preventDefault(); event.stopPropagation(); }
  });

  // --- dropping a file ---
  const hasFile = (event) => event.dataTransfer && [...event.dataTransfer.types].includes("Files");
  document.addEventListener("dragover", (event) => { if (hasFile(event)) { event.preventDefault(); place.classList.add("is-over"); } });
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) place.classList.remove("is-over"); });
  document.addEventListener("drop", (event) => {
    if (!hasFile(event)) return;
    event.preventDefault();
    place.classList.remove("is-over");
    const onto = event.target.closest ? event.target.closest(".player-run") : null;
    open(both[(onto && Number(onto.dataset.slot)) || 0], event.dataTransfer.files[0]);
  });

  if (!follow()) load();
})(window);
