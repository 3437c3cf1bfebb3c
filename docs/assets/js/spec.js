/* The filter of the spec page. The address stores the choice, so that it can be shared. */
(function () {
  "use strict";
  const form = document.querySelector(".spec-filter");
  if (!form) return;
  // Each field, by its name in the address: spec.html?section=PREF&show=open-on-nccl&words=root
  const fields = {
    section: document.getElementById("spec-section"),
    show: document.getElementById("spec-verdict"),
    words: document.getElementById("spec-words"),
  };
  const count = document.getElementById("spec-count");
  const rows = [...document.querySelectorAll(".spec-row")];
  // Each headline with the elements after it, up to the next headline.
  const parts = [...document.querySelectorAll("article h2")].map((head) => {
    const inside = [];
    for (let one = head.nextElementSibling; one && one.tagName !== "H2"; one = one.nextElementSibling) inside.push(one);
    return { all: [head, ...inside], rows: inside.flatMap((one) => (one.matches(".spec-row") ? [one] : [...one.querySelectorAll(".spec-row")])) };
  });
  // The title of a row's section is the headline above it. The words of this title also find a row.
  const titles = new Map(parts.flatMap((part) => part.rows.map((row) => [row, part.all[0].firstChild.textContent])));
  const texts = rows.map((row) => `${titles.get(row)} ${row.textContent}`.toLowerCase());

  function apply() {
    const wanted = fields.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, n) => {
      const fits =
        (!fields.section.value || titles.get(row).split(":")[0] === fields.section.value) &&
        (!fields.show.value || row.dataset.tags.split(" ").includes(fields.show.value)) &&
        wanted.every((word) => texts[n].includes(word));
      row.hidden = !fits;
      shown += fits;
    });
    count.textContent = shown === rows.length ? `${shown} rows` : `${shown} of ${rows.length} rows`;
    // A headline without rows is hidden.
    for (const part of parts) {
      const hide = part.rows.length > 0 && part.rows.every((row) => row.hidden);
      part.all.filter((one) => !one.matches(".spec-row")).forEach((one) => { one.style.display = hide ? "none" : ""; });
    }
  }

  function keep() {
    const asked = new URLSearchParams();
    for (const [name, field] of Object.entries(fields)) if (field.value) asked.set(name, field.value);
    const query = asked.toString() ? `?${asked}` : "";
    history.replaceState(history.state, "", location.pathname + query + location.hash);
  }

  // The row or headline that the address names is always shown, below the filter, which stays visible.
  function toTarget() {
    document.documentElement.style.setProperty("--spec-filter", `${form.offsetHeight}px`);
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target || !target.matches(".spec-row, .spec-filter ~ h2, .spec-filter ~ h3")) return;
    if (!target.offsetParent) {
      for (const field of Object.values(fields)) field.value = "";
      apply();
      keep();
    }
    target.scrollIntoView();
  }

  const asked = new URLSearchParams(location.search);
  for (const [name, field] of Object.entries(fields)) {
    field.value = asked.get(name) || "";
    // If the option does not exist, a list has no selection.
    if (field.selectedIndex === -1) field.value = "";
    field.addEventListener("input", () => { apply(); keep(); });
  }
  apply();
  toTarget();
  window.addEventListener("load", toTarget);
  window.addEventListener("hashchange", toTarget);
  new ResizeObserver(() => document.documentElement.style.setProperty("--spec-filter", `${form.offsetHeight}px`)).observe(form);
})();
