/* Recordings of the user: reads the Chrome trace of minifsdp_tools.timeline.chrome_trace, or of train_gpt.py --trace.

   A rank is a process, and an event has a kind (cat), a time in microseconds, a unit, bytes and ranks:
     {"ph": "X", "cat": "AG", "pid": 1, "ts": 0, "dur": 2000, "args": {"unit": "0", "bytes": 32, "ranks": [0, 1]}}
   An all-gather makes a unit unsharded, and a FREE makes it sharded. The trace contains no other memory of a rank. */
(function (root) {
  "use strict";
  const player = root.minifsdpPlayer;
  const LARGEST = 64e6;
  const ADVICE = "Use a file of train_gpt.py --trace, or of minifsdp_tools.timeline.chrome_trace.";

  function read(name, text) {
    const events = eventsOf(name, text);
    const isOurs = (e) => e && e.cat in player.MEANING && ["X", "i"].includes(e.ph) && e.args && typeof e.args.unit === "string";
    const known = events.filter(isOurs);
    if (!events.length) throw new Error(`${name} is a trace without a single event: was the recorder around a step? ${ADVICE}`);
    if (!known.length) throw new Error(`${name} is a trace of something else: none of its ${events.length} events is one of FSDP's, such as AG, F or FREE. ${ADVICE}`);
    events.forEach((event, number) => { if (isOurs(event)) check(name, event, number); });
    const pids = [...new Set(known.map((e) => e.pid))].sort((a, b) => a - b);
    const names = [...new Set(known.map((e) => e.args.unit))];
    const sizes = (unit) => known.filter((e) => e.args.unit === unit && (e.cat === "AG" || e.cat === "FREE")).map((e) => e.args.bytes || 0);
    const units = names.map((name) => ({ name, shard: null, bytes: sizes(name).reduce((a, b) => Math.max(a, b), 0) }));
    const first = known.reduce((least, e) => Math.min(least, e.ts), Infinity);
    const ranks = pids.map((pid) => withStates(momentsOf(known.filter((e) => e.pid === pid), names, first), units));
    return {
      key: "", title: name, units, ranks, pieces: null, stacks: [], knows: { held: false, source: false }, rankNames: pids,
      remark: `${name} has no source lines, shards, gradients or optimizer state, for a trace does not keep them. What was gathered before it begins counts as nothing.`,
    };
  }

  function eventsOf(name, text) {
    if (text.length > LARGEST) throw new Error(`${name} has ${player.bytes(text.length)}, more than a page can show: record fewer steps.`);
    let found;
    try {
      found = JSON.parse(text);
    } catch (error) {
      throw new Error(`${name} is not JSON, or only the beginning of it (${error.message}). ${ADVICE}`);
    }
    const events = Array.isArray(found) ? found : found && found.traceEvents;
    if (!Array.isArray(events)) throw new Error(`${name} is JSON, but no trace: it has no list "traceEvents". ${ADVICE}`);
    return events;
  }

  function check(name, event, number) {
    const isNumber = (n) => typeof n === "number" && Number.isFinite(n);
    const isRight = { ts: isNumber(event.ts), dur: event.ph === "i" || (isNumber(event.dur) && event.dur >= 0), pid: isNumber(event.pid) };
    const wrong = Object.keys(isRight).find((key) => !isRight[key]);
    if (wrong) throw new Error(`${name} is damaged: event ${number + 1}, ${event.cat} ${event.args.unit}, has no valid number as "${wrong}".`);
  }

  /* Begins and ends in order of time; at equal times, ends come first. */
  function momentsOf(events, names, first) {
    const ms = (micro) => (micro - first) / 1e3;
    return events.flatMap((e) => {
      const facts = { kind: e.cat, unit: names.indexOf(e.args.unit), bytes: e.args.bytes || 0, group: e.args.ranks || [], stack: -1 };
      const begin = { ...facts, begins: true, ms: ms(e.ts) };
      return e.ph === "X" && e.dur ? [begin, { ...facts, begins: false, ms: ms(e.ts + e.dur) }] : [begin];
    }).sort((a, b) => a.ms - b.ms || a.begins - b.begins);
  }

  function withStates(moments, units) {
    const states = units.map(() => "S");
    for (const m of moments) {
      if (m.kind === "AG") states[m.unit] = m.begins ? "G" : "U";
      if (m.kind === "FREE") states[m.unit] = "S";
      m.after = { states: states.join(""), whole: null, reduced: null, optimizer: null };
    }
    return moments;
  }

  player.readTrace = read;
})(window);
