/* The arithmetic of minifsdp_tools in JavaScript: formulas.py, peaks.py, cost.py, links.py and activations.py, with the
   same names. A test runs both on the same jobs and compares every number. The Python files explain the numbers. */
(function (root, factory) {
  "use strict";
  if (typeof module === "object" && module.exports) module.exports = factory();
  else root.minifsdpCost = factory();
})(typeof self !== "undefined" ? self : this, function () {
  "use strict";
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  const numelOf = (shape) => shape.reduce((a, b) => a * b, 1);
  const up = (n, multiple) => Math.ceil(n / multiple) * multiple;
  const DTYPES = { float32: 4, bfloat16: 2, float16: 2 };
  const STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"];

  // --- stored (formulas.py) ---
  const paddedRow = (shapes, numShards) => up(sum(shapes.map(numelOf)), numShards);
  const paddedPerParameter = (shapes, numShards) => sum(shapes.map((shape) => up(shape[0], numShards) * numelOf(shape.slice(1))));

  // --- peaks (peaks.py) ---
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
        // Bytes of the reduction of the previous unit while this gradient is concatenated or packed.
        const left = (o.reduction * after) / o.numShards;
        const cast = o.stored !== o.reduction ? (o.stored * after) / o.numShards : 0;
        stages.push(left + twice, left + o.reduction * here * (1 + share) + cast);
        if (o.sorts || o.reduction !== o.gradient) stages.push(left + (o.gradient + o.reduction) * here);
      }
      most = Math.max(most, elsewhere + gradientsAtRest(units, i, o) + waiting + Math.max(...stages));
    }
    return most;
  }

  // --- sent (formulas.py) ---
  const gatherSends = (bytes, ranks) => (bytes * (ranks - 1)) / ranks;
  const allReduceSends = (bytes, ranks) => 2 * gatherSends(bytes, ranks);

  // --- trained parameters (job.py) ---
  const DEFAULTS = {
    root: [], strategy: "FULL_SHARD", numShards: 1, numReplicas: 1, perParameter: false, restsWith: null, stored: "float32",
    compute: null, reduce: null, optimizer: 8, scratch: 0, buffers: 0, buffer: null, offload: false, forwardPrefetch: false,
    backwardPrefetch: true, microBatches: 1, noSync: false, activations: 0,
  };

  // The job with derived values: the number of shards, and the unsharded size of each unit.
  function prepared(given) {
    const job = { ...DEFAULTS, ...given };
    if (!STRATEGIES.includes(job.strategy)) throw new Error("strategy must be one of " + STRATEGIES.join(", "));
    if (Math.min(job.numShards, job.numReplicas, job.microBatches) < 1) throw new Error("numbers of ranks and batches begin at 1");
    if (![job.numShards, job.numReplicas, job.microBatches].every(Number.isInteger)) throw new Error("numbers of ranks and batches are whole");
    const shards = job.strategy === "NO_SHARD" ? 1 : job.numShards;
    const borrowed = shards === 1 && (job.compute || job.stored) === job.stored && !job.offload;
    // The wrapper frees copies of a unit that is not sharded, like sharded units.
    const keeps = shards === 1 ? borrowed || Boolean(job.perParameter) : ["SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"].includes(job.strategy);
    const numel = (shapes) => (job.perParameter ? paddedPerParameter : paddedRow)(shapes, shards);
    const width = DTYPES[job.compute || job.stored], travel = DTYPES[job.reduce || job.compute || job.stored] / width;
    const numels = job.units.map(numel), rootNumel = numel(job.root);
    return { job, shards, keeps, borrowed, width, travel, numels, rootNumel, sizes: numels.map((n) => n * width), rootSize: rootNumel * width };
  }

  // The number of all-gathers and of reductions of a unit in a step, and of all-gathers of the root's own parameters.
  function howOften({ job, shards, keeps }) {
    const reductions = job.noSync ? 1 : job.microBatches;
    if (shards === 1) return { times: 0, ofRoot: 0, reductions };
    if (keeps) return { times: reductions, ofRoot: reductions, reductions };
    return { times: 2 * job.microBatches, ofRoot: job.microBatches, reductions };
  }

  // Bytes that stay sharded over fewer ranks, and are all-gathered among these ranks for backward.
  const rested = ({ job, keeps, sizes }) => (job.restsWith && !keeps ? job.microBatches * sum(sizes) : 0);
  const sentForRested = (ready) => gatherSends(rested(ready), ready.job.restsWith || 1);

  function sentBytes(ready) {
    const { job, shards, travel, sizes, rootSize } = ready, { times, ofRoot, reductions } = howOften(ready);
    const reduced = reductions * travel * (sum(sizes) + rootSize);
    return {
      AG: gatherSends(times * sum(sizes) + ofRoot * rootSize - rested(ready), shards) + sentForRested(ready),
      RS: gatherSends(reduced, shards),
      AR: allReduceSends(reduced / shards, job.numReplicas),
    };
  }

  // --- links, and the minimum time (links.py) ---
  function leaving(numRanks, size, apart, perMachine) {
    const span = size * apart, machine = (rank) => Math.floor(rank / perMachine);
    let hops = 0;
    for (let rank = 0; rank < numRanks; rank++) {
      const start = Math.floor(rank / span) * span;
      if (machine(rank) !== machine(start + ((rank - start + apart) % span))) hops++;
    }
    return hops / numRanks;
  }

  function sentByLink(given, perMachine) {
    const ready = prepared(given), { job, shards } = ready, sent = sentBytes(ready), numRanks = shards * job.numReplicas;
    // For each ring: the bytes that a rank sends in it, its number of ranks, and the distance between them.
    const rings = {
      AG: [[sent.AG - sentForRested(ready), shards, 1], [sentForRested(ready), job.restsWith || 1, 1]],
      RS: [[sent.RS, shards, 1]],
      AR: [[sent.AR, job.numReplicas, shards]],
    };
    return Object.fromEntries(Object.entries(rings).map(([kind, ofKind]) => {
      const between = sum(ofKind.map(([bytes, size, apart]) => bytes * leaving(numRanks, size, apart, perMachine)));
      return [kind, { within: sent[kind] - between, between }];
    }));
  }

  function stepTime(given, count, cluster) {
    const links = Object.values(sentByLink(given, cluster.perMachine)), compute = count / cluster.operations;
    // A ring is as slow as its slowest link.
    const communication = sum(links.map((sent) => Math.max(sent.within / cluster.within, sent.between / cluster.between)));
    const within = sum(links.map((sent) => sent.within)) / cluster.within;
    const between = sum(links.map((sent) => sent.between)) / cluster.between;
    return { compute, communication, overlapped: Math.max(compute, within, between), apart: compute + communication };
  }

  // --- values that depend on the batch (activations.py) ---
  const matricesOf = (shapes) => shapes.filter((shape) => shape.length === 2);
  // The matrix that computes the scores: the largest matrix of the root.
  const scoresOf = (job) => matricesOf(job.root || []).reduce((a, b) => (numelOf(b) > numelOf(a) ? b : a), [0, 0]);

  function activationBytes(given, tokens, checkpointing) {
    const { job, width } = prepared(given), ofToken = width * tokens, most = (numbers) => Math.max(0, ...numbers);
    const blocks = job.units.map(matricesOf).filter((matrices) => matrices.length);
    // A matrix keeps its input and its output.
    const kept = blocks.map((matrices) => ofToken * sum(matrices.map(sum)));
    const working = ofToken * most(blocks.flat().map(sum));
    const [vocabulary, hidden] = scoresOf(job), head = tokens * (12 * vocabulary + 2 * width * hidden);
    if (!checkpointing) return sum(kept) + Math.max(head, working);
    return ofToken * sum(blocks.map((matrices) => matrices[0][1])) + Math.max(head, most(kept) + working);
  }

  function operations(given, tokens, checkpointing) {
    const { job } = prepared(given), blocks = job.units.map((unit) => matricesOf(unit).map(numelOf));
    const again = checkpointing ? sum(blocks.map((block) => sum(block.slice(0, -1)))) : 0;
    return 2 * job.microBatches * tokens * (3 * (sum(blocks.map(sum)) + numelOf(scoresOf(job))) + again);
  }

  // --- combined (cost.py) ---
  function costOf(given) {
    const ready = prepared(given), { job, shards, keeps, borrowed, width, travel, numels, rootNumel, sizes, rootSize } = ready;
    const atRest = DTYPES[job.stored];
    const elements = (sum(numels) + rootNumel) / shards;
    // For the root and each unit: whether its gradient is concatenated from those of its parameters.
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

    const { times, ofRoot, reductions } = howOften(ready);
    const numUnits = job.units.length, hasRoot = job.root.length ? 1 : 0;
    const numReductions = reductions * (numUnits + hasRoot);
    return {
      stored: resting, host, afterBackward: resting + gradients,
      peakForward: resting + carried + unreduced + forward + job.activations,
      peakBackward: resting + backward + job.activations,
      peakOptimizer: resting + (job.offload ? 0 : elements * (atRest + job.scratch)),
      sent: sentBytes(ready),
      numCollectives: {
        AG: times * numUnits + ofRoot * hasRoot, RS: shards > 1 ? numReductions : 0, AR: job.numReplicas > 1 ? numReductions : 0,
      },
    };
  }

  return { DTYPES, STRATEGIES, activationBytes, costOf, numelOf, operations, sentByLink, stepTime, sum };
});
