/* Boxes that scroll sideways can be focused, so that the arrow keys scroll them, and have a name for screen readers:
   tables that the theme has put into a box, and code. The name is the heading above. Code is a group and not a region,
   because a page of source has too many blocks for a list of regions. */
(function () {
  "use strict";
  /* The text of the last heading above an element. */
  function heading(one) {
    const above = [...document.querySelectorAll("article :is(h1, h2, h3, h4, h5, h6)")]
      .filter((title) => title.compareDocumentPosition(one) & Node.DOCUMENT_POSITION_FOLLOWING);
    const title = above.at(-1)?.cloneNode(true);
    title?.querySelectorAll(".headerlink").forEach((link) => link.remove());
    return title?.textContent.trim() ?? "";
  }
  function update(one) {
    if (one.scrollWidth <= one.clientWidth || one.tabIndex >= 0 && one.hasAttribute("role")) return;
    const kind = one.matches("code") ? "Code" : "Table", title = heading(one);
    one.tabIndex = 0;
    one.setAttribute("role", kind === "Code" ? "group" : "region");
    one.setAttribute("aria-label", title ? `${kind}: ${title}` : kind);
  }
  window.addEventListener("load", () => {
    const observer = new ResizeObserver((entries) => entries.forEach((entry) => update(entry.target)));
    const boxes = ":is(.md-typeset__scrollwrap, pre > code)";
    document.querySelectorAll(`article ${boxes}`).forEach((one) => observer.observe(one));
    // Folded elements have their size now.
    document.addEventListener("toggle", (event) => event.target.querySelectorAll(boxes).forEach(update), true);
  });
})();
