/* Replays of a step without one line of the engine. The data is in counterfactuals.js. The page contains a text for each
   line; this script shows the text of the selected line, and draws its replay. */
(function (root) {
  "use strict";
  const { document, minifsdpCounterfactuals: data } = root, place = document.getElementById("counterfactual");
  if (!place || !data || !data.entries.length) return;
  const ROWS = ["CPU", "compute", "gather", "reduce"], LEFT = 62, COLUMN = 52, BOX = 46, ROW = 24, GAP = 12, BARS = 34;

  const make = (tag, attributes, ...children) => {
    const element = Object.assign(document.createElement(tag), attributes);
    element.append(...children);
    return element;
  };
  const shape = (tag, attributes, ...children) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };

  // --- controls ---
  const groups = [...new Set(data.entries.map((one) => one.group))];
  const choice = make("select", { id: "counterfactual-choice" }, ...groups.map((label) =>
    make("optgroup", { label }, ...data.entries.filter((one) => one.group === label).map((one) => make("option", { value: one.name, textContent: one.title })))));
  const intact = make("input", { id: "counterfactual-intact", type: "checkbox" });
  const range = make("input", { id: "counterfactual-column", type: "range", min: 1, step: 1 });
  const back = make("button", { type: "button", textContent: "Back", onclick: () => move(-1) });
  const next = make("button", { type: "button", textContent: "Next", onclick: () => move(1) });
  const now = make("p", { className: "counterfactual-now" });
  const scroller = make("div", { className: "recorded-scroll", tabIndex: 0 });
  now.setAttribute("role", "status");
  scroller.setAttribute("role", "region");
  scroller.setAttribute("aria-label", "The replayed step");
  place.prepend(
    make("div", { className: "counterfactual-choices" }, make("label", {}, "Remove", choice), make("label", {}, intact, "Keep the line (correct step)")),
    make("figure", { className: "recorded" }, scroller),
    make("div", { className: "counterfactual-choices" }, make("label", {}, "Column", range), back, next), now);

  // --- the selected replay ---
  const entry = () => data.entries.find((one) => one.name === choice.value);
  const replay = () => (intact.checked ? data.intact[entry().model] : entry());
  const boxes = () => replay().boxes.map(([name, row, column, wrong, written, used], index) => ({ name, row, column, wrong, written, used, index }));
  /* Starts at the wrong order, or at the end if only the memory differs. */
  function select() {
    const { race } = entry(), all = boxes(), last = Math.max(...all.map((box) => box.column));
    range.max = last;
    range.value = race && !intact.checked ? all[race.new[0]].column : last;
    for (const section of place.querySelectorAll("section")) section.hidden = section.dataset.name !== choice.value;
    show();
  }
  function move(by) {
    range.value = Number(range.value) + by;
    show();
  }
  function show() {
    const column = Number(range.value), here = boxes().filter((box) => box.column === column);
    const used = Math.max(0, ...here.map((box) => box.used));
    now.textContent = [`Column ${column} of ${range.max}: ${here.map((box) => box.name).join(", ")}.`, ...here.flatMap(words),
      used ? `${used.toLocaleString("en")} bytes in use; the peak is ${replay().peak.toLocaleString("en")}.` : ""].join(" ");
    range.setAttribute("aria-valuetext", now.textContent);
    back.disabled = column === 1;
    next.disabled = column === Number(range.max);
    scroller.replaceChildren(picture(column));
    const x = (LEFT + COLUMN * column) * (scroller.scrollWidth / width()), { clientWidth, scrollLeft } = scroller;
    if (x > scrollLeft + clientWidth || x - 2 * COLUMN < scrollLeft) scroller.scrollLeft = x - clientWidth / 2;
  }
  function words({ name, wrong, written, index }) {
    const { race } = replay(), texts = [];
    if (race && race.new[0] === index) texts.push(`Too early: ${entry().early}`);
    if (race && race.old[0] === index) texts.push(`Too late: ${name} should run before the red box at the other end of the dashed line.`);
    if (wrong) texts.push(`${wrong} of ${written} elements that ${name} writes are wrong.`);
    return texts;
  }

  // --- the picture ---
  const width = () => LEFT + COLUMN * Number(range.max) + 8;
  const left = (column) => LEFT + COLUMN * (column - 1) + 3;
  const top = (row) => 4 + (ROW + GAP) * ROWS.indexOf(row);
  function picture(column) {
    const wide = width(), bottom = top("reduce") + ROW + GAP, height = bottom + BARS + 4, all = boxes(), { race, frees } = replay();
    const svg = shape("svg", { viewBox: `0 0 ${wide} ${height}`, role: "img", style: `--wide:${wide}px`, "aria-label": `Replay: ${entry().title}` });
    for (const row of ROWS) {
      svg.append(shape("rect", { class: "cf-band", x: LEFT, y: top(row), width: wide - LEFT - 4, height: ROW }));
      svg.append(shape("text", { class: "soft", x: LEFT - 6, y: top(row) + 16, "text-anchor": "end" }, row));
    }
    svg.append(shape("text", { class: "soft", x: LEFT - 6, y: bottom + BARS - 2, "text-anchor": "end" }, "in use"));
    const most = Math.max(...[...data.intact[entry().model].boxes, ...entry().boxes].map((box) => box[5]));
    for (let n = 1; n <= Number(range.max); n++) {
      const tall = (BARS * Math.max(0, ...all.filter((box) => box.column === n).map((box) => box.used))) / most;
      svg.append(shape("rect", { class: "cf-memory", x: left(n), y: bottom + BARS - tall, width: BOX, height: tall }));
    }
    for (const [unit, at] of frees) {
      const x = left(at) + BOX + 1;
      svg.append(shape("path", { class: "cf-free", d: `M${x - 4},${top("CPU") + 8} h8 l-4,7 z` }, shape("title", {}, `FREE${unit}`)));
    }
    svg.append(shape("rect", { class: "cf-now", x: left(column) - 2, y: 1, width: BOX + 4, height: height - 3, rx: 3 }));
    svg.append(...all.map((box) => drawn(box, column)));
    if (race && column >= all[race.new[0]].column) svg.append(line(all[race.old[0]], all[race.new[0]]));
    return svg;
  }
  function drawn({ name, row, column, wrong, written }, current) {
    const kind = name.replace(/\d+$/, ""), isLater = column > current, isWrong = wrong && !isLater;
    const result = written ? `, ${wrong} of ${written} elements wrong` : "";
    return shape("g", { class: `cf-box cf-${kind}${isWrong ? " cf-wrong" : ""}${isLater ? " cf-later" : ""}` },
      shape("title", {}, `${name}${isLater ? "" : result}`),
      shape("rect", { x: left(column), y: top(row) + 2, width: BOX, height: ROW - 4, rx: 2.5 }),
      shape("text", { x: left(column) + BOX / 2, y: top(row) + 16 }, isWrong ? `${name} \u2260` : name));
  }
  /* The missing order: from the box that should run first to the box that ran too early. */
  function line(old, early) {
    const end = ({ column, row }, other) => {
      const isBelow = top(other.row) > top(row);
      return `${left(column) + BOX / 2},${top(row) + (isBelow ? ROW - 2 : 2)}`;
    };
    return shape("path", { class: "cf-missing", d: `M${end(old, early)} L${end(early, old)}` });
  }

  choice.addEventListener("change", select);
  intact.addEventListener("change", select);
  range.addEventListener("input", show);
  select();
})(window);
