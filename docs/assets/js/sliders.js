/* Sliders that the tools share. A slider has a label, a range input, and its value as text.

   A scale converts between the positions of a slider, which are whole numbers, and values. */
(function (root, factory) {
  "use strict";
  if (typeof module === "object" && module.exports) module.exports = factory(null);
  else root.minifsdpSliders = factory(root.document);
})(typeof self !== "undefined" ? self : this, function (document) {
  "use strict";
  // Two significant digits: 1.2589 is shown and used as 1.3.
  const round = (value) => Number(value.toPrecision(2));
  const within = (position, { min, max }) => Math.min(Math.max(position, min), max);

  /* `steps` positions in each factor of 10: with 10 steps, 1, 1.3, 1.6, 2, 2.5, 3.2, 4, 5, 6.3, 7.9, 10. */
  function decades(least, most, steps = 10) {
    const scale = { min: Math.round(steps * Math.log10(least)), max: Math.round(steps * Math.log10(most)) };
    scale.at = (position) => round(10 ** (position / steps));
    scale.of = (value) => within(Math.round(steps * Math.log10(value)), scale);
    return scale;
  }

  /* 1, 2, 4, 8 and so on. */
  function powers(least, most) {
    const scale = { min: Math.round(Math.log2(least)), max: Math.round(Math.log2(most)) };
    scale.at = (position) => 2 ** position;
    scale.of = (value) => within(Math.round(Math.log2(value)), scale);
    return scale;
  }

  /* Each whole number. */
  function each(least, most) {
    const scale = { min: least, max: most };
    scale.at = (position) => position;
    scale.of = (value) => within(Math.round(value), scale);
    return scale;
  }

  /* A number with a unit: inUnits(2500, "B/s") is "2.5 kB/s". */
  function inUnits(value, unit) {
    const steps = [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3], ["", 1], ["m", 1e-3], ["\u00b5", 1e-6], ["n", 1e-9]];
    const [prefix, factor] = steps.find(([, f]) => value >= f * (1 - 1e-9)) || steps[steps.length - 1];
    return value ? `${(value / factor).toLocaleString("en", { maximumSignificantDigits: 3 })} ${prefix}${unit}` : `0 ${unit}`;
  }

  /* A range input of a scale. `describe` makes the text that is read aloud. `show(value)` moves it without an event. */
  function range(id, scale, describe) {
    const input = document.createElement("input");
    Object.assign(input, { type: "range", id, className: "slider-range", min: scale.min, max: scale.max, step: 1 });
    const show = (value) => {
      input.value = scale.of(value);
      input.setAttribute("aria-valuetext", describe(value));
    };
    return { input, show, value: () => scale.at(Number(input.value)) };
  }

  /* A range input with a label in front of it and its value behind it. `change(value)` is called when a user moves it. */
  function slider(id, label, scale, describe, change) {
    const one = range(id, scale, describe);
    const name = Object.assign(document.createElement("label"), { htmlFor: id, textContent: label });
    const output = Object.assign(document.createElement("output"), { htmlFor: id });
    const element = Object.assign(document.createElement("div"), { className: "slider" });
    element.append(name, one.input, output);
    const show = (value) => {
      one.show(value);
      output.textContent = describe(value);
    };
    one.input.addEventListener("input", () => { show(one.value()); change(one.value()); });
    return { element, input: one.input, label: name, show, value: one.value };
  }

  return { decades, each, inUnits, powers, range, slider };
});
