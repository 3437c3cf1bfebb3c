/* Paper is white: a dark page is printed in its light colours. */
(function () {
  "use strict";
  const name = "data-md-color-scheme";
  let before = null;
  window.addEventListener("beforeprint", () => {
    before = document.body.getAttribute(name);
    document.body.setAttribute(name, "default");
  });
  window.addEventListener("afterprint", () => { if (before) document.body.setAttribute(name, before); });
})();
