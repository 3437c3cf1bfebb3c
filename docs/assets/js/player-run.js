/* The state of a run at each of its moments. This file does not use the page.

   A run, recorded for the site or read from a file of the user, is
     { key, title, units: [{ name, bytes, shard }], ranks: [[moment]], pieces, stacks, knows, remark }
   and a moment is the begin or end of an event, with the state of the rank right after it:
     { kind, unit, begins, ms, bytes, group, stack, after: { states, whole, reduced, optimizer } }
   states has a letter for each unit: S sharded, G gathering, U unsharded. Numbers that were not recorded are null. */
(function (root) {
  "use strict";
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  function bytes(n) {
    const [unit, size, digits] = [["GB", 1e9, 2], ["MB", 1e6, 2], ["kB", 1e3, n >= 1e4 ? 0 : 1]].find(([, least]) => n >= least) || ["B", 1, 0];
    return (n / size).toFixed(digits) + " " + unit;
  }

  // Each kind: its name, and the texts for its begin and its end.
  const MEANING = {
    F: ["forward", "begins", "ends"], B: ["backward", "begins", "ends"], AG: ["all-gather", "is issued", "was waited for"],
    RS: ["reduce-scatter", "is issued", "is complete"], AR: ["all-reduce", "is issued", "is complete"],
    FREE: ["free", "gives the memory back", ""], STEP: ["optimizer step", "begins", "ends"],
    WAIT: ["wait of the rate limiter", "begins", "ends"], H2D: ["copy to the device", "is issued", "ends"],
    D2H: ["copy to the CPU", "is issued", "ends"], BCAST: ["broadcast", "is issued", "ends"],
  };
  const SPANS = ["F", "B", "AG", "RS", "AR", "WAIT", "STEP"];
  const LANES = { AG: 1, FREE: 1, H2D: 1, BCAST: 1, RS: 2, AR: 2, D2H: 2 };

  // --- a recorded run of the site ---
  const TORCH = "This is torch's own FSDP, whose functions are not shown here. On the CPU it waits for each collective when it issues it; a gather ends when its data was taken over.";
  /* In the file, a moment has the state of a rank *before* it. The state after a moment is that of the next moment;
     after the last one, the last recorded state. */
  function fromSite(key, title, data) {
    const ranks = data.ranks.map((moments) => moments.map(([kind, unit, begins, ms, num, group, stack], n) => {
      const [, , , , , , , states, , reduced, optimizer, whole] = moments[Math.min(n + 1, moments.length - 1)];
      const after = { states, whole: sum(whole), reduced: sum(reduced), optimizer };
      return { kind, unit, begins: Boolean(begins), ms, bytes: num, group, stack, after };
    }));
    const source = data.stacks.some((stack) => stack.length > 0);
    const { units, pieces, stacks } = data;
    return { key, title, units, ranks, pieces, stacks, knows: { held: true, source }, remark: source ? "" : TORCH };
  }

  // --- queries about a run ---
  const nameOf = (run, unit) => (unit < 0 ? "" : run.units[unit].name || "root");
  // A recording of the user may lack some ranks.
  const rankName = (run, rank) => "rank " + (run.rankNames ? run.rankNames[rank] : rank);
  const isRoot = (run, unit) => unit >= 0 && !run.units[unit].name && run.units.length > 1;

  function sentence(run, m) {
    const [what, begins, ends] = MEANING[m.kind] || [m.kind, "begins", "ends"];
    return `${what}${m.unit < 0 ? "" : " of " + nameOf(run, m.unit)} ${m.begins ? begins : ends}`;
  }

  /* The events of a rank that have begun and not ended. */
  function inFlight(run, rank, upTo) {
    const open = new Map();
    for (const m of run.ranks[rank].slice(0, upTo + 1)) {
      if (SPANS.includes(m.kind)) m.begins ? open.set(m.kind + m.unit, m) : open.delete(m.kind + m.unit);
    }
    return [...open.values()];
  }

  /* Bytes on a rank after a moment. */
  function held(run, m) {
    const { states, whole, reduced, optimizer } = m.after;
    // A unit that is not sharded computes with the memory of the shard, and needs no all-gather.
    const gathered = sum(run.units.map((unit, u) => (states[u] !== "S" && unit.shard !== unit.bytes ? unit.bytes : 0)));
    const shards = run.knows.held ? sum(run.units.map((unit) => unit.shard)) : null;
    const parts = { shards, optimizer, gathered, whole, reduced };
    return { ...parts, total: sum(Object.values(parts).map((n) => n || 0)) };
  }

  /* Memory over time: for each moment its time and the bytes from then on; and the maximum. */
  function memory(run, rank) {
    const stairs = run.ranks[rank].map((m) => ({ ms: m.ms, ...held(run, m) }));
    const peak = stairs.reduce((best, one, n) => (one.total > stairs[best].total ? n : best), 0);
    return { stairs, peak };
  }

  /* Events as spans: kind, unit, start, end, and a row of their track in which they overlap no other span. */
  function spans(run, rank) {
    const open = {}, found = [[], [], []];
    for (const m of run.ranks[rank]) {
      const id = m.kind + m.unit;
      if (SPANS.includes(m.kind) && m.begins) open[id] = m;
      // The forward and backward of the root contain those of all other units.
      else if (open[id] && !((m.kind === "F" || m.kind === "B") && isRoot(run, m.unit))) {
        found[LANES[m.kind] || 0].push({ kind: m.kind, unit: m.unit, from: open[id].ms, to: m.ms });
        delete open[id];
      }
    }
    return found.map((lane) => {
      const ends = [];
      lane.sort((a, b) => a.from - b.from).forEach((span) => {
        span.row = ends.findIndex((end) => end <= span.from);
        if (span.row < 0) span.row = ends.length;
        ends[span.row] = span.to;
      });
      return { spans: lane, rows: Math.max(ends.length, 1) };
    });
  }

  /* The moments of all ranks of all runs by their common clock; each has the position of every rank. */
  function frames(runs) {
    const all = runs.flatMap((run, r) => run.ranks.flatMap((moments, rank) =>
      moments.map((moment, n) => ({ r, rank, n, moment, ms: moment.ms }))));
    all.sort((a, b) => a.ms - b.ms);
    const seen = runs.map((run) => run.ranks.map(() => -1));
    all.forEach((frame) => { seen[frame.r][frame.rank] = frame.n; frame.seen = seen.map((ranks) => [...ranks]); });
    return all;
  }

  root.minifsdpPlayer = { MEANING, SPANS, LANES, sum, bytes, fromSite, nameOf, rankName, sentence, inFlight, held, memory, spans, frames };
})(window);
