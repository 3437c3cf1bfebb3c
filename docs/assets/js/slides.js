/* A lecture as slides: one at a time, by keys, buttons and the address. Without this script the page is a document. */
(function () {
  "use strict";
  const root = document.documentElement;
  const slides = [...document.querySelectorAll(".slides > .slide")];
  if (!slides.length) return;
  // The number of the shown slide, from 1; 0 while the page is a document.
  let shown = 0;

  function button(className, text, label, action) {
    const one = Object.assign(document.createElement("button"), { type: "button", className, textContent: text });
    one.setAttribute("aria-label", label);
    one.title = label;
    one.addEventListener("click", action);
    return one;
  }

  const start = button("slides-start md-button", "Show as slides", "Show as slides", () => show(1));
  document.querySelector(".slides").before(start);

  const position = Object.assign(document.createElement("output"), { className: "slides-position" });
  const notes = button("slides-notes", "Notes", "Speaker notes (n)", toggleNotes);
  const bar = Object.assign(document.createElement("div"), { className: "slides-bar" });
  bar.setAttribute("role", "toolbar");
  bar.setAttribute("aria-label", "Slides");
  bar.append(
    button("slides-previous", "\u2190", "Previous slide (arrow left)", () => show(shown - 1)),
    position,
    button("slides-next", "\u2192", "Next slide (arrow right)", () => show(shown + 1)),
    notes,
    button("slides-leave", "\u00d7", "Leave the slides (Escape)", leave)
  );
  document.querySelector(".slides").append(bar);
  toggleNotes(false);

  /* Reduces the size of all text until the slide fits. On a phone, a long slide scrolls instead. */
  function fit() {
    root.style.fontSize = "";
    if (!shown || window.innerWidth < 800) return;
    const slide = slides[shown - 1];
    const most = Math.min(window.innerWidth * 0.024, window.innerHeight * 0.04);
    for (let size = most; size > 9; size -= 0.5) {
      root.style.fontSize = `${size}px`;
      if (slide.scrollHeight <= slide.clientHeight) return;
    }
  }

  function show(number) {
    shown = Math.min(Math.max(number, 1), slides.length);
    root.classList.add("slides-on");
    slides.forEach((slide, n) => slide.classList.toggle("is-shown", n + 1 === shown));
    slides[shown - 1].scrollTop = 0;
    position.textContent = `${shown} / ${slides.length}`;
    bar.querySelector(".slides-previous").disabled = shown === 1;
    bar.querySelector(".slides-next").disabled = shown === slides.length;
    history.replaceState(history.state, "", `#slide-${shown}`);
    fit();
  }

  function leave() {
    if (!shown) return;
    const slide = slides[shown - 1];
    shown = 0;
    root.classList.remove("slides-on");
    slide.classList.remove("is-shown");
    history.replaceState(history.state, "", location.pathname + location.search);
    fit();
    slide.scrollIntoView();
    start.focus({ preventScroll: true });
  }

  function toggleNotes(wanted) {
    const isOn = root.classList.toggle("slides-with-notes", typeof wanted === "boolean" ? wanted : undefined);
    notes.setAttribute("aria-pressed", String(isOn));
    fit();
  }

  const keys = {
    ArrowRight: () => show(shown + 1),
    PageDown: () => show(shown + 1),
    ArrowLeft: () => show(shown - 1),
    PageUp: () => show(shown - 1),
    Home: () => show(1),
    End: () => show(slides.length),
    Escape: leave,
    n: toggleNotes,
    " ": (event) => show(shown + (event.shiftKey ? -1 : 1)),
  };

  // In the capturing phase, because the theme opens the next page when "n" is pressed.
  document.addEventListener("keydown", (event) => {
    if (!shown || event.ctrlKey || event.altKey || event.metaKey || !Object.hasOwn(keys, event.key)) return;
    if (event.target.closest("input, textarea, select")) return;
    // The space bar presses the focused button.
    if (event.key === " " && event.target.closest("button, a, summary")) return;
    event.preventDefault();
    event.stopPropagation();
    keys[event.key](event);
  }, true);

  /* Shows the slide that the address names. */
  function toTarget() {
    const found = /^#slide-(\d+)$/.exec(location.hash);
    if (found && Number(found[1]) !== shown) show(Number(found[1]));
  }
  window.addEventListener("hashchange", toTarget);
  window.addEventListener("resize", fit);
  // Paper shows all slides, with the size of the document.
  window.addEventListener("beforeprint", () => { root.style.fontSize = ""; });
  window.addEventListener("afterprint", fit);
  toTarget();
})();
