/* Replays the recorded order of a rank's events with another network and other computations. It knows no page.

   The rank's thread executes the events in the recorded order. It computes, issues collectives, and waits where the
   recorded thread waited. All ranks are equally fast, so one rank stands for all of them.

   1. The forward of a unit takes 2 * rows * parameters operations, and its backward twice as many. They are executed just
      before the recorded end of the forward or backward. Nothing else takes time on the thread.
   2. A collective of n ranks takes latency * (n - 1) + bytes * (n - 1) / n / bandwidth. An all-reduce takes twice as long.
      If a ring leaves a machine with some of its hops, this part of the bytes has the bandwidth between machines, and the
      slower part counts, as in links.py.
   3. A collective begins when it was issued and the earlier collectives of its stream are complete. The streams are
      gather, reduce and all_reduce, as in the engine; they do not slow each other down.
   4. `ahead: true` is a device: its thread only issues, and the compute stream computes and waits. The rate limiter
      stops the thread before an all-gather until the compute stream has passed the reshard before the last one.

   Worked example, one unit of 1000 float32 parameters, 2 ranks, 10 rows, 1e6 operations/s, 1e5 bytes/s, no latency:

     AG   4000 bytes * 1/2 / 1e5      20 ms     0 to 20
     F    2 * 10 * 1000 / 1e6         20 ms    20 to 40
     B    twice F                     40 ms    40 to 80
     RS   as AG                       20 ms    80 to 100      step 100 ms, computation 60, exposed communication 40 */
(function (root, factory) {
  "use strict";
  if (typeof module === "object" && module.exports) module.exports = factory();
  else root.minifsdpReplay = factory();
})(typeof self !== "undefined" ? self : this, function () {
  "use strict";
  const RECORDED_WIDTH = 4; // bytes of a float32
  const STREAMS = { AG: "gather", RS: "reduce", AR: "all_reduce" };
  const PASSES = { F: 2, B: 4 };
  const IN_FLIGHT = 2; // reshards in the queue of the rate limiter

  const largest = (moments, kinds) => moments.reduce((most, m) => (kinds.includes(m.kind) ? Math.max(most, m.group.length) : most), 1);
  /* The recorded number of ranks in a shard group and in a replicate group. */
  const groupsOf = (moments) => ({ shards: largest(moments, ["AG", "RS"]), replicas: largest(moments, ["AR"]) });

  /* The same for `ranks` ranks: a hybrid strategy shards within a machine, the others use all ranks. */
  function groupsFor(moments, { ranks, perMachine }) {
    const { shards, replicas } = groupsOf(moments);
    if (replicas === 1) return { shards: ranks, replicas: 1 };
    const ofMachine = shards === 1 ? 1 : Math.min(ranks, perMachine);
    return { shards: ofMachine, replicas: ranks / ofMachine };
  }

  /* For a recorded collective: its number of ranks, how far they are apart, and its bytes. */
  function collective({ kind, bytes, group }, recorded, { shards, replicas, size, width }) {
    const scaled = (bytes * size * width) / RECORDED_WIDTH;
    // An all-reduce between replicas sends a shard, which is smaller with more shards.
    if (kind === "AR") return { ranks: replicas, apart: shards, bytes: (scaled * recorded.shards) / shards };
    // A smaller mesh of reshard_after_forward=2 keeps its size.
    const ranks = group.length < recorded.shards ? Math.min(group.length, shards) : shards;
    return { ranks, apart: 1, bytes: scaled };
  }

  /* The fraction of the hops of a ring that leave a machine. */
  function leaving({ ranks, apart }, perMachine) {
    if (ranks * apart <= perMachine) return 0;
    return Math.min(apart / perMachine, 1);
  }

  const sends = (kind, { ranks, bytes }) => ((kind === "AR" ? 2 : 1) * bytes * (ranks - 1)) / ranks;
  function lasts(kind, found, { latency, bandwidth, between = bandwidth, perMachine = Infinity }) {
    const hops = (kind === "AR" ? 2 : 1) * (found.ranks - 1), part = leaving(found, perMachine), bytes = sends(kind, found);
    return latency * hops + Math.max((bytes * (1 - part)) / bandwidth, (bytes * part) / between);
  }
  const computes = (kind, unit, { rows, size, speed }) => (PASSES[kind] * rows * ((unit.bytes / RECORDED_WIDTH) * size)) / speed;

  /* Args: the moments of a rank and the units of a run, as in player-run.js, and the settings:
       bandwidth (bytes/s), between (bytes/s between machines), perMachine (ranks of a machine), latency (s), speed
       (operations/s), rows (of a rank's batch), size (factor on all parameters), width (bytes of a parameter), shards and
       replicas (ranks of a group), ahead.
     Returns step, computation and exposed communication in seconds, the bytes sent by kind, and spans for a drawing. */
  function replay(moments, units, settings) {
    const recorded = groupsOf(moments), spans = [], sent = { AG: 0, RS: 0, AR: 0 };
    const free = { gather: 0, reduce: 0, all_reduce: 0 }, ends = {}, released = [];
    let thread = 0, compute = 0, computation = 0;
    // Without `ahead`, the thread itself computes and waits.
    const reach = (time) => {
      compute = Math.max(compute, time);
      if (!settings.ahead) thread = compute;
    };
    const issue = ({ kind, unit, bytes, group }) => {
      if (kind === "AG" && settings.ahead && released.length === IN_FLIGHT) thread = Math.max(thread, released.shift());
      const stream = STREAMS[kind], found = collective({ kind, bytes, group }, recorded, settings);
      // A reduction needs its gradient, and an all-reduce of a hybrid strategy also needs its reduce-scatter.
      const ready = kind === "AG" ? thread : Math.max(thread, compute, kind === "AR" ? ends["RS" + unit] || 0 : 0);
      const from = Math.max(ready, free[stream]), to = from + lasts(kind, found, settings);
      free[stream] = ends[kind + unit] = to;
      sent[kind] += sends(kind, found);
      spans.push({ stream, kind, unit, from, to });
    };
    for (const m of moments) {
      if (STREAMS[m.kind]) m.begins ? issue(m) : reach(ends[m.kind + m.unit] || 0);
      else if (PASSES[m.kind] && !m.begins) {
        const from = Math.max(thread, compute), time = computes(m.kind, units[m.unit], settings);
        reach(from + time);
        computation += time;
        spans.push({ stream: "compute", kind: m.kind, unit: m.unit, from, to: from + time });
      } else if (m.kind === "FREE") {
        released.push(compute);
        if (released.length > IN_FLIGHT) released.shift();
      }
    }
    const step = Math.max(thread, compute, ...Object.values(free));
    return { step, computation, exposed: step - computation, sent, spans };
  }

  return { groupsFor, groupsOf, replay };
});
