/* The calculator: the formulas of minifsdp/tools (formulas.py, peaks.py, cost.py), and a form around them.
   A test runs both on the same jobs and compares every number. */
(function (root, factory) {
  "use strict";
  const cost = factory();
  if (typeof module === "object" && module.exports) module.exports = cost;
  else { root.minifsdpCost = cost; cost.form(root.document); }
})(typeof self !== "undefined" ? self : this, function () {
  "use strict";
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  const numelOf = (shape) => shape.reduce((a, b) => a * b, 1);
  const up = (n, multiple) => Math.ceil(n / multiple) * multiple;
  const DTYPES = { float32: 4, bfloat16: 2, float16: 2 };
  const STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"];

  // --- stored ---
  const paddedRow = (shapes, numShards) => up(sum(shapes.map(numelOf)), numShards);
  const paddedPerParameter = (shapes, numShards) => sum(shapes.map((shape) => up(shape[0], numShards) * numelOf(shape.slice(1))));

  // --- at the worst moment ---
  function peakOfForward(sizes, rootSize, { keeps, ahead, sorts }) {
    const twice = sorts ? 2 : 1;
    const moments = [twice * rootSize];
    sizes.forEach((size, i) => {
      const there = keeps ? sum(sizes.slice(0, i + 1)) : size;
      moments.push(rootSize + there + sum(sizes.slice(i + 1, i + 1 + ahead)) + (sorts ? size : 0));
    });
    return Math.max(...moments);
  }

  function gatheredElsewhere(units, i, keeps, ahead, hasRoot) {
    if (keeps) return sum(units.slice(0, i));
    const first = hasRoot ? 1 : 0;
    return sum(units.slice(Math.max(first, i - ahead), Math.max(i, 0))) + (hasRoot && i ? units[0] : 0);
  }

  function gradientsAtRest(units, i, { numShards, gradient, stored, held, reduces }) {
    if (held === "reduced") return (stored * sum(units)) / numShards;
    if (!reduces) return gradient * sum(held === "unreduced" ? units : units.slice(i + 1));
    const waiting = held === "unreduced" ? gradient * sum(units.slice(0, i + 1)) : 0;
    return waiting + (stored * sum(units.slice(i + 2))) / numShards;
  }

  function peakOfBackward(sizes, rootSize, o) {
    const units = rootSize ? [rootSize, ...sizes] : [...sizes];
    const share = o.numShards > 1 ? 1 / o.numShards : 0;
    let most = 0;
    for (let i = units.length - 1; i >= 0; i--) {
      const here = units[i], after = i + 1 < units.length ? units[i + 1] : 0;
      const elsewhere = o.isReplicated ? 0 : gatheredElsewhere(units, i, o.keeps, o.ahead, rootSize > 0);
      const waiting = i ? o.gradient * rootSize : 0;
      const gathered = o.isReplicated ? 0 : here;
      const joins = o.joins[rootSize ? i : i + 1];
      const twice = joins ? gathered + 2 * o.gradient * here : 0;
      const underWay = o.reduces ? o.reduction * after * (1 + share) : 0;
      const stages = [underWay + gathered + (o.sorts ? here : 0), underWay + gathered + o.gradient * here, twice];
      if (o.reduces) {
        // Of the reduction of the unit before a piece is left when this gradient is put together or packed.
        const left = (o.reduction * after) / o.numShards;
        const cast = o.stored !== o.reduction ? (o.stored * after) / o.numShards : 0;
        stages.push(left + twice, left + o.reduction * here * (1 + share) + cast);
        if (o.sorts || o.reduction !== o.gradient) stages.push(left + (o.gradient + o.reduction) * here);
      }
      most = Math.max(most, elsewhere + gradientsAtRest(units, i, o) + waiting + Math.max(...stages));
    }
    return most;
  }

  // --- sent ---
  const gatherSends = (bytes, ranks) => (bytes * (ranks - 1)) / ranks;
  const allReduceSends = (bytes, ranks) => 2 * gatherSends(bytes, ranks);

  // --- all together ---
  const DEFAULTS = {
    root: [], strategy: "FULL_SHARD", numShards: 1, numReplicas: 1, perParameter: false, restsWith: null, stored: "float32",
    compute: null, reduce: null, optimizer: 8, scratch: 0, buffers: 0, buffer: null, offload: false, forwardPrefetch: false,
    backwardPrefetch: true, microBatches: 1, noSync: false, activations: 0,
  };

  function costOf(given) {
    const job = { ...DEFAULTS, ...given };
    if (!STRATEGIES.includes(job.strategy)) throw new Error("strategy must be one of " + STRATEGIES.join(", "));
    if (Math.min(job.numShards, job.numReplicas, job.microBatches) < 1) throw new Error("numbers of ranks and batches begin at 1");
    const shards = job.strategy === "NO_SHARD" ? 1 : job.numShards;
    const keeps = ["SHARD_GRAD_OP", "NO_SHARD", "_HYBRID_SHARD_ZERO2"].includes(job.strategy) || shards === 1;
    const numel = (shapes) => (job.perParameter ? paddedPerParameter : paddedRow)(shapes, shards);
    const atRest = DTYPES[job.stored], width = DTYPES[job.compute || job.stored];
    const travel = DTYPES[job.reduce || job.compute || job.stored] / width;
    const numels = job.units.map(numel), rootNumel = numel(job.root);
    const elements = (sum(numels) + rootNumel) / shards;
    const sizes = numels.map((n) => n * width), rootSize = rootNumel * width;
    const borrowed = shards === 1 && (job.compute || job.stored) === job.stored && !job.offload;
    // Of the root and of each unit: whether its gradient is put together from those of its parameters.
    const joins = [job.root, ...job.units].map(
      (shapes, i) => !job.perParameter && (shapes.length > 1 || [rootNumel, ...numels][i] > sum(shapes.map(numelOf))));
    const sorts = job.perParameter && job.units.some((shapes) => shapes.length > 1);
    const buffers = job.buffers * DTYPES[job.buffer || job.stored];
    const states = elements * (atRest + job.optimizer);
    const here = job.offload ? 0 : states, host = job.offload ? states : 0;
    const gradients = job.offload ? 0 : elements * atRest;
    const rests = job.restsWith ? sum(sizes) / job.restsWith : 0;
    const many = job.microBatches > 1;

    const forward = borrowed ? 0 : rests + peakOfForward(sizes, rootSize, { keeps, ahead: Number(job.forwardPrefetch), sorts });
    const backwardWith = (held, reduces) => rests + peakOfBackward(sizes, rootSize, {
      numShards: shards, keeps, ahead: Number(job.backwardPrefetch), gradient: 1, reduction: travel,
      stored: job.offload ? 0 : atRest / width, held, reduces, joins, sorts, isReplicated: borrowed,
    });
    let backward;
    if (!many) backward = backwardWith("nothing", true);
    else if (!job.noSync) backward = Math.max(backwardWith("nothing", true), backwardWith("reduced", true));
    else {
      const middle = job.microBatches > 2 ? [backwardWith("unreduced", false)] : [];
      backward = Math.max(backwardWith("nothing", false), ...middle, backwardWith("unreduced", true));
    }
    const carried = many && !job.noSync ? gradients : 0;
    const unreduced = many && job.noSync ? sum(sizes) + rootSize : 0;
    const resting = here + buffers;

    let times = 0, ofRoot = 0;
    if (shards > 1) {
      times = keeps ? (job.noSync ? 1 : job.microBatches) : 2 * job.microBatches;
      ofRoot = keeps ? times : job.microBatches;
    }
    const reductions = job.noSync ? 1 : job.microBatches;
    const gathered = times * sum(sizes) + ofRoot * rootSize;
    let gather = gatherSends(gathered, shards);
    if (job.restsWith && !keeps) {
      const away = job.microBatches * sum(sizes);
      gather = gatherSends(gathered - away, shards) + gatherSends(away, job.restsWith);
    }
    const reduced = reductions * travel * (sum(sizes) + rootSize);
    const numUnits = job.units.length, hasRoot = job.root.length ? 1 : 0;
    const numReductions = reductions * (numUnits + hasRoot);
    return {
      stored: resting, host, afterBackward: resting + gradients,
      peakForward: resting + carried + unreduced + forward + job.activations,
      peakBackward: resting + backward + job.activations,
      peakOptimizer: resting + (job.offload ? 0 : elements * (atRest + job.scratch)),
      sent: { AG: gather, RS: gatherSends(reduced, shards), AR: allReduceSends(reduced / shards, job.numReplicas) },
      numCollectives: {
        AG: times * numUnits + ofRoot * hasRoot, RS: shards > 1 ? numReductions : 0, AR: job.numReplicas > 1 ? numReductions : 0,
      },
    };
  }

  // --- the model, from a few lines of text ---
  function parseModel(text) {
    const units = [];
    let rootShapes = [];
    text.split("\n").map((line) => line.replace(/#.*/, "").trim()).filter(Boolean).forEach((line, n) => {
      const found = /^(?:(root)\s*:|(\d+)\s*\*)?\s*(.+)$/i.exec(line);
      const shapes = found[3].split(",").map((part) => part.trim().split(/\s*x\s*/i).map((s) => (/^\d+$/.test(s) ? Number(s) : NaN)));
      if (shapes.some((shape) => shape.some((s) => !(s > 0)))) throw new Error(`line ${n + 1}: write shapes as 4096x1024, 4096`);
      if (found[1]) rootShapes = rootShapes.concat(shapes);
      else for (let i = 0; i < Number(found[2] || 1); i++) units.push(shapes);
    });
    if (!units.length && !rootShapes.length) throw new Error("give at least one unit");
    return { units, root: rootShapes };
  }

  const gpt = (layers, d, vocabulary, context) =>
    `root: ${vocabulary}x${d}, ${context}x${d}, ${d}, ${d}\n${layers} * ${3 * d}x${d}, ${3 * d}, ${d}x${d}, ${d}, ${4 * d}x${d}, ${4 * d}, ${d}x${4 * d}, ${d}, ${d}, ${d}, ${d}, ${d}`;
  const llama = (layers, d, hidden, kv, vocabulary) =>
    `root: ${vocabulary}x${d}, ${d}, ${vocabulary}x${d}\n${layers} * ${d}x${d}, ${kv}x${d}, ${kv}x${d}, ${d}x${d}, ${hidden}x${d}, ${hidden}x${d}, ${d}x${hidden}, ${d}, ${d}`;
  const PRESETS = {
    "GPT, 124 M": gpt(12, 768, 50257, 1024),
    "GPT, 1.6 B": gpt(48, 1600, 50257, 1024),
    "7 B, gated": llama(32, 4096, 11008, 4096, 32000),
    "70 B, gated": llama(80, 8192, 28672, 1024, 32000),
    "four equal units": "4 * 1000",
  };
  const OPTIMIZERS = { "Adam, float32 averages": 8, "SGD": 0, "SGD with momentum": 4, "Adam with a float32 copy": 12 };

  function bytes(n) {
    const units = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];
    const [unit, factor] = units.find(([, f]) => n >= f) || ["B", 1];
    return (n / factor).toLocaleString("en", { maximumFractionDigits: unit === "B" ? 0 : 2 }) + " " + unit;
  }

  function form(document) {
    const place = document.getElementById("calculator");
    if (!place) return;
    const make = (tag, props = {}, ...children) => {
      const one = document.createElement(tag);
      Object.entries(props).forEach(([k, v]) => (k === "class" ? (one.className = v) : k in one ? (one[k] = v) : one.setAttribute(k, v)));
      one.append(...children);
      return one;
    };
    const select = (id, options, value) => {
      const one = make("select", { id: "calc-" + id }, ...Object.entries(options).map(([v, text]) => make("option", { value: v, textContent: text })));
      one.value = value;
      return one;
    };
    const number = (id, value, min = 1) => make("input", { id: "calc-" + id, type: "number", min, value, step: 1 });
    const same = (list) => Object.fromEntries(list.map((name) => [name, name]));
    const dtypes = same(Object.keys(DTYPES));
    const fields = {
      preset: select("preset", same(Object.keys(PRESETS)), "7 B, gated"),
      door: select("door", { wrapper: "FullyShardedDataParallel", place: "fully_shard" }, "place"),
      strategy: select("strategy", same(STRATEGIES), "FULL_SHARD"),
      ranks: number("ranks", 8), nodes: number("nodes", 1),
      stored: select("stored", dtypes, "float32"),
      compute: select("compute", { "": "as stored", ...dtypes }, "bfloat16"),
      reduce: select("reduce", { "": "as computed", ...dtypes }, ""),
      optimizer: select("optimizer", Object.fromEntries(Object.entries(OPTIMIZERS).map(([k, v]) => [v, k])), "8"),
      batches: number("batches", 1), noSync: make("input", { id: "calc-nosync", type: "checkbox" }),
      offload: make("input", { id: "calc-offload", type: "checkbox" }),
      activations: number("activations", 0, 0),
    };
    const model = make("textarea", { id: "calc-model", rows: 4, spellcheck: false });
    const label = (text, field) => make("label", {}, make("span", {}, text), field);
    const trouble = make("p", { class: "calc-trouble", role: "alert" });
    const facts = make("p", { class: "calc-facts" });
    const bars = make("div", { class: "calc-bars" });
    const result = make("div", { class: "calc-result" });
    place.replaceChildren(
      make("form", { class: "calc-form", onsubmit: () => false },
        label("Model", fields.preset), label("Front door", fields.door), label("Strategy", fields.strategy), label("Ranks", fields.ranks),
        label("Nodes", fields.nodes), label("Stored in", fields.stored), label("Computed in", fields.compute), label("Reduced in", fields.reduce),
        label("Optimizer", fields.optimizer), label("Micro-batches", fields.batches), label("Reduce only the last", fields.noSync),
        label("Offload to the CPU", fields.offload), label("Activations, GB", fields.activations),
        make("label", { class: "calc-wide" }, make("span", {}, "The units, one in a line: the shapes of its parameters. \"32 *\" in front repeats the line; \"root:\" is what belongs to no block."), model)),
      trouble, facts, bars, result);

    function jobFor(strategy, parsed) {
      const ranks = Math.max(1, Number(fields.ranks.value) || 1), nodes = Math.max(1, Number(fields.nodes.value) || 1);
      const hybrid = strategy.includes("HYBRID");
      if (hybrid && ranks % nodes) throw new Error(`${ranks} ranks do not divide over ${nodes} nodes`);
      return {
        ...parsed, strategy, perParameter: fields.door.value === "place",
        numShards: strategy === "NO_SHARD" ? 1 : hybrid ? ranks / nodes : ranks,
        numReplicas: strategy === "NO_SHARD" ? ranks : hybrid ? nodes : 1,
        stored: fields.stored.value, compute: fields.compute.value || null, reduce: fields.reduce.value || null,
        optimizer: Number(fields.optimizer.value), microBatches: Math.max(1, Number(fields.batches.value) || 1),
        noSync: fields.noSync.checked, offload: fields.offload.checked, activations: 1e9 * (Number(fields.activations.value) || 0),
      };
    }
    function update() {
      trouble.textContent = "";
      try { draw(parseModel(model.value)); } catch (error) { trouble.textContent = error.message; result.replaceChildren(); bars.replaceChildren(); facts.textContent = ""; }
    }
    function draw(parsed) {
      const num = sum([...parsed.units, parsed.root].map((shapes) => sum(shapes.map(numelOf))));
      const chosen = fields.strategy.value;
      const costs = STRATEGIES.map((strategy) => {
        try { return [strategy, costOf(jobFor(strategy, parsed))]; } catch (error) { if (strategy === chosen) throw error; return null; }
      }).filter(Boolean);
      const own = costs.find(([strategy]) => strategy === chosen)[1];
      const largest = Math.max(...parsed.units.map((shapes) => sum(shapes.map(numelOf))), 0);
      facts.textContent = `${num.toLocaleString("en")} parameters in ${parsed.units.length} units; the largest unit has ${largest.toLocaleString("en")}.`;
      const parts = [["stored", own.stored], ["after backward", own.afterBackward], ["peak of forward", own.peakForward], ["peak of backward", own.peakBackward], ["peak of the optimizer's step", own.peakOptimizer]];
      if (own.host) parts.push(["on the host", own.host]);
      const most = Math.max(...parts.map(([, n]) => n), 1);
      bars.replaceChildren(...parts.map(([name, n]) => {
        const fill = make("span", { class: "calc-fill" });
        fill.style.width = (100 * n) / most + "%";
        return make("div", { class: "calc-bar" }, make("span", { class: "calc-name" }, name), make("span", { class: "calc-room" }, fill), make("b", {}, bytes(n)));
      }));
      const row = (name, pick) => make("tr", {}, make("th", { scope: "row" }, name), ...costs.map(([s, c]) => make("td", { class: s === chosen ? "is-chosen" : "" }, pick(c))));
      result.replaceChildren(make("table", { class: "calc-table" },
        make("thead", {}, make("tr", {}, make("th", {}, "per rank"), ...costs.map(([s]) => make("th", { class: s === chosen ? "is-chosen" : "" }, s)))),
        make("tbody", {},
          row("stored", (c) => bytes(c.stored)),
          row("peak", (c) => bytes(Math.max(c.peakForward, c.peakBackward, c.peakOptimizer))),
          row("sent in a step", (c) => bytes(c.sent.AG + c.sent.RS + c.sent.AR)),
          row("all-gathers (sent)", (c) => `${c.numCollectives.AG} (${bytes(c.sent.AG)})`),
          row("reduce-scatters (sent)", (c) => `${c.numCollectives.RS} (${bytes(c.sent.RS)})`),
          row("all-reduces (sent)", (c) => `${c.numCollectives.AR} (${bytes(c.sent.AR)})`))));
    }
    fields.preset.addEventListener("input", () => { model.value = PRESETS[fields.preset.value]; update(); });
    [...Object.values(fields), model].forEach((field) => field.addEventListener("input", update));
    model.value = PRESETS[fields.preset.value];
    update();
  }

  return { costOf, parseModel, form };
});
