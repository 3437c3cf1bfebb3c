/* The inputs of the calculator: its fields, their errors, the address that stores them, and the results. This file does
   not use the page; calculator.js draws. */
(function (root, factory) {
  "use strict";
  if (typeof module === "object" && module.exports) module.exports = factory(require("./calculator-cost.js"), require("./calculator-models.js"), require("./sliders.js"));
  else root.minifsdpInputs = factory(root.minifsdpCost, root.minifsdpModels, root.minifsdpSliders);
})(typeof self !== "undefined" ? self : this, function (cost, models, sliders) {
  "use strict";
  const GB = 1e9, GIB = 2 ** 30;

  // --- fields ---
  const same = (names) => Object.fromEntries(names.map((name) => [name, name]));
  const dtypes = same(Object.keys(cost.DTYPES));
  const whole = (value, more = {}) => ({ kind: "number", value, min: 1, whole: true, max: 1e6, ...more });
  const number = (value, more = {}) => ({ kind: "number", value, above: 0, max: 1e9, ...more });
  // Grouped, in the order of the page. `when` lists the choices for which a field is shown; `scale` is the scale of its
  // slider.
  const GROUPS = {
    "Model": {
      preset: { label: "Model", kind: "choice", value: "Llama-3 8B", options: { ...same(Object.keys(models.PRESETS)), "": "your own lines" } },
      lines: {
        label: "Its units", kind: "lines", value: models.PRESETS["Llama-3 8B"],
        hint: "One unit in a line: the shapes of its parameters. \"32 *\" in front repeats the line; \"root:\" is what belongs to no block.",
      },
    },
    "Sharding": {
      api: { label: "Which FSDP", kind: "choice", value: "place", options: { place: "fully_shard", wrapper: "FullyShardedDataParallel" } },
      strategy: { label: "Strategy", kind: "choice", value: "FULL_SHARD", options: same(cost.STRATEGIES) },
      ranks: { label: "Ranks", ...whole(8, { max: 65536 }), scale: sliders.powers(1, 4096) },
      machines: { label: "Machines", ...whole(1, { max: 65536 }), hint: "Hybrid strategies shard within each.", scale: sliders.powers(1, 512) },
      blocks: { label: "Blocks in a unit", ...whole(1, { max: 2000 }), scale: sliders.powers(1, 64), hint: "Neighbours are joined." },
      offload: { label: "Offload to the CPU", kind: "box", value: false },
    },
    "Numbers": {
      stored: { label: "Stored in", kind: "choice", value: "float32", options: dtypes },
      compute: { label: "Computed in", kind: "choice", value: "bfloat16", options: { "": "as stored", ...dtypes } },
      reduce: { label: "Reduced in", kind: "choice", value: "", options: { "": "as computed", ...dtypes } },
      optimizer: {
        label: "Optimizer", kind: "choice", value: "8",
        options: { 8: "Adam, float32 averages", 0: "SGD", 4: "SGD with momentum", 12: "Adam with a float32 copy" },
      },
    },
    "Batch": {
      length: { label: "Tokens in a sequence", ...whole(4096, { max: 1e8 }), scale: sliders.powers(128, 131072) },
      sequences: { label: "Sequences", ...whole(1), hint: "Of a rank, in a micro-batch.", scale: sliders.powers(1, 64) },
      batches: { label: "Micro-batches", ...whole(1) },
      nosync: { label: "Reduce only the last", kind: "box", value: false },
      kept: {
        label: "Activations", kind: "choice", value: "blocks",
        options: { blocks: "units checkpointed", all: "all kept", typed: "as typed" }, hint: "Estimated, or typed.",
      },
      activations: { label: "Activations, GB", ...number(0, { above: undefined, min: 0 }), when: (read) => read.kept === "typed" },
    },
    "GPU": {
      memory: { label: "Memory", kind: "choice", value: "80", options: { ...Object.fromEntries([24, 40, 80, 96, 141].map((n) => [n, n + " GiB"])), typed: "as typed" } },
      gib: { label: "Memory, GiB", ...number(80), when: (read) => read.memory === "typed" },
      teraflops: { label: "TFLOP/s", ...number(989), hint: "Data sheet of an H100, bfloat16: 989." },
      within: { label: "GB/s within a machine", ...number(450), hint: "Of a GPU, one way. NVLink of an H100: 450.", scale: sliders.decades(1, 1000, 20) },
      between: { label: "GB/s between machines", ...number(50), hint: "Of a GPU, one way. 400 Gbit/s each: 50.", scale: sliders.decades(0.1, 1000, 20) },
    },
  };
  const FIELDS = Object.assign({}, ...Object.values(GROUPS));

  // The value of a field, and its error. The text comes from the page or from an address, so it is not trusted.
  function checked(field, text) {
    if (field.kind === "box") return { value: text === true || text === "1" };
    if (field.kind === "choice") return Object.hasOwn(field.options, text) ? { value: text } : { error: "no such choice" };
    if (field.kind === "lines") {
      try { return { value: text, model: models.parseModel(text) }; } catch (error) { return { error: error.message }; }
    }
    const value = String(text).trim() === "" ? NaN : Number(text);
    const { min, above, max } = field, kindOf = field.whole ? "a whole number" : "a number";
    const least = above === undefined ? `${min} or more` : `more than ${above}`;
    if (!Number.isFinite(value) || (field.whole && !Number.isInteger(value)) || value < min || value <= above) return { error: `${kindOf} is needed, ${least}` };
    return value > max ? { error: `at most ${max.toLocaleString("en")}` } : { value };
  }

  // All fields at once: values, and errors by field; `texts` are the texts of the fields.
  function readAll(texts) {
    const read = {}, errors = {};
    for (const [name, field] of Object.entries(FIELDS)) {
      if (field.when && !field.when(read)) continue;
      const found = checked(field, texts[name]);
      if (found.error) errors[name] = found.error;
      else read[name] = found.value;
      if (found.model) read.model = found.model;
    }
    if (read.ranks && read.machines && read.ranks % read.machines) errors.machines = `${read.ranks} ranks do not divide over ${read.machines} machines`;
    return { read, errors };
  }

  // --- the address: the differences from the start values, after the # ---
  const BEGINNING = Object.fromEntries(Object.entries(FIELDS).map(([name, field]) => [name, field.kind === "box" ? field.value : String(field.value)]));

  function toAddress(texts) {
    const said = new URLSearchParams();
    for (const [name, text] of Object.entries(texts)) {
      // A known model is stored by its name, any other model by its lines.
      if (name === (texts.preset ? "lines" : "preset") || text === BEGINNING[name]) continue;
      said.set(name, text === true ? "1" : text === false ? "0" : text);
    }
    return said.toString();
  }

  function fromAddress(hash) {
    const texts = { ...BEGINNING };
    for (const [name, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
      if (Object.hasOwn(FIELDS, name)) texts[name] = FIELDS[name].kind === "box" ? text === "1" : text;
      if (name === "preset" && Object.hasOwn(models.PRESETS, text)) texts.lines = models.PRESETS[text];
    }
    for (const [name, field] of Object.entries(FIELDS)) if (field.kind === "choice" && !Object.hasOwn(field.options, texts[name])) texts[name] = BEGINNING[name];
    texts.preset = models.nameOf(texts.lines);
    return texts;
  }

  // --- the results ---
  /* The units of a model, with `size` neighbours joined into one; the last unit can have fewer. */
  function joined(units, size) {
    const starts = units.map((_, n) => n).filter((n) => n % size === 0);
    return starts.map((n) => units.slice(n, n + size).flat());
  }

  function jobFor(strategy, read) {
    const { ranks, machines } = read, hybrid = strategy.includes("HYBRID");
    const job = {
      ...read.model, units: joined(read.model.units, read.blocks), strategy, perParameter: read.api === "place",
      numShards: strategy === "NO_SHARD" ? 1 : hybrid ? ranks / machines : ranks,
      numReplicas: strategy === "NO_SHARD" ? ranks : hybrid ? machines : 1,
      stored: read.stored, compute: read.compute || null, reduce: read.reduce || null,
      optimizer: Number(read.optimizer), microBatches: read.batches, noSync: read.nosync, offload: read.offload,
    };
    // Each block is checkpointed separately, even if a unit has several blocks.
    const ofBlocks = { ...job, units: read.model.units };
    const activations = read.kept === "typed" ? GB * read.activations : cost.activationBytes(ofBlocks, read.length * read.sequences, read.kept === "blocks");
    return { ...job, activations };
  }

  function answer(read) {
    const cluster = { perMachine: read.ranks / read.machines, operations: 1e12 * read.teraflops, within: GB * read.within, between: GB * read.between };
    const memory = GIB * (read.memory === "typed" ? read.gib : Number(read.memory));
    const strategies = cost.STRATEGIES.map((strategy) => {
      const job = jobFor(strategy, read), priced = cost.costOf(job), links = cost.sentByLink(job, cluster.perMachine);
      const count = cost.operations({ ...job, units: read.model.units }, read.length * read.sequences, read.kept === "blocks");
      const moments = { forward: priced.peakForward, backward: priced.peakBackward, "the optimizer's step": priced.peakOptimizer };
      const worst = Object.keys(moments).reduce((a, b) => (moments[b] > moments[a] ? b : a)), peak = moments[worst];
      return {
        strategy, job, priced, links, count, worst, peak, left: memory - peak, time: cost.stepTime(job, count, cluster),
        activations: worst === "the optimizer's step" ? 0 : job.activations,
        within: cost.sum(Object.values(links).map((sent) => sent.within)),
        between: cost.sum(Object.values(links).map((sent) => sent.between)),
      };
    });
    return { strategies, memory, cluster };
  }

  return { BEGINNING, FIELDS, GROUPS, GB, GIB, answer, fromAddress, joined, readAll, toAddress };
});
