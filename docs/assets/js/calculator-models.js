/* Models for the calculator: a text with one unit on each line is parsed into shapes; and the texts of some models by
   name. A test compares the named ones with the models themselves. */
(function (root, factory) {
  "use strict";
  if (typeof module === "object" && module.exports) module.exports = factory();
  else root.minifsdpModels = factory();
})(typeof self !== "undefined" ? self : this, function () {
  "use strict";
  const MOST_UNITS = 2000;

  // "root: 5x3, 1", "7x5, 3", "2 * 11  # two of them" to { root: [[5, 3], [1]], units: [[[7, 5], [3]], [[11]], [[11]]] }
  function parseModel(text) {
    const units = [], rootShapes = [];
    text.split("\n").forEach((line, number) => {
      const said = line.replace(/#.*/, "").trim();
      if (!said) return;
      const refuse = (why) => { throw new Error(`line ${number + 1}: ${why}`); };
      const [, isRoot, times, shapesText] = /^(?:(root)\s*:|(\d+)\s*\*)?\s*(.*)$/i.exec(said);
      const shapes = shapesText.split(",").map((part) => part.trim().split(/\s*x\s*/i).map((size) => (/^\d+$/.test(size) ? Number(size) : NaN)));
      if (shapes.some((shape) => shape.some((size) => !(size > 0)))) refuse(`write shapes as 4096x1024, 4096; "${said}" is not of this form`);
      if (shapes.flat().some((size) => size > 1e9)) refuse("a dimension of more than a billion");
      if (isRoot) rootShapes.push(...shapes);
      else if (times === "0") refuse("0 units are none");
      else if (units.length + Number(times || 1) > MOST_UNITS) refuse(`more than ${MOST_UNITS} units`);
      else for (let i = 0; i < Number(times || 1); i++) units.push(shapes);
    });
    if (!units.length && !rootShapes.length) throw new Error("line 1: give at least one unit, for example 4 * 1000");
    return { units, root: rootShapes };
  }

  // GPT-2: scores and positions are in the root, and the matrix of the scores is the transposed embedding.
  const gpt = (layers, d, vocabulary, context) =>
    `root: ${vocabulary}x${d}, ${context}x${d}, ${d}, ${d}\n${layers} * ${3 * d}x${d}, ${3 * d}, ${d}x${d}, ${d}, ${4 * d}x${d}, ${4 * d}, ${d}x${4 * d}, ${d}, ${d}, ${d}, ${d}, ${d}`;
  // Llama: a gated perceptron, no biases, `kv` numbers of keys and of values for each token; embedding and scores have
  // separate matrices.
  const llama = (layers, d, hidden, kv, vocabulary) =>
    `root: ${vocabulary}x${d}, ${d}, ${vocabulary}x${d}\n${layers} * ${d}x${d}, ${kv}x${d}, ${kv}x${d}, ${d}x${d}, ${hidden}x${d}, ${hidden}x${d}, ${d}x${hidden}, ${d}, ${d}`;
  const PRESETS = {
    // 32 heads of 128 numbers, and 64 heads; both models have 8 heads of keys and values.
    "Llama-3 8B": llama(32, 4096, 14336, 1024, 128256),
    "Llama-3 70B": llama(80, 8192, 28672, 1024, 128256),
    "GPT, 124 M": gpt(12, 768, 50257, 1024),
    "GPT, 1.6 B": gpt(48, 1600, 50257, 1024),
    "7 B, gated": llama(32, 4096, 11008, 4096, 32000),
    "70 B, gated": llama(80, 8192, 28672, 1024, 32000),
    "four equal units": "4 * 1000",
  };
  // A name belongs to exactly this text; a model with another number is a custom model.
  const nameOf = (text) => Object.keys(PRESETS).find((name) => PRESETS[name] === text.trim()) || "";

  return { PRESETS, nameOf, parseModel };
});
