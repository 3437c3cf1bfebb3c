/* Printed pages are light: a dark page is printed in its light colours. The theme unfolds everything before it prints.
   The answer of an exercise is printed only if the reader has unfolded it, so a page can also be printed as an exercise
   sheet. */
(function () {
  "use strict";
  const name = "data-md-color-scheme";
  let before = null;
  window.addEventListener("beforeprint", () => {
    before = document.body.getAttribute(name);
    document.body.setAttribute(name, "default");
  });
  document.addEventListener("click", (event) => {
    const answer = event.target.closest(".exercise summary")?.parentElement;
    // A click on the summary, or its key, occurs before the change.
    if (answer) answer.classList.toggle("is-unfolded", !answer.open);
  });
  window.addEventListener("afterprint", () => { if (before) document.body.setAttribute(name, before); });
})();
